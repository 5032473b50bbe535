"""Logs lost workers: one line per loss, one per recovery, and one when the engine fails.

All lines are warnings or errors, so Python's default logging configuration shows them.
"""

import logging

from orca_jax.errors import EngineError, WorkerLost

LOGGER = logging.getLogger("orca.workers")


def log_loss(lost: WorkerLost, n_running: int) -> None:
    """A worker was lost. `n_running` requests were running; they run again after recovery."""
    consequence = "no request has to run again"
    if n_running:
        runs = "request runs" if n_running == 1 else "requests run"
        consequence = f"{n_running} {runs} again when the workers are up"
    LOGGER.warning("%s", _one_line(f"stage {lost.stage + 1} is lost: {lost.why}; {consequence}"))


def log_recovery(seconds: float) -> None:
    """The engine recovered, `seconds` after the loss."""
    LOGGER.warning("the workers are up again after %.2f seconds", seconds)


def log_failure(failure: EngineError) -> None:
    """The engine failed permanently."""
    LOGGER.error("%s", _one_line(f"the engine failed, and takes no more requests: {failure}"))


def _one_line(text: str) -> str:
    """`text` with unprintable characters replaced: a worker's error may have several lines."""
    return "".join(character if character.isprintable() else " " for character in text)
