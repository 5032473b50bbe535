"""Python's settings in a server: loaded objects are frozen, and the GIL switch interval is short."""

import gc
import json
import sys
from collections import deque
from collections.abc import Iterator

import pytest

from server.commands import loading
from server.http.bodies.json_text import parse
from server.process import watchdog


@pytest.fixture
def as_before() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.freeze()  # as tests/conftest.py does


def test_garbage_collection_skips_loaded_objects(as_before: None) -> None:
    loaded = [[i] for i in range(1000)]
    watchdog.settle()
    later = [[i] for i in range(10)]
    looked_at = {id(each) for each in gc.get_objects()}
    assert not looked_at & {id(each) for each in loaded}
    assert {id(each) for each in later} <= looked_at
    assert sys.getswitchinterval() == pytest.approx(0.001)


def test_a_long_body_is_read_without_a_full_collection(as_before: None) -> None:
    """A full collection would visit all of the body's objects while it holds the GIL."""
    part = {"type": "text", "text": "a"}
    data = json.dumps({"messages": [{"role": "user", "content": [part]}] * 33_000}).encode()
    watchdog.settle()
    seen: list[int] = []
    note = lambda phase, info: seen.append(info["generation"])  # noqa: E731
    gc.callbacks.append(note)
    try:
        parse(data)
    finally:
        gc.callbacks.remove(note)
    assert seen and 2 not in seen


def test_cycles_are_freed_in_service(as_before: None) -> None:
    """Cycles that were in use during younger collections wait for a full one."""
    alive = 0

    class Protocol:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            self.transport = [self]

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    watchdog.settle()
    open_now = deque[Protocol](maxlen=10_000)
    most = 0
    for _ in range(400_000):
        open_now.append(Protocol())
        most = max(most, alive)
    assert most < 250_000, most  # all 400,000 if full collections are rare


def test_a_server_applies_the_settings_when_its_model_is_loaded() -> None:
    assert loading.settle is watchdog.settle
    assert "settle" in loading.load_served.__code__.co_names
