"""A reply that begins with the params of a transfer, while the prompt is still computed."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_jax.errors import OrcaError
from server.http.bodies.errors import openai_body, trouble_of
from server.http.bodies.json_text import as_json_bytes
from server.http.generation.choices import Choices, CompleteChoice

OFFERED = "x-orca-offered"  # this header says that the first line of the JSON object has the params

_Write = Callable[[Sequence[CompleteChoice]], Awaitable[bytes]]


class OfferingReply(Response):
    """The response to a request whose `kv_transfer_params` have `offer_early`.

    Its first line, `{"kv_transfer_params": {...},`, is sent once another server may begin to fetch, and the
    rest of the object, by `write_rest`, when the choice is complete. A failure in between is an `error` in
    it. If there are no params before the end, it is an ordinary response, by `write_all`.
    """

    media_type = "application/json"

    def __init__(self, choices: Choices, write_rest: _Write, write_all: _Write) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._choices, self._write_rest, self._write_all = choices, write_rest, write_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = list(self.raw_headers)
        async with self._choices.running(receive) as requests:
            request = requests[0]
            lease = await request.offered()
            early = lease is not None and request.finish_reason is None
            if lease is not None and early:
                headers.append((OFFERED.encode(), b"1"))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                line = as_json_bytes({"kv_transfer_params": lease.as_dict()}).removesuffix(b"}") + b",\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
            try:
                complete = await self._choices.complete_all(requests)
                body = await (self._write_rest if early else self._write_all)(complete)
            except OrcaError as error:
                if not early:
                    raise
                body = as_json_bytes(openai_body(trouble_of(error)))
        if early:
            body = body.removeprefix(b"{")
        else:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
