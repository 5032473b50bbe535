"""The log of lost workers: a line for each loss, one when they are up again, one when the engine failed.

All are warnings or errors, so that they are shown as things are by default.
"""

import logging

from orca_jax.errors import EngineError, WorkerLost

LOGGER = logging.getLogger("orca.workers")


def log_loss(lost: WorkerLost, n_again: int) -> None:
    """A worker is lost; `n_again` requests were running, and will again."""
    again = "no request has to run again"
    if n_again:
        runs = "request runs" if n_again == 1 else "requests run"
        again = f"{n_again} {runs} again when the workers are up"
    LOGGER.warning("%s", _one_line(f"stage {lost.stage + 1} is lost: {lost.why}; {again}"))


def log_recovery(seconds: float) -> None:
    """The engine is up again, `seconds` after the loss."""
    LOGGER.warning("the workers are up again after %.2f seconds", seconds)


def log_failure(failure: EngineError) -> None:
    """The engine failed for good."""
    LOGGER.error("%s", _one_line(f"the engine failed, and takes no more requests: {failure}"))


def _one_line(text: str) -> str:
    """What a worker says of its trouble may have many."""
    return "".join(character if character.isprintable() else " " for character in text)
