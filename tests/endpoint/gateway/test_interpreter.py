"""Python's settings in a server: what is loaded is collected no more, and threads take short turns."""

import gc
import sys
from collections.abc import Iterator

import pytest

from server.commands import serve
from server.process import interpreter


@pytest.fixture
def as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


def test_what_is_loaded_is_looked_at_no_more(as_before: None) -> None:
    loaded = [[i] for i in range(1000)]
    interpreter.settle()
    later = [[i] for i in range(10)]
    looked_at = {id(each) for each in gc.get_objects()}
    assert not looked_at & {id(each) for each in loaded}
    assert {id(each) for each in later} <= looked_at
    assert sys.getswitchinterval() == pytest.approx(0.001)


def test_a_server_does_that_when_its_model_is_loaded() -> None:
    assert serve.settle is interpreter.settle
    assert "settle" in serve._load.__code__.co_names
