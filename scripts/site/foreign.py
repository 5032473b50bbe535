"""Finds what a built page would load from another host."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADING = {
    **dict.fromkeys(
        ("script", "img", "iframe", "embed", "source", "video", "audio", "track", "input"), "src"
    ),
    "link": "href",
    "object": "data",
}
_ELSEWHERE = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"""(?:url\(|@import\s+)\s*['"]?([^'")\s]+)""")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        candidates = [values.get(_LOADING.get(tag, "")) or "", values.get("poster") or ""]
        candidates += [part.split()[0] for part in (values.get("srcset") or "").split(",") if part.strip()]
        candidates += _IN_STYLE.findall(values.get("style") or "")
        self.found += [f"<{tag}> {url}" for url in candidates if _ELSEWHERE.match(url)]


def foreign(folder: Path) -> Iterator[str]:
    """Resources that pages and style sheets in `folder` load from another host, with the file."""
    for path in sorted(folder.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        yield from (f"{path.relative_to(folder)}: {each}" for each in page.found)
    for path in sorted(folder.rglob("*.css")):
        for url in _IN_STYLE.findall(path.read_text(encoding="utf-8")):
            if _ELSEWHERE.match(url):
                yield f"{path.relative_to(folder)}: {url}"
