"""Rewrites links of the documents, which lead to files of the repository, for the site."""

import posixpath
import re

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# Documents outside docs/, by their place on the site.
PROJECT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "bench/LOG.md": "project/log.md",
}


def site_links(markdown: str, source: str, page: str) -> str:
    """Rewrite the links in the `markdown` of the repository's file `source` for the page `page` of the site.

    A link to a document goes to its page; one to a file that the site does not have becomes its name.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = PROJECT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if path == "README.md":
            place = "index.md"
        if place is not None:
            return f"[{text}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"
        return text if text.strip("`") in path else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
