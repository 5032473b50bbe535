"""A request reuses cached blocks exactly if they were computed from the same tokens, salt and model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import EngineError
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_cache import PrefixCache, chain_hashes, next_hash, root_hash
from orca_jax.scheduling.prefix_lookup import (
    LongestPrefixFirst,
    cached_blocks,
    hash_prompt,
    next_block_hash,
    publish_full_blocks,
)
from orca_jax.scheduling.restart import fail_all
from orca_jax.simulation.simulation import Simulation
from tests.host.simulation.fault_trace import Fault, FaultTrace, PlannedRequest
from tests.host.simulation.faults import FaultSimulation

SIZE = 4


def manager(*, block_size: int = SIZE, namespace: str = "", prefix_caching: bool = True) -> KVManager:
    kv = KVManager(
        n_blocks=64, block_size=block_size, n_rows=8, max_blocks_per_row=32, prefix_caching=prefix_caching
    )
    kv.namespace = namespace
    return kv


def request(*prompt: int, salt: tuple[str, ...] = (), **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=50, **sampling)
    return Request("id", prompt, len(prompt) + 50, params, seed=0, cache_salt=salt)


def computed(kv: KVManager, req: Request, n_computed: int | None = None) -> Request:
    """The request, admitted, with its first `n_computed` tokens computed and published."""
    req.row = kv.reserve(req.max_tokens)
    req.n_computed = req.n_tokens if n_computed is None else n_computed
    publish_full_blocks([req], kv)
    return req


def n_shared(kv: KVManager, req: Request) -> int:
    return len(cached_blocks(req, kv))


# Hashes.


def test_the_hash_of_a_block_covers_everything_before_it():
    root = root_hash()
    one, other = chain_hashes(root, [1, 2, 7, 7], 2), chain_hashes(root, [1, 3, 7, 7], 2)
    assert len({*one, *other}) == 4, "the second blocks are equal, but not what is before them"
    assert one == chain_hashes(root, [1, 2, 7, 7, 9], 2), "a partial block has no hash"
    assert one[1] == next_hash(one[0], [7, 7])
    assert chain_hashes(root, [1], 2) == []


@pytest.mark.parametrize(
    "others", [(), ("",), ("", ""), ("a",), ("a", "bc"), ("abc",), ("bc", "a"), ("\x00",)]
)
def test_roots_of_different_parts_differ(others: tuple[str, ...]):
    assert (root_hash("ab", "c") == root_hash(*others)) is False
    for parts in [(), ("",), ("a",), ("\x01",), ("\udc80",), ("é",)]:
        assert (root_hash(*parts) == root_hash(*others)) == (parts == others)


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
def test_roots_are_equal_only_for_equal_parts(one: list[str], other: list[str]):
    assert (root_hash(*one) == root_hash(*other)) == (one == other)


@pytest.mark.parametrize("bit", range(31))
def test_every_bit_of_a_token_counts(bit: int):
    for token_id in (0, 5, 65_535):
        assert next_hash(root_hash(), [token_id, 1]) != next_hash(root_hash(), [token_id ^ (1 << bit), 1])


def test_the_first_of_two_equal_blocks_stays():
    cache = PrefixCache()
    (block_hash,) = chain_hashes(root_hash(), [1], 1)
    cache.add(3, block_hash)
    cache.add(5, block_hash)
    assert cache.find([block_hash], 1) == [3]
    assert cache.release([5]) == [5], "it cannot be found, so it is free"
    assert cache.release([3]) == []
    with pytest.raises(AssertionError, match="block 3 has a hash already"):
        cache.add(3, next_hash(block_hash, [2]))


# Which blocks a request shares.

tokens = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=20)
salts = st.sampled_from([(), ("a",), ("a", ""), ("b",)])


@settings(deadline=None)
@given(
    first=tokens,
    output=st.lists(st.sampled_from([1, 2]), max_size=10),
    second=tokens,
    size=st.integers(1, 5),
    first_salt=salts,
    second_salt=salts,
    data=st.data(),
)
def test_two_requests_share_the_whole_blocks_of_their_common_beginning(
    first: list[int],
    output: list[int],
    second: list[int],
    size: int,
    first_salt: tuple[str, ...],
    second_salt: tuple[str, ...],
    data: st.DataObject,
):
    kv = manager(block_size=size)
    earlier, later = request(*first, salt=first_salt), request(*second, salt=second_salt)
    row = kv.reserve(30)
    earlier.row = row
    n_computed = 0
    for token_id in [None, *output]:  # computed in chunks, and with overlap one token ahead of those known
        if token_id is not None:
            earlier.output_ids.append(token_id)
        n_computed = data.draw(st.integers(n_computed, earlier.n_tokens + 1))
        earlier.n_computed = n_computed
        publish_full_blocks([earlier], kv)
    cached = [*first, *output][:n_computed]
    n_alike = next((i for i, (a, b) in enumerate(zip(cached, second, strict=False)) if a != b), None)
    n_alike = min(len(cached), len(second)) if n_alike is None else n_alike
    n_blocks = min(n_alike // size, (len(second) - 1) // size) if first_salt == second_salt else 0
    assert cached_blocks(later, kv) == kv.blocks_of(row)[:n_blocks].tolist()
    assert len(kv.prefixes or ()) == len(cached) // size


def test_a_chain_goes_on_from_a_prompt_to_its_output():
    """In a conversation the next prompt begins with the last prompt and its answer."""
    kv = manager()
    turn = request(1, 2, 3, 4, 5)
    turn.output_ids += [6, 7, 8, 9]
    computed(kv, turn, 8)
    assert n_shared(kv, request(1, 2, 3, 4, 5, 6, 7, 8, 10)) == 2
    assert n_shared(kv, request(1, 2, 3, 4, 5, 6, 7, 9, 10)) == 1
    short = computed(kv, request(3), 1)
    short.output_ids += [4, 5, 6]
    short.n_computed = 4
    publish_full_blocks([short], kv)
    assert n_shared(kv, request(3, 4, 5, 6, 7)) == 1


def test_a_preempted_request_finds_its_own_blocks_again():
    kv = manager()
    req = request(1, 2, 3, 4, 5)
    req.output_ids += [6, 7, 8, 9]
    computed(kv, req, 8)
    kv.release(req.row)
    assert n_shared(kv, req) == 2


def test_one_token_is_left_to_compute():
    kv = manager()
    computed(kv, request(1, 2, 3, 4, 5, 6, 7, 8))
    assert [n_shared(kv, request(*range(1, n + 1))) for n in (3, 4, 5, 7, 8, 9)] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("salt", "shared"), [((), 0), (("",), 0), (("key",), 1), (("key", "tenant"), 0), (("keytenant",), 0)]
)
def test_requests_of_different_salts_share_nothing(salt: tuple[str, ...], shared: int):
    kv = manager()
    computed(kv, request(1, 2, 3, 4, 5, salt=("key",)))
    assert n_shared(kv, request(1, 2, 3, 4, 5, salt=salt)) == shared


def test_other_models_have_other_hashes():
    """This holds even if a model's name equals the salt of another model's request."""
    req = [1, 2, 3, 4]
    hashes = {
        (namespace, salt): hash_prompt(request(*req, salt=salt), manager(namespace=namespace))[0]
        for namespace in ("", "a", "ab")
        for salt in ((), ("a",), ("b",), ("ab",), ("a", "b"))
    }
    assert len({*hashes.values()}) == len(hashes)


@pytest.mark.parametrize(("n_computed", "shared"), [(3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_computed_blocks_are_published(n_computed: int, shared: int):
    kv = manager()
    computed(kv, request(1, 2, 3, 4, 5, 6, 7, 8), n_computed)
    assert n_shared(kv, request(1, 2, 3, 4, 5, 6, 7, 8, 9)) == shared
    assert kv.prefixes is not None and len(kv.prefixes) == shared


def test_a_block_is_not_published_before_its_tokens_are_known():
    """An overlapped iteration computes a token that the host does not know yet."""
    kv = manager()
    req = computed(kv, request(1, 2, 3), n_computed=4)
    assert kv.prefixes is not None and len(kv.prefixes) == 0 and req.n_found == 0
    req.output_ids.append(4)
    publish_full_blocks([req], kv)
    assert n_shared(kv, request(1, 2, 3, 4, 5)) == 1
    assert n_shared(kv, request(1, 2, 3, 9, 5)) == 0


def test_who_asks_for_prompt_logprobs_computes_the_whole_prompt_once():
    kv = manager()
    computed(kv, request(1, 2, 3, 4, 5))
    req = request(1, 2, 3, 4, 5, prompt_logprobs=0)
    assert n_shared(kv, req) == 0
    req.prompt_logprobs = [TokenLogprobs(0, -1.0, ())] * 4
    assert n_shared(kv, req) == 1, "preempted after that"


def test_who_asks_for_experts_finds_only_tokens_whose_experts_are_known():
    kv = manager()
    computed(kv, request(*range(1, 3 * SIZE + 2)))
    req = request(*range(1, 3 * SIZE + 2), return_routed_experts=True)
    assert n_shared(kv, req) == 0
    req.add_routed(0, np.zeros((2 * SIZE + 1, 1, 1), np.uint8))
    assert n_shared(kv, req) == 2, "preempted after that"
    req.add_routed(2 * SIZE + 1, np.zeros((SIZE, 1, 1), np.uint8))
    assert n_shared(kv, req) == 3


def test_without_a_prefix_cache_nothing_is_hashed():
    kv = manager(prefix_caching=False)
    req = computed(kv, request(1, 2, 3, 4, 5))
    assert cached_blocks(req, kv) == [] and next_block_hash(req, 0, kv) is None and req.block_hashes is None


def test_the_hash_of_the_next_block():
    kv = manager()
    req = request(*range(10))
    assert [next_block_hash(req, n, kv) for n in range(3)] == [*hash_prompt(req, kv), None]


# What the scheduler does with it.


def simulation(**scheduling: Any) -> Simulation:
    extended = SchedulingConfig(**scheduling)
    serving = ServingConfig(max_batch_size=4, n_slots=64, block_size=SIZE, scheduling=extended)
    return Simulation(serving, token=lambda req, i: 100 + i)


def named(name: str, req: Request, n_output: int) -> Request:
    return replace(req, request_id=name, max_tokens=len(req.prompt_ids) + n_output)


def test_equal_prompts_that_come_together_are_computed_once():
    play = simulation()
    requests = [named(str(i), request(*range(20)), 2) for i in range(4)]
    for req in requests:
        play.add_at(0.0, req)
    play.run()
    assert [req.n_cached for req in requests] == [0, 16, 16, 16]


def test_a_block_of_an_output_is_found_from_the_turn_on_in_which_its_last_token_returns():
    """An overlapped iteration is issued before that token returns."""
    play = simulation()
    req = named("A", request(1, 2, 3), 12)
    play.add_at(0.0, req)
    n_ahead = 0
    for _ in play.steps():
        if req.row >= 0:
            assert req.n_found == min(req.n_computed, req.n_tokens) // SIZE
            n_ahead += req.n_in_flight > 0
    assert n_ahead > 10 and req.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("moment", ["issue", "wait"])
def test_after_a_failed_iteration_nothing_is_found(moment: Any):
    """The failed iteration may not have written the blocks that it was to compute."""
    play = simulation()
    first, again = (named(name, request(*range(20)), 9) for name in ("first", "again"))
    play.add_at(0.0, first)
    play.add_at(3.0, again)
    play.engine.fail(moment)
    for _ in range(2):
        try:
            play.run()
        except EngineError:
            fail_all(play.scheduler)
            assert play.kv.prefixes is not None and len(play.kv.prefixes) == 0
            assert play.kv.n_free_blocks == play.kv.n_blocks
    assert (first.finish_reason, again.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert again.n_cached == 0


@pytest.mark.parametrize("reservation", ["full", "on-demand"])
def test_after_the_loss_of_a_worker_nothing_is_found(reservation: Any):
    """The workers have new caches; simulated devices compute wrong tokens if keys and values are missing."""
    trace = FaultTrace(
        n_stages=2,
        max_bs=2,
        block_size=2,
        n_slots=40,
        max_batch_tokens=12,
        requests=(PlannedRequest(0.0, 7, 6), PlannedRequest(0.0, 7, 4), PlannedRequest(9.0, 9, 4)),
        faults=(Fault(0.75, "crash", 1, 0.5, 0),),
        scheduling=SchedulingConfig(reservation=reservation),
        alike=True,
    )
    play = FaultSimulation(trace)
    n_found = []
    for _ in play.steps():
        assert play.kv.prefixes is not None
        if play.recovery.trouble is not None:
            n_found.append(len(play.kv.prefixes))
    assert n_found and not any(n_found)
    assert play.recovery.losses == 1
    assert [req.n_cached for req in play.requests] == [0, 6, 6], "and after it blocks are found again"
    for req in play.requests:
        assert req.output_ids == play.undisturbed(req)


# The longest cached beginning first.


def waiting(*requests: Request) -> list[Request]:
    for arrival, req in enumerate(requests):
        req.arrival = arrival
    return list(requests)


def test_of_a_window_the_longest_cached_beginning_goes_first():
    kv = manager()
    computed(kv, request(*range(12)))
    queue = waiting(request(99), request(*range(4), 9), request(*range(12), 9), request(*range(8), 9))
    order = LongestPrefixFirst(3, kv).order
    assert [req.arrival for req in order(queue)] == [2, 1, 0, 3], "the fourth is not in the window"
    assert [req.arrival for req in order([queue[0], queue[3]])] == [0, 3], "its window still has one"


def test_a_window_is_emptied_before_the_next_begins():
    kv = manager()
    computed(kv, request(*range(12)))
    queue = waiting(request(99), request(98), *(request(*range(12), 9) for _ in range(4)))
    admitted: list[int] = []
    window = LongestPrefixFirst(3, kv)
    while queue:
        first = next(window.order(queue))
        admitted.append(first.arrival)
        queue.remove(first)
    assert admitted == [2, 0, 1, 3, 4, 5]


def test_what_was_preempted_goes_before_a_window():
    kv = manager()
    computed(kv, request(*range(12)))
    queue = waiting(request(99), request(98), request(*range(12), 9))
    queue[1].n_preempted = 1
    assert [req.arrival for req in LongestPrefixFirst(3, kv).order(queue)] == [1, 2, 0]


def test_more_of_the_prompts_are_cached_than_by_arrival():
    """Two long prefixes take turns, and the cache has room for one of them and a running request."""
    cached: dict[str, int] = {}
    for order in ("fcfs", "longest-prefix"):
        scheduling = SchedulingConfig(scheduling_policy=order)  # pyright: ignore[reportArgumentType]
        serving = ServingConfig(
            max_batch_size=1, n_slots=48, max_batch_tokens=64, block_size=SIZE, scheduling=scheduling
        )
        play = Simulation(serving)
        requests = [named(str(i), request(*[i % 2] * 32, i), 2) for i in range(16)]
        for req in requests:
            play.add_at(0.0, req)
        play.run()
        assert all(req.finish_reason is FinishReason.LENGTH for req in requests)
        cached[order] = sum(req.n_cached for req in requests)
    # Of the 12 blocks a request takes 9, so the first 3 of the other beginning stay.
    assert cached == {"fcfs": 14 * 3 * SIZE, "longest-prefix": 14 * 32}
