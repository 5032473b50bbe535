"""The files of the pages, read once, with the headers that every page gets."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

# Nothing inline and nothing from other hosts, so that text of strangers cannot run on a page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # no text ever becomes HTML
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-DNS-Prefetch-Control": "off",  # or the browser looks up the hosts of an answer's links
    "Cache-Control": "no-cache",  # ask again with the ETag, so that a new version shows at once
}

# Not the system's table, which differs from machine to machine; a browser runs no script of another type.
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "md": "text/plain; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """All files of the pages by their paths under static/."""
    return {path: _read(file) for path, file in _walk(files("server.web") / "static", "")}


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


def _read(file: Traversable) -> PageFile:
    content = file.read_bytes()
    kind = _TYPES[file.name.rpartition(".")[2]]
    return PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
