"""Beam searches among other requests, over random traces on the simulated engine.

After each turn the K/V manager's counts agree with its tables. A model of the slots checks in every iteration
that each beam reads the prompt and its own tokens, however blocks were shared, copied and released. A failing
seed can be replayed.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.errors import EngineError
from orca_jax.iteration.rows.beams import Beams
from orca_jax.request.beam_search import begin_search
from orca_jax.request.request import FinishReason, Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.beam_blocks import most_blocks
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.scheduling.restart import run_again
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.simulation.simulation import Simulation

N_TRACES = 10_000


class MemoryEngine:
    """Checks between scheduler and engine that beams read only what iterations wrote for them."""

    def __init__(self, simulation: Simulation) -> None:
        self.engine, self.kv = simulation.engine, simulation.kv
        self.n_workers, self.keeps_tokens = self.engine.n_workers, self.engine.keeps_tokens
        self.n_copies = 0
        self._slots: dict[int, Any] = {}
        self._outputs: dict[Request, list[tuple[int, ...]]] = {}  # of each beam

    def lose(self) -> None:
        self._slots.clear()

    def issue(self, rows: Sequence[Row]) -> Iteration:
        self._copy(rows)
        for req, n_tokens in rows:
            start, end = req.n_computed, req.n_computed + n_tokens
            if not isinstance(req.kind, Beams) or req.in_initiation:
                self._outputs[req] = [()]
                known = [
                    (*req.prompt_ids[: i + 1], *([req.request_id] * (i >= len(req.prompt_ids))))
                    for i in range(end)
                ]
                self._read_and_write(req.row, known, start, own=isinstance(req.kind, Beams))
                continue
            before, beams = self._outputs[req], req.kind.search
            newest = list(zip(beams.parents, beams.last_ids, strict=True))
            outputs = self._outputs[req] = [(*before[parent], token) for parent, token in newest]
            rows_of_beams = self.kv.beams.rows_of(req.row)
            assert len(set(rows_of_beams)) == len(outputs) <= req.kind.n_rows
            for row, output in zip(rows_of_beams, outputs, strict=True):
                tokens = (*req.prompt_ids, *output)
                assert len(tokens) == end
                self._read_and_write(row, [tokens[: i + 1] for i in range(end)], start, own=True)
        return self.engine.issue(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        return self.engine.wait(iteration, interrupted)

    def _copy(self, rows: Sequence[Row]) -> None:
        """A block is copied only where two beams write after it."""
        size = self.kv.block_size
        expected = 0
        for req, _ in rows:
            if isinstance(req.kind, Beams) and not req.in_initiation and req.n_computed % size:
                expected += len(req.kind.parents) - len(set(req.kind.parents))
        assert len(self.kv.copies) == expected
        assert not {into for _, into in self.kv.copies} & {source for source, _ in self.kv.copies}
        self.n_copies += expected
        for source, into in self.kv.copies:
            for i in range(size):
                self._slots[into * size + i] = self._slots.get(source * size + i)

    def _read_and_write(self, row: int, known: Sequence[Any], start: int, *, own: bool) -> None:
        size, blocks = self.kv.block_size, self.kv.blocks_of(row).tolist()
        slots = [blocks[i // size] * size + i % size for i in range(len(known))]
        for i, (slot, content) in enumerate(zip(slots, known, strict=True)):
            if i >= start:
                self._slots[slot] = content
            elif own:
                assert self._slots.get(slot) == content, f"slot {slot} at {i}"


def check_blocks(scheduler: Scheduler) -> None:
    """Check that each block is free or held as often as the manager says; beams write only to their own."""
    kv = scheduler.kv
    requests = [*scheduler.pool.admitted(), *scheduler.leaving]
    held = Counter[int]()
    n_promised = 0
    for req in requests:
        rows = kv.beams.rows_of(req.row)
        own = {block for row in rows for block in kv.blocks_of(row).tolist()}
        held.update(own)
        if isinstance(req.kind, Beams):
            n_promised += kv.beams.promised(req.row)
            lasts = [kv.blocks_of(row).tolist()[-1] for row in rows]
            assert len(set(lasts)) == len(rows)
    assert kv.n_free_blocks + n_promised + len(held) == kv.n_blocks
    if kv.prefixes is None:
        assert all(n == 1 for n in held.values())
    assert scheduler.n_rsrv == (kv.n_blocks - kv.n_free_blocks) * kv.block_size
    assert kv.n_free_rows + sum(req.kind.n_rows for req in requests) == kv.n_rows


def random_config(rng: random.Random, n_blocks: int, block_size: int, longest: int) -> ServingConfig:
    max_bs = rng.randint(4, 8)
    switches = {
        "chunked_prefill": rng.random() < 0.5,
        "prefix_caching": rng.random() < 0.5,
        "reservation": rng.choice(("full", "on-demand")),
        "scheduling_policy": rng.choice(("fcfs", "priority", "fair")),
    }
    return ServingConfig(
        max_batch_size=max_bs,
        n_slots=n_blocks * block_size,
        block_size=block_size,
        max_batch_tokens=max(max_bs, longest) + rng.choice((0, 5)),
        overlap=rng.random() < 0.6,
        scheduling=ORCA if rng.random() < 0.3 else SchedulingConfig(**switches),
    )


def play(seed: int) -> int:
    """Play a trace; returns how many blocks were copied."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 5)
    requests: list[Request] = []
    for i in range(rng.randint(1, 6)):
        n_input, n_output, width = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 4)
        prompt = tuple(rng.choice(((1, 2, 3, 4, 5, 6, 7, 8, 9), (i, 9, 8, 7, 6, 5, 4, 3, 2)))[:n_input])
        is_search = rng.random() < 0.6
        sampling = SamplingParams(
            max_tokens=n_output,
            use_beam_search=is_search,
            best_of=width if is_search else None,
            early_stopping=rng.choice((True, False, "never")) if is_search else False,
        )
        end = frozenset(rng.sample(range(251), 3))
        kind = Beams(begin_search(sampling, end))
        priority = rng.choice((0, 0, 1))
        requests.append(
            Request(str(i), prompt, n_input + n_output, sampling, i, end, kind=kind, priority=priority)
        )
    longest = max(req.max_tokens for req in requests)
    sizes = [(len(req.prompt_ids), req.max_tokens, req.kind.n_rows, block_size) for req in requests]
    n_blocks = max(most_blocks(*size) for size in sizes) + rng.choice((0, 0, 2, 20))
    config = random_config(rng, n_blocks, block_size, longest)
    simulation = Simulation(config, n_workers=rng.choice((1, 1, 2)))
    scheduler = simulation.scheduler
    memory = MemoryEngine(simulation)
    scheduler.engine = memory
    for req in requests:
        simulation.add_at(rng.choice((0.0, 1.0, 3.0, 5.0)), req)
    for _ in range(rng.choice((0, 0, 1, 2))):
        simulation.end_at(rng.uniform(0, 15), str(rng.randrange(len(requests))), FinishReason.CANCELLED)
    losses = {rng.randrange(25) for _ in range(rng.choice((0, 0, 1, 3)))}
    steps = simulation.steps()
    for turn in range(2_000):
        if turn in losses:
            simulation.engine.fail(rng.choice(("issue", "wait")))
        try:
            if next(steps, steps) is steps:
                break
        except EngineError:
            memory.lose()
            run_again(scheduler)
            steps = simulation.steps()
        check_blocks(scheduler)
    else:
        raise AssertionError("it does not end")
    assert not simulation.pool.admitted() and scheduler.n_rsrv == 0
    assert simulation.kv.n_free_blocks == n_blocks and simulation.kv.n_free_rows == simulation.kv.n_rows
    for req in requests:
        assert req.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) or req.ending or req.n_losses > 1
        if isinstance(req.kind, Beams) and req.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert len(req.kind.search.finished) == req.kind.n_rows
    return memory.n_copies


def test_random_traces_leak_no_block_and_copy_only_what_two_beams_write_to() -> None:
    assert sum(map(play, range(300))) > 300


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_traces(part: int) -> None:
    for seed in range(300 + part, N_TRACES, 4):
        play(seed)
