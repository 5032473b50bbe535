"""The pages for people: the playground, the live view and the API's documentation. They need no API key.

The pages fetch what they show from the API, which needs one. docs/pages.md describes them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

STATIC = "/static/"
PAGES = {"/": "index.html", "/live": "live.html", "/docs": "docs.html"}
_METHODS = ["GET", "HEAD"]
# Nothing inline and nothing from other hosts, so that nobody's text can run as code on a page.
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

# The system's own table differs between machines, and a browser runs no script of another type.
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the pages as a response sends it."""

    content: bytes
    media_type: str
    etag: str


def pages_router() -> APIRouter:
    """Make the routes of the pages and their files, which are read now."""
    router = APIRouter(include_in_schema=False)
    kept = page_files()
    for path, name in PAGES.items():
        router.add_api_route(path, partial(_page, kept, name), methods=_METHODS)
    router.add_api_route(STATIC + "{name:path}", partial(_static, kept), methods=_METHODS)
    return router


async def _page(kept: Mapping[str, PageFile], name: str, request: Request) -> Response:
    return _answer(request, kept, name)


async def _static(kept: Mapping[str, PageFile], request: Request, name: str) -> Response:
    return _answer(request, kept, name)


def _answer(request: Request, kept: Mapping[str, PageFile], name: str) -> Response:
    file = kept.get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def page_files() -> Mapping[str, PageFile]:
    """Read all files of the pages, by their paths under static/."""
    folder = Path(str(files("server.web") / "static"))
    return {path.relative_to(folder).as_posix(): _read(path) for path in folder.rglob("*") if path.is_file()}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
