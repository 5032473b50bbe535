import threading
import time

import numpy as np
import pytest

from orca_jax.errors import EngineError
from orca_jax.workers.mask_inbox import MaskInbox

SOON = 30.0


def words(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def inbox_of(patience: float = SOON) -> MaskInbox:
    made = MaskInbox()
    made.begin(1, patience)
    return made


def test_masks_can_arrive_early_and_in_any_order() -> None:
    inbox = inbox_of()
    inbox.put(1, 1, words(7))
    inbox.put(1, 0, words(5, 6))
    assert inbox.take(1, 0).tolist() == [5, 6]
    assert inbox.take(1, 1).tolist() == [7]


def test_a_wait_ends_when_they_come() -> None:
    inbox = inbox_of()
    threading.Timer(0.05, lambda: inbox.put(1, 3, words(9))).start()
    assert inbox.take(1, 3).tolist() == [9]


def test_masks_are_taken_once_and_the_wait_is_bounded() -> None:
    inbox = inbox_of(patience=0.02)
    inbox.put(1, 0, words(5))
    inbox.take(1, 0)
    with pytest.raises(EngineError, match=r"iteration 0 did not arrive within 0.02 seconds"):
        inbox.take(1, 0)


def test_a_new_epoch_ends_every_wait_and_forgets_what_came() -> None:
    inbox = inbox_of()
    inbox.put(1, 5, words(5))
    started = time.monotonic()
    threading.Timer(0.05, lambda: inbox.begin(2, 0.02)).start()
    with pytest.raises(EngineError, match="epoch 1 was abandoned"):
        inbox.take(1, 4)
    assert time.monotonic() - started < SOON / 2
    inbox.put(1, 6, words(6))  # late
    for iteration in (5, 6):
        with pytest.raises(EngineError, match="did not arrive"):
            inbox.take(2, iteration)
    inbox.put(2, 5, words(8))
    assert inbox.take(2, 5).tolist() == [8]
