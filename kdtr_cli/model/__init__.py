"""A model: its config, its weights, its rotary tables, its tokenizer, read from a Hugging Face folder or made anew.

Start at `kdtr_cli.model.source.open_model`.
"""

__all__: list[str] = []
