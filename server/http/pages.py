"""The pages for people: the playground, the live view and the API's documentation. They need no API key.

What they show they fetch from the API, which does. docs/pages.md describes them.
"""

from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter, HTTPException, Request, Response

from server.web.pages import HEADERS, PageFile, page_files

STATIC = "/static/"
PAGES = {"/": "index.html", "/live": "live.html", "/docs": "docs.html"}
_METHODS = ["GET", "HEAD"]


def pages_router() -> APIRouter:
    """The routes of the pages and their files, which are read now."""
    router = APIRouter(include_in_schema=False)
    files = page_files()

    for path, name in PAGES.items():
        router.add_api_route(path, partial(_page, files, name), methods=_METHODS)
    router.add_api_route(STATIC + "{name:path}", partial(_static, files), methods=_METHODS)
    return router


async def _page(files: Mapping[str, PageFile], name: str, request: Request) -> Response:
    return _answer(request, files, name)


async def _static(files: Mapping[str, PageFile], request: Request, name: str) -> Response:
    return _answer(request, files, name)


def _answer(request: Request, files: Mapping[str, PageFile], name: str) -> Response:
    file = files.get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
