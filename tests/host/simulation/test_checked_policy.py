"""A policy that breaks an invariant is named by the simulation, with the turn and why."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import BadPolicy, ConfigError
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.policy import Choice, OrcaPolicy
from orca_jax.scheduling.request_pool import split
from orca_jax.scheduling.serving_policy import ServingPolicy
from orca_jax.simulation.simulation import Simulation

PATIENCE = 40
FULL = {"chunked_prefill": False, "prefix_caching": False, "reservation": "full"}


def simulation(
    policy: str,
    lengths: Iterable[tuple[int, int]],
    *,
    max_bs: int = 2,
    n_slots: int = 64,
    overlap: bool = True,
    **scheduling: Any,
) -> Simulation:
    """Requests of these input and output tokens, which arrive a second apart."""
    made = Simulation(
        ServingConfig(
            max_batch_size=max_bs,
            n_slots=n_slots,
            block_size=4,
            max_batch_tokens=64,
            overlap=overlap,
            scheduling=SchedulingConfig(policy=f"{__name__}:{policy}", **scheduling),
        ),
        patience=PATIENCE,
    )
    for i, (n_input, n_output) in enumerate(lengths):
        sampling = SamplingParams(max_tokens=n_output)
        made.add_at(float(i), Request(f"r{i}", (i + 1,) * n_input, n_input + n_output, sampling, seed=i))
    return made


class Reordered(OrcaPolicy):
    """Algorithm 1 with the newest of the waiting requests first."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        admitted, waiting = split(pool)
        return super().choose([*admitted, *reversed([*waiting])], n_rsrv, ahead, alone)


class WaitingFirst(Reordered):
    """A waiting request that does not fit stops the loop before any admitted one."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        admitted, waiting = split(pool)
        return OrcaPolicy.choose(self, [*waiting, *admitted], n_rsrv, ahead, alone)


class Leaks(OrcaPolicy):
    """Forgets to count what it reserves."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        return super().choose(pool, n_rsrv, ahead, alone)._replace(n_rsrv=n_rsrv)


class Greedy(OrcaPolicy):
    """Admits more than there are slots for."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        self.n_slots = 1 << 20
        return super().choose(pool, n_rsrv, ahead, alone)


class Twice(OrcaPolicy):
    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        choice = super().choose(pool, n_rsrv, ahead, alone)
        return choice._replace(rows=choice.rows * 2)


class Starves(ServingPolicy):
    """The newest request goes first, and preempts all others."""

    def order(self, req: Request) -> tuple[float, ...]:
        return -req.arrival, 0

    def gives_way(self, admitted: Request, waiting: Request) -> bool:
        return True


class Thrashes(ServingPolicy):
    """Preempts every prompt after its first chunk."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        victims = [
            req
            for req in split(pool)[0]
            if not req.n_in_flight and req.n_partial == 0 and 0 < req.n_computed < req.n_input
        ]
        if not victims:
            return super().choose(pool, n_rsrv, ahead, alone)
        n_left = (
            self._kv.n_blocks - self._kv.n_free_blocks - self._kv.n_released([req.row for req in victims])
        )
        return Choice([], n_left * self._kv.block_size, preempted=victims)


def broken(made: Simulation) -> BadPolicy:
    """The error with which the simulation refuses the policy."""
    with pytest.raises(BadPolicy) as error:
        for _, _turn in zip(range(5_000), made.steps(), strict=False):
            pass
    assert str(error.value) == f"turn {error.value.turn} of the policy: {error.value.why}"
    return error.value


def test_a_reordered_pool_is_not_sorted_by_arrival_again() -> None:
    made = simulation("Reordered", [(4, 8), (4, 2), (4, 2), (4, 2)], max_bs=1, **FULL)
    ran = dict.fromkeys(name for each in made.run().iterations for name in each.request_ids)
    assert list(ran) == ["r0", "r3", "r2", "r1"]


def test_algorithm_1_says_which_options_it_cannot_have() -> None:
    with pytest.raises(ConfigError, match=r"is an OrcaPolicy.*--no-chunked-prefill --reservation full"):
        simulation("Reordered", [])


def test_an_empty_batch() -> None:
    error = broken(simulation("WaitingFirst", [(8, 24), (8, 40)], n_slots=48, **FULL))
    assert "the batch is empty, nothing is in flight, and 2 requests (r0, r1) could run" in error.why


def test_a_leak() -> None:
    error = broken(simulation("Leaks", [(8, 8)], **FULL))
    assert (error.turn, error.why[:60]) == (
        2,
        "n_rsrv is 0, but requests hold 4 blocks of 4 slots; the last"[:60],
    )


def test_more_slots_than_there_are() -> None:
    error = broken(simulation("Greedy", [(8, 40), (8, 40)], **FULL))
    assert "the rows need 12 more blocks, and 4 are free" in error.why


def test_two_rows() -> None:
    assert "request r0 has two rows" in broken(simulation("Twice", [(8, 4)], **FULL)).why


def test_starvation() -> None:
    error = broken(simulation("Starves", [(4, 8)] * 200, max_bs=1))
    assert "starves: it has had no row for" in error.why


def test_preemption_without_end() -> None:
    error = broken(simulation("Thrashes", [(100, 8)], n_slots=128, overlap=False, prefix_caching=False))
    assert "no token was computed for the first time in 40 turns, while 1 requests (r0) wait" in error.why
