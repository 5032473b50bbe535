"""The scheduler's activity as server-sent events, for the page at /live; and the files of `--record`."""

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import NotPermitted, UnknownRecording
from server.http.bodies.errors import error_responses
from server.web.feed import LiveFeed, LiveView

_EVENTS = {"content": {"text/event-stream": {}}}
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _live(request: Request) -> LiveView:
    return request.app.state.live


router = APIRouter(prefix="/live", tags=["live view"])
LiveOf = Annotated[LiveView, Depends(_live)]


@router.get("/events", response_class=Response, responses={200: _EVENTS, **error_responses(429)})
async def events(live: LiveOf) -> Response:
    """Stream iterations, requests, slots and the server's status as they change, without prompts and outputs.

    Events are `hello` (the engine's sizes and its live requests) and `lines` (a list of what happened); see
    docs/pages.md. At most 20 messages a second are sent; a client that does not read misses some.
    """
    return _EventStream(live.feed)


@router.get("/files/{name}", response_class=FileResponse, responses=error_responses(403, 404))
async def recording(live: LiveOf, name: str) -> Response:
    """Get the file that `orca serve --record FILE` writes, or its predecessor (NAME.old).

    It has prompts and outputs, so a server with several API keys refuses.
    """
    return FileResponse(_recording(live, name), media_type="application/jsonl", headers=_HEADERS)


def _recording(live: LiveView, name: str) -> Path:
    if live.recording is None:
        raise UnknownRecording("this server does not record; start it with --record FILE")
    if live.is_shared:
        message = "a recording has the prompts of all clients, and this server has several API keys; "
        raise NotPermitted(message + "open the file itself at /live?file")
    for path in (live.recording, live.recording.with_name(f"{live.recording.name}.old")):
        if path.name == name and path.is_file():
            return path
    raise UnknownRecording(f"there is no recording of this name; this server writes {live.recording.name!r}")


class _EventStream(Response):
    """The response, which lasts until its client leaves or the feed ends."""

    media_type = "text/event-stream"

    def __init__(self, feed: LiveFeed) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._viewer = feed.join()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
            async for message in self._viewer:
                await send({"type": "http.response.body", "body": message, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def client_leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(write()), asyncio.create_task(client_leaves())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.leave(self._viewer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
