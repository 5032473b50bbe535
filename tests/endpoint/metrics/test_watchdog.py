"""Holds of the event loop and of the GIL are counted, and logged with what the loop is doing."""

import asyncio
import json
import threading
from collections.abc import Callable

import pytest

from server.gateway.gateway import Gateway
from server.process import watchdog
from server.process.watchdog import Watchdog
from server.web.feed import LiveFeed
from tests.endpoint.harness import serving
from tests.host.engines import SOON


class Clock:
    """Time that passes only when a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.late = 0.0  # of the next sleep

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late
        self.late = 0.0


def on_a_loop(scenario: Callable[[Watchdog, Clock], None]) -> None:
    """Run the scenario on a thread while a watched event loop runs."""

    async def main() -> None:
        clock = Clock()
        dog = Watchdog(asyncio.get_running_loop(), clock=lambda: clock.now, sleep=clock.sleep)
        await asyncio.to_thread(scenario, dog, clock)

    asyncio.run(asyncio.wait_for(main(), SOON))


def test_a_loop_that_answers_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    def scenario(dog: Watchdog, clock: Clock) -> None:
        for _ in range(3):
            dog.look()
        assert (dog.n_loop, dog.n_gil) == (0, 0)

    on_a_loop(scenario)
    assert not caplog.messages


def test_a_hold_of_the_gil(caplog: pytest.LogCaptureFixture) -> None:
    def scenario(dog: Watchdog, clock: Clock) -> None:
        clock.late = 0.3
        dog.look()
        assert (dog.n_loop, dog.n_gil) == (0, 1)
        assert dog.take_longest() == (0.0, pytest.approx(0.3))
        assert dog.take_longest() == (0.0, 0.0)

    on_a_loop(scenario)
    assert caplog.messages[0].startswith("the GIL was held for 300 ms or more; its thread is in ")


def test_recent_holds_are_kept_up_to_a_bound() -> None:
    def scenario(dog: Watchdog, clock: Clock) -> None:
        assert dog.since(0) == ([], 0)
        for late in (0.3, 0.01, 0.4):
            clock.late = late
            dog.look()
        (first, second), n = dog.since(0)
        assert (first.what, second.what, n) == ("gil", "gil", 2)
        assert (first.seconds, second.seconds) == (pytest.approx(0.3), pytest.approx(0.4))
        assert second.ended == clock.now
        assert dog.since(1) == ([second], 2) and dog.since(2) == ([], 2)
        for _ in range(watchdog._MOST_RECENT):
            clock.late = 0.5
            dog.look()
        holds, n = dog.since(1)
        assert n == 2 + watchdog._MOST_RECENT == 2 + len(holds)
        assert all(hold.seconds == pytest.approx(0.5) for hold in holds)

    on_a_loop(scenario)


def test_the_live_view_tells_of_holds_while_somebody_watches() -> None:
    clock = Clock()

    async def watch(gateway: Gateway) -> list[dict[str, object]]:
        dog = Watchdog(asyncio.get_running_loop(), clock=lambda: clock.now, sleep=clock.sleep)

        async def hold(seconds: float) -> None:
            clock.late = seconds
            await asyncio.to_thread(dog.look)

        await hold(0.2)
        feed = LiveFeed(gateway, watchdog=dog)
        viewer = feed.join()
        messages = aiter(viewer)
        await anext(messages)
        await hold(0.3)
        event = (await anext(messages)).decode()
        feed.leave(viewer)
        await feed.close()
        return json.loads(event.removeprefix("event: lines\ndata: "))

    with serving() as server:
        before = server.service.timeline.now()
        (line,) = asyncio.run_coroutine_threadsafe(watch(server.gateway), server.loop).result(SOON)
        assert (line["hold"], line["seconds"]) == ("gil", pytest.approx(0.3))
        assert isinstance(line["time"], float) and before <= line["time"] <= server.service.timeline.now()


def test_a_hold_of_the_loop_names_the_call(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LONG", 0.001)  # the real wait for an answer
    begun, go_on = threading.Event(), threading.Event()

    def what_holds_it() -> None:
        begun.set()
        assert go_on.wait(SOON)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = Clock()
        dog = Watchdog(loop, clock=lambda: clock.now, sleep=clock.sleep)
        looking = threading.Thread(target=dog.look)
        log = dog._log

        def logged(what: str, seconds: float) -> None:
            log(what, seconds)
            go_on.set()

        monkeypatch.setattr(dog, "_log", logged)

        def start() -> None:
            assert begun.wait(SOON)
            looking.start()

        starter = threading.Thread(target=start)
        starter.start()
        loop.call_soon(what_holds_it)
        await asyncio.sleep(0)
        await asyncio.to_thread(starter.join)
        await asyncio.to_thread(looking.join)
        assert dog.n_loop == 1

    asyncio.run(asyncio.wait_for(main(), SOON))
    (message,) = [message for message in caplog.messages if message.startswith("the event loop was held")]
    assert "what_holds_it (" in message
