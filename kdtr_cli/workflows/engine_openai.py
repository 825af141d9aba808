"""The engine ``openai``: a server that speaks OpenAI's completions, or llama.cpp's or SGLang's own protocol.

It is asked for token ids and the top log-probabilities of each step, one prompt after another. Answers are kept until
all are there: a server that fails in between leaves no bundle, and what stood under the output's name as it was.
"""

import time
from typing import Any

from kdtr_cli.errors import EngineError, InputError, KdtrError
from kdtr_cli.model.fields import shown
from kdtr_cli.model.prompts import Prompt
from kdtr_cli.workflows.engine_http import Server, exchange, parse_server, without_key
from kdtr_cli.workflows.engine_logprobs import Listed, as_sequences, finish_of, read_answers
from kdtr_cli.workflows.engines import Answer, Question

__all__ = ["openai"]

TOP = 20  #: log-probabilities a step, unless the URL says otherwise: what vLLM gives without --max-logprobs

REQUEST_S = 600.0  #: that one request may take where there is no --timeout

_MAX_NAME = 200


def openai(argument: str, question: Question) -> Answer:
    """Ask the server at the URL ``argument``.

    The path says which protocol: .../generate SGLang's, .../completion llama.cpp's, anything else OpenAI's completions.
    ?model=NAME and ?logprobs=K may stand behind it. InputError: a wrong URL, or a golden that samples.
    """
    server = parse_server(argument, ("model", "logprobs"))
    top = _count(server.options.get("logprobs", str(TOP)))
    if question.decoding.temperature > 0 and question.forced is None:
        raise InputError(
            "--engine openai: the golden samples, by a rule that no server has; --teacher-force compares its steps"
        )
    end = None if question.timeout is None else time.monotonic() + question.timeout
    try:
        return _answer(server, top, question, end)
    except KdtrError as error:
        raise type(error)(without_key(server, str(error))) from None


def _answer(server: Server, top: int, question: Question, end: float | None) -> Answer:
    asker = _Asker(server, top, question, end)
    answers = [asker.forced(index) if question.forced else asker.free(p) for index, p in enumerate(question.prompts)]
    about = {"values": "logprobs"} | ({"name": asker.model} if asker.model else {})
    return Answer(asker.protocol, as_sequences(answers, greedy=True), about)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) >= 1):
        raise InputError(f"--engine openai: logprobs={shown(text)} is no number of log-probabilities")
    return int(text)


class _Asker:
    """Asks a server prompt by prompt. ``model``: its name, as far as it says one."""

    def __init__(self, server: Server, top: int, question: Question, end: float | None) -> None:
        self.server, self.top, self.question, self.end = server, top, question, end
        self.model: str | None = None
        last = server.path.rpartition("/")[2]
        self.protocol = {"generate": "sglang", "completion": "llama.cpp"}.get(last, "completions")
        self.path = server.path
        if self.protocol == "completions":
            base = server.path.removesuffix("/completions")
            self.path = f"{base if base.endswith('/v1') else base + '/v1'}/completions"
            self._name = server.options.get("model") or self._only_model()
        elif "model" in server.options:
            raise InputError(f"--engine openai: ?model= is for /v1/completions; {server.path} has one model")

    def _exchange(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        end = time.monotonic() + REQUEST_S if self.end is None else self.end
        return exchange(self.server, path, body, end)

    def _only_model(self) -> str:
        """The one model that the server has; which of several is meant only the user knows."""
        listed = self._exchange(self.path.removesuffix("/completions") + "/models", None).get("data")
        names = [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        names = [name for name in names if isinstance(name, str)]
        if not names:
            raise EngineError(f"{self.server.name} names no model; ?model=NAME behind the URL does")
        if len(names) != 1:
            some = ", ".join(shown(name) for name in names[:4])
            raise InputError(
                f"--engine openai: {self.server.name} names {some} as its models; add ?model=NAME to the URL"
            )
        return names[0]

    def free(self, prompt: Prompt) -> Listed:
        """Let the server decode a prompt greedily to its end."""
        return self._ask(prompt.ids.tolist(), self.question.decoding.steps, prompt)

    def forced(self, index: int) -> Listed:
        """The log-probabilities of each step with the golden's tokens before it: one request a step, since no two
        servers have the same way to score a text."""
        prompt, tokens = self.question.prompts[index], self.question.forced[index].tolist()
        ids = prompt.ids.tolist()
        steps = [self._step(ids + tokens[:step], prompt) for step in range(len(tokens))]
        rows = [answer.rows[0] if answer.rows else None for answer in steps]
        chosen = [answer.tokens[0] for answer in steps]
        return Listed(tokens, finish_of(tokens, self.question.decoding), rows, chosen=chosen)

    def _step(self, ids: list[int], prompt: Prompt) -> Listed:
        answer = self._ask(ids, 1, prompt)
        if len(answer.tokens) != 1:
            raise EngineError(f"{self._where(prompt)}: {len(answer.tokens)} tokens where one was asked for")
        return answer

    def _where(self, prompt: Prompt) -> str:
        return f"{self.server.name}, sequence {shown(prompt.id)}"

    def _ask(self, ids: list[int], steps: int, prompt: Prompt) -> Listed:
        document = self._exchange(self.path, self._body(ids, steps))
        where = self._where(prompt)
        answers = read_answers(document, where)
        if len(answers) != 1:
            raise EngineError(f"{where}: {len(answers)} answers to one prompt")
        answer = answers[0]
        if (answer.prompt is not None and answer.prompt != ids) or answer.prompt_length not in (None, len(ids)):
            raise EngineError(f"{where}: the server did not read the {len(ids)} ids that it was sent as its prompt")
        self._note_model(document.get("model"))
        return answer

    def _note_model(self, name: object) -> None:
        if isinstance(name, str) and self.model is None:
            last = name.rstrip("/").rpartition("/")[2]  # llama.cpp names the path of its file
            last = without_key(self.server, last)
            self.model = last if last.isprintable() and 0 < len(last) <= _MAX_NAME else None

    def _body(self, ids: list[int], steps: int) -> dict[str, Any]:
        """Greedy decoding with nothing added, nothing forbidden, nothing kept from earlier requests."""
        decoding = self.question.decoding
        stop = [] if decoding.ignore_eos else list(decoding.stop_ids)
        if self.protocol == "sglang":
            sampling = {
                "temperature": 0,
                "max_new_tokens": steps,
                "ignore_eos": decoding.ignore_eos,
                "stop_token_ids": stop,
                "skip_special_tokens": False,
            }
            return {
                "input_ids": ids,
                "sampling_params": sampling,
                "return_logprob": True,
                "top_logprobs_num": self.top,
                "stream": False,
            }
        common = {"prompt": ids, "temperature": 0, "stream": False, "ignore_eos": decoding.ignore_eos, "seed": 0}
        if self.protocol == "llama.cpp":
            return {
                **common,
                "n_predict": steps,
                "n_probs": self.top,
                "return_tokens": True,
                "cache_prompt": False,
                "repeat_penalty": 1.0,
                "post_sampling_probs": False,
            }
        return {
            **common,
            "model": self._name,
            "max_tokens": steps,
            "logprobs": self.top,
            "n": 1,
            "echo": False,
            "stop_token_ids": stop,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "repetition_penalty": 1.0,
            "cache_prompt": False,
        }
