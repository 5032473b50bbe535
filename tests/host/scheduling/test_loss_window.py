"""The window that limits restarts, against a list of all losses that is counted again each time."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from orca_jax.config import RestartBound
from orca_jax.scheduling.recovery import LossWindow

PEOPLE = ("a", "b", "c")


class Loss(NamedTuple):
    """A loss: its time, and the requests in flight."""

    time: int
    present: frozenset[str]


LOSSES = st.lists(
    st.builds(Loss, st.integers(0, 5), st.frozensets(st.sampled_from(PEOPLE)))  # time: since the one before
    | st.sampled_from(PEOPLE)  # who is forgiven
)


@given(LOSSES, st.integers(0, 4), st.integers(1, 12))
def test_the_window_counts_as_a_list_of_all_losses_does(
    steps: list[Loss | str], restarts: int, seconds: int
) -> None:
    window = LossWindow(RestartBound(restarts=restarts, seconds=seconds))
    now = 0
    losses: list[Loss] = []
    for step in steps:
        if isinstance(step, str):
            window.forgive(step)
            losses = [loss for loss in losses if step not in loss.present]
            continue
        now += step.time
        losses.append(Loss(now, step.present))
        recent = [loss for loss in losses if now - loss.time < seconds]
        assert window.add(now, step.present) == (len(recent) <= restarts)
        assert len(window) == len(recent)
