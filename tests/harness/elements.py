"""What an HTML parser finds in a page."""

from __future__ import annotations

from html.parser import HTMLParser

from launcher.pages.html import read_plotly


class Elements(HTMLParser):
    """The elements of a page, with their attributes and the text within each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.ids: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.found]


def without_plotly(page: str) -> str:
    """The page without Plotly, which is long."""
    return page.replace(read_plotly(), "")
