"""The blocks that each cache kind takes for a request, counted by hand, and a toy kind in one file."""

import pytest

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.iteration.rows.beams import Beams
from orca_jax.request.beam_search import BeamSearch
from orca_jax.request.request import PLAIN, Request, RowKind
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling import cache_kinds
from orca_jax.scheduling.cache_kinds import blocks_at_first, slots_to_reserve
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock


def request(n_prompt: int, n_output: int, n_encoder: int = 0, kind: RowKind = PLAIN) -> Request:
    sampling = SamplingParams(max_tokens=n_output)
    ids, encoder_ids = tuple(range(n_prompt)), tuple(range(n_encoder))
    return Request("x", ids, n_prompt + n_output, sampling, 0, encoder_ids=encoder_ids, kind=kind)


@pytest.mark.parametrize(
    ("n_prompt", "n_output", "n_encoder", "n_beams", "at_first", "most"),
    [
        (8, 1, 0, None, 2, 3),  # 9 tokens in blocks of 4
        (7, 1, 0, None, 2, 2),
        (1, 11, 9, None, 4, 6),  # an encoder's 9 tokens share no block with the decoder's
        (1, 11, 8, None, 3, 5),
        (9, 7, 0, 3, 3, 8),  # beams share the prompt's 2 full blocks; each has 2 more
        (9, 7, 4, 1, 4, 5),
    ],
)
def test_blocks_by_hand(
    n_prompt: int, n_output: int, n_encoder: int, n_beams: int | None, at_first: int, most: int
) -> None:
    kind = PLAIN if n_beams is None else Beams(BeamSearch(n_beams, max_tokens=n_output))
    asked = request(n_prompt, n_output, n_encoder, kind)
    assert blocks_at_first(asked, 4) == at_first
    assert slots_to_reserve(asked, 4) == 4 * most


def test_after_a_preemption_the_output_needs_blocks_too() -> None:
    asked = request(7, 9, 5)
    asked.output_ids += [1, 2]
    assert blocks_at_first(asked, 4) == 3 + 2


class RecurrentState:
    """A toy kind: a recurrent layer's state, which takes two blocks whatever the request's length."""

    fixed = True

    def at_first(self, req: Request, block_size: int) -> int:
        return 2

    most = at_first


def serve(scheduling: SchedulingConfig, n_fixed: int) -> tuple[list[list[int]], int]:
    """Serve three requests of 3 + 5 tokens in nine blocks of 4 slots: their tokens, and the most at a time.

    Checks that each keeps its first `n_fixed` blocks for itself, from admission to end.
    """
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    pool = RequestPool(max_waiting=9, on_deliveries=lambda _: None, on_arrival=timeline.arrived)
    kv = KVManager(n_blocks=9, block_size=4, n_rows=8, max_blocks_per_row=9, max_encoder_blocks=2)
    config = ServingConfig(
        max_batch_size=4, n_slots=36, block_size=4, max_batch_tokens=64, scheduling=scheduling
    )
    scheduler = Scheduler(pool, SimulatedEngine(clock), kv, config=config, timeline=timeline)
    asked = [Request(str(i), (7, 8, 9), 8, SamplingParams(max_tokens=5), seed=i) for i in range(3)]
    for req in asked:
        pool.add(req)
    first_blocks: dict[Request, list[int]] = {}
    most = 0
    while scheduler.step():
        held = [req for req in asked if req.row >= 0]
        most = max(most, len(held))
        blocks = [block for req in held for block in kv.blocks_of(req.row).tolist()]
        assert len(blocks) == len(set(blocks))
        for req in held:
            first = kv.blocks_of(req.row)[:n_fixed].tolist()
            assert first_blocks.setdefault(req, first) == first
    assert (kv.n_free_blocks, scheduler.n_rsrv) == (9, 0)
    return [req.output_ids for req in asked], most


@pytest.mark.parametrize("scheduling", [ORCA, SchedulingConfig(prefix_caching=False)])
def test_a_toy_kind_is_reserved_allocated_kept_and_released(
    scheduling: SchedulingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, most = serve(scheduling, 0)
    assert most == 3
    monkeypatch.setattr(cache_kinds, "KINDS", (RecurrentState(), *cache_kinds.KINDS))
    assert serve(scheduling, 2) == (tokens, 2)
