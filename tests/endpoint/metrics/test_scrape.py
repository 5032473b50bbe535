"""Scrapes of `/metrics`, which need no key: rendered off the event loop, one at a time."""

import asyncio
import threading

import pytest

from server.gateway.gateway import Gateway
from server.metrics import metrics as server_metrics
from server.metrics.metrics import Metrics
from tests.host.engines import SOON


class Rendering:
    """A stand-in for the real rendering that waits for the test and counts calls."""

    def __init__(self) -> None:
        self.n = 0
        self.threads: set[int] = set()
        self.let = threading.Event()

    def __call__(self, _: object) -> bytes:
        self.n += 1
        self.threads.add(threading.get_ident())
        assert self.let.wait(SOON)
        if self.n == 3:
            raise RuntimeError("the third fails")
        return b"rendering %d" % self.n


def test_concurrent_scrapes_share_one_rendering_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = Rendering()
    monkeypatch.setattr(server_metrics, "generate_latest", rendering)

    async def run() -> None:
        metrics = Metrics(Gateway())
        first = asyncio.create_task(metrics.scrape())
        await asyncio.sleep(0)
        others = [asyncio.create_task(metrics.scrape()) for _ in range(7)]
        await asyncio.sleep(0)  # this returns only if the event loop is not blocked
        first.cancel()  # the client that started it has gone; the others have not
        await asyncio.sleep(0)
        rendering.let.set()
        async with asyncio.timeout(SOON):
            assert await asyncio.gather(*others) == [b"rendering 1"] * 7
            assert first.cancelled()
            assert await metrics.scrape() == b"rendering 2", "a later scrape has figures of its own"
            with pytest.raises(RuntimeError, match="the third fails"):
                await metrics.scrape()
            assert await metrics.scrape() == b"rendering 4"

    asyncio.run(run())
    assert threading.get_ident() not in rendering.threads


def test_a_scrape_has_the_state_of_the_event_loop() -> None:
    async def run() -> tuple[bytes, bytes]:
        gateway = Gateway()
        metrics = Metrics(gateway)
        before = await metrics.scrape()
        tasks = [asyncio.create_task(asyncio.sleep(SOON)) for _ in range(5)]
        await gateway.drain(0)
        after = await metrics.scrape()
        for task in tasks:
            task.cancel()
        return before, after

    before, after = asyncio.run(run())
    assert b"orca_asyncio_tasks 1.0" in before and b"orca_asyncio_tasks 6.0" in after
    assert b'orca_server_phase{phase="draining"} 1.0' in after


def test_a_refusal_is_counted_without_a_path() -> None:
    async def run() -> bytes:
        metrics = Metrics(Gateway())
        metrics.http_refusal(431)
        return await metrics.scrape()

    assert b'orca_http_requests_total{method="other",path="other",status="431"} 1.0' in asyncio.run(run())
