"""Pages are faulted in ahead of their first write, and only so many of them; contents stay."""

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from orca_jax.execution import prefault
from orca_jax.execution.prefault import Prefault
from tests.endpoint.harness import until

PAGE = mmap.PAGESIZE
N, EACH = 256, 128 << 10  # 32 MiB


def resident(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """1 for each page of an array that is in memory, by the system's account, and 0 for the others."""
    start = -(-array.ctypes.data // PAGE) * PAGE
    n = (array.ctypes.data + array.nbytes - start) // PAGE
    found = np.zeros(n, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(start, n * PAGE, found.ctypes.data) == 0
    return found & 1


def fresh() -> np.ndarray[Any, Any]:
    """An array whose pages nobody has used, unlike malloc's may be."""
    return np.frombuffer(mmap.mmap(-1, N * EACH), np.uint8).reshape(N, EACH)


def rests(one: Prefault) -> bool:
    return one._thread is None


def can_populate() -> bool:
    return prefault._populate(np.empty((1, 8 * PAGE), np.uint8))


@pytest.mark.skipif(not can_populate(), reason="the system cannot populate memory (Linux before 5.14)")
def test_pages_are_ready_ahead_of_writes_and_no_further() -> None:
    array = fresh()
    assert not resident(array[:-1]).any()
    ahead = Prefault([array], lead_bytes=4 << 20)
    until(lambda: rests(ahead), "the end of the thread")
    assert resident(array[:32]).all()
    assert not resident(array[64:]).any(), "a huge page more at most"
    array[:100] = 7
    ahead.reach(99)
    until(lambda: rests(ahead), "the end of the thread")
    assert resident(array[:131]).all() and not resident(array[164:]).any()
    assert (array[:100] == 7).all(), "what was written before its pages were taken"
    ahead.reach(N - 1)
    until(lambda: rests(ahead), "the end of the thread")
    assert resident(array).all() and (array[:100] == 7).all()
    ahead.close()


def test_a_small_step_back_or_on_takes_nothing() -> None:
    array = fresh()
    ahead = Prefault([array], lead_bytes=4 << 20)
    until(lambda: rests(ahead), "the end of the thread")
    goal = ahead._goal
    for index in (0, 3, 15):
        ahead.reach(index)
    assert ahead._goal == goal == 32 and rests(ahead)
    ahead.reach(16)
    assert ahead._goal == 48
    ahead.close()
    ahead.close()


def test_nothing_is_taken_once_it_is_closed_or_where_the_system_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[int]()

    def refused(array: np.ndarray[Any, Any]) -> bool:
        calls.append(len(array))
        return False

    monkeypatch.setattr(prefault, "_populate", refused)
    array = fresh()
    ahead = Prefault([array], lead_bytes=4 << 20)
    until(lambda: rests(ahead), "the end of the thread")
    ahead.reach(N - 1)
    assert rests(ahead) and calls == [8], "after the first refusal it asks no more"
