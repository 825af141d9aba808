"""The report as one HTML file that needs nothing else: page.html is its frame, page.css and the scripts are put
into it."""

__all__: list[str] = []
