"""The host tier's books: which blocks are found there, and what is copied. Nothing but hashes and numbers.

That each block which is read in holds exactly its request's tokens is checked over random traces in
test_serving_policy.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.config import SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.scheduling.host_tier import HostCopies, HostTier
from orca_jax.scheduling.restart import change_weights, compute_all_again
from orca_jax.scheduling.tier_costs import TierCosts
from orca_jax.simulation.simulation import Simulation
from tests.host.scheduling.found_tokens import asked, run

SIZE = 4  # of a block


def a_hash(i: int) -> bytes:
    return i.to_bytes(32, "little")


def held(tier: HostTier, n: int) -> list[int]:
    return [i for i in range(n) if a_hash(i) in tier]


def test_blocks_go_out_to_the_place_of_the_one_used_longest_ago() -> None:
    tier = HostTier(2)
    tier.store(a_hash(0), 5)
    tier.store(a_hash(1), 6)
    assert tier.copies == HostCopies([(5, 0), (6, 1)], [])
    tier.begin()
    tier.store(a_hash(0), 9)  # it is here already: nothing to copy, but it is used
    assert tier.copies == HostCopies([], [])
    tier.store(a_hash(2), 7)
    assert (held(tier, 3), tier.copies) == ([0, 2], HostCopies([(7, 1)], []))
    assert (tier.n_stored, tier.n_evicted, len(tier)) == (3, 1, 2)


def test_of_two_blocks_for_one_place_in_one_iteration_the_last_is_copied() -> None:
    tier = HostTier(1)
    tier.store(a_hash(0), 5)
    tier.store(a_hash(1), 6)
    assert (held(tier, 2), tier.copies) == ([1], HostCopies([(6, 0)], []))


def test_a_prompt_reads_in_what_follows_one_after_another() -> None:
    tier = HostTier(8)
    for i in (2, 3, 5):
        tier.store(a_hash(i), 10 + i)
    tier.begin()
    hashes = [a_hash(i) for i in range(8)]
    assert [tier.find(hashes, first, 8) for first in range(8)] == [0, 0, 2, 1, 0, 1, 0, 0]
    assert tier.find(hashes, 2, 3) == 1
    tier.hold(hashes[2:4])
    tier.read(hashes[2:4], [20, 21])
    assert tier.copies == HostCopies([], [(0, 20), (1, 21)])
    assert held(tier, 8) == [2, 3, 5] and tier.n_read == 2, "they stay"


def test_a_held_block_keeps_its_place_until_the_iteration_is_issued() -> None:
    tier = HostTier(2)
    tier.store(a_hash(0), 0)
    tier.store(a_hash(1), 1)
    tier.begin()
    tier.hold([a_hash(0), a_hash(1)])
    tier.store(a_hash(2), 2)
    assert held(tier, 3) == [0, 1] and tier.copies.out == []
    tier.read([a_hash(0), a_hash(1)], [7, 8])
    tier.begin()
    tier.store(a_hash(2), 2)
    assert held(tier, 3) == [0, 2], "of a prompt's blocks the last goes first"


def test_a_block_for_which_no_place_is_left_is_dropped() -> None:
    tier = HostTier(1)
    place = tier.take_place(0)
    assert place == 0, "somebody else writes there"
    tier.store(a_hash(1), 5)
    assert (held(tier, 2), tier.copies.out) == ([], [])


@given(st.lists(st.tuples(st.sampled_from("sh"), st.integers(0, 9)), max_size=60), st.integers(1, 5))
def test_no_place_has_two_blocks(steps: list[tuple[str, int]], n: int) -> None:
    tier, content = HostTier(n), dict[int, int]()
    for step, i in steps:
        tier.begin()
        if step == "s":
            tier.store(a_hash(i), i)
        elif a_hash(i) in tier:
            tier.hold([a_hash(i)])
            tier.read([a_hash(i)], [i])
        content |= {place: block for block, place in tier.copies.out}
        assert all(content[place] == block for place, block in tier.copies.into)
        places = [*tier._place_of.values(), *tier._free]
        assert sorted(places) == list(range(n)) and tier.n_stored - tier.n_evicted == len(tier) <= n


def simulation(*, n_slots: int, n_host_blocks: int, **of_states: int) -> Simulation:
    return Simulation(
        ServingConfig(
            max_batch_size=4,
            n_slots=n_slots,
            block_size=SIZE,
            max_batch_tokens=64,
            n_host_blocks=n_host_blocks,
            n_snapshots=of_states.get("n_snapshots", 0),
            n_host_states=of_states.get("n_host_states", 0),
            scheduling=SchedulingConfig(),
        )
    )


def a_prompt(of: int, n: int = 33) -> list[int]:
    return [100 * of + i for i in range(n)]


def test_a_prompt_that_the_device_had_to_evict_is_read_in_by_its_salt_alone() -> None:
    on = simulation(n_slots=40, n_host_blocks=30)  # the device has room for one prompt
    assert run(on, asked(a_prompt(0))) == run(on, asked(a_prompt(1))) == run(on, asked(a_prompt(2))) == [0]
    assert run(on, asked(a_prompt(0), salt=("other",))) == [0]
    assert run(on, asked(a_prompt(0))) == [32]
    assert on.kv.host is not None and on.kv.host.n_read == 8


@pytest.mark.parametrize(("state", "found"), [(23.5, 32), (24.5, 0)])
def test_a_state_counts_where_reading_is_weighed_against_computing(state: float, found: int) -> None:
    """Computing takes 32 seconds here, eight blocks take 8, and the state after them its share of blocks."""
    on = simulation(n_slots=40, n_host_blocks=30, n_snapshots=4, n_host_states=8)
    assert on.kv.host is not None and on.kv.host_states is not None
    on.kv.host.costs = TierCosts(block_size=SIZE, token=1.0, pair=0.0, host=1.0, state=state)
    for i in range(3):
        run(on, asked(a_prompt(i)))
    assert run(on, asked(a_prompt(0))) == [found]
    assert (on.kv.host.n_read, on.kv.host_states.n_read) == ((8, 1) if found else (0, 0))


def test_prompts_that_arrive_together_read_a_block_in_once() -> None:
    on = simulation(n_slots=80, n_host_blocks=40)
    for i in range(4):
        run(on, asked(a_prompt(i)))
    assert run(on, asked(a_prompt(0)), asked(a_prompt(0, n=40))) == [32, 32]
    assert on.kv.host is not None and on.kv.host.n_read == 8


def test_a_preempted_request_reads_its_blocks_in_again() -> None:
    on = simulation(n_slots=64, n_host_blocks=40)
    requests = [asked(a_prompt(i, n=20), n_output=36) for i in range(2)]
    run(on, *requests)
    assert on.kv.host is not None and on.scheduler.n_preemptions > 0
    assert on.kv.host.n_read > 0 and on.scheduler.n_recomputed < SIZE * on.scheduler.n_preemptions


@pytest.mark.parametrize("new_version", [False, True])
def test_lost_caches_and_new_weights_empty_it(new_version: bool) -> None:
    on = simulation(n_slots=40, n_host_blocks=30)
    for i in range(3):
        run(on, asked(a_prompt(i)))
    assert on.kv.host is not None and len(on.kv.host) > 0
    if new_version:
        change_weights(on.scheduler, 1)
    else:
        compute_all_again(on.scheduler)
    assert len(on.kv.host) == 0 and run(on, asked(a_prompt(0))) == [0]


@pytest.mark.parametrize("without", [{"prefix_caching": False}, {"policy": "orca"}, {"deterministic": True}])
def test_it_needs_a_prefix_cache(without: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="kv_host_bytes is 9, and there is no prefix cache"):
        Sizes(kv_host_bytes=9, **without)  # pyright: ignore[reportArgumentType]
