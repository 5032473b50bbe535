"""An endpoint process's gateway and an engine's service, linked by a line within this process."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orca_jax.service.orca import Orca
from server.endpoint_processes.engine_side import EngineSide
from server.endpoint_processes.line import Line
from server.endpoint_processes.main import EngineLine
from server.endpoint_processes.messages import Accepted, Delivered, Loaded, Refused
from server.endpoint_processes.remote_service import RemoteService
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from tests.host.engines import CONFIG, LETTERS, MODEL, SOON


def loaded(service: Orca) -> Loaded:
    return Loaded(
        name="test",
        config=MODEL,
        serving=CONFIG,
        tokenizer=LETTERS,
        chat_template=None,
        tool_format=None,
        reasoning_format=None,
        defaults=ServedModel.__dataclass_fields__["defaults"].default,
        shows_versions=False,
        pooling=service.pooling,
        created=0,
    )


class Link:
    """The two ends, and the gateway before the remote one."""

    def __init__(self, gateway: Gateway, remote: RemoteService, side: EngineSide, line: Line) -> None:
        self.gateway, self.remote, self.side, self.line = gateway, remote, side, line
        self.seen = list[int]()


@asynccontextmanager
async def linked(service: Orca) -> AsyncIterator[Link]:
    """A link to a service that runs. At its end no request is live at either end."""
    ours, theirs = socket.socketpair()
    line = Line(ours, "test")
    link: Link
    side = EngineSide(
        line,
        service,
        "test",
        on_report=lambda report: None,
        on_drained=lambda drained: None,
        on_seen=lambda number: link.seen.append(number),
    )
    service.on_published = side.flush
    reader = threading.Thread(target=side.serve)
    reader.start()

    def take(message: object) -> None:
        match message:
            case Delivered():
                remote.delivered(message)
            case Accepted():
                remote.accepted(message)
            case Refused():
                remote.refused(message)
            case _:
                raise AssertionError(message)

    loop = asyncio.get_running_loop()
    transport, end = await loop.create_connection(lambda: EngineLine(take, lambda: None), sock=theirs)
    facts = loaded(service)
    remote = RemoteService(facts, end.send)
    gateway = Gateway()
    gateway.open(ServedModel(name="test", service=remote, config=MODEL, serving=CONFIG, tokenizer=LETTERS))
    link = Link(gateway, remote, side, line)
    try:
        async with asyncio.timeout(SOON):
            yield link
    finally:
        service.on_published = None
        transport.close()
        await asyncio.to_thread(reader.join, SOON)
        await asyncio.to_thread(line.close)
    assert gateway.n_live == 0
