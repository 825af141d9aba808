"""The report as one HTML file that needs nothing else: page.html is its frame, page.css and page.js are put into it."""

__all__: list[str] = []
