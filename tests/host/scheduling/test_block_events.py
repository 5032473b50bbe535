"""A listener to the prefix cache always knows which blocks it has, and their tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import EngineError
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_cache import chain_hashes, next_hash, root_hash
from orca_jax.scheduling.prefix_lookup import hash_prompt, publish_full_blocks
from orca_jax.scheduling.restart import change_weights, fail_all
from orca_jax.simulation.simulation import Simulation

SIZE = 4


class Rebuilt:
    """The cache as its listener sees it: each block's parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.log: list[str] = []

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        assert block_hash not in self.blocks, "stored twice"
        self.blocks[block_hash] = parent, tuple(token_ids)
        self.log.append("stored")

    def removed(self, block_hash: bytes) -> None:
        del self.blocks[block_hash]
        self.log.append("removed")

    def cleared(self) -> None:
        self.blocks.clear()
        self.log.append("cleared")


def request(name: str, prompt: Sequence[int], n_output: int = 1, salt: tuple[str, ...] = ()) -> Request:
    n_tokens = len(prompt) + n_output
    return Request(
        name, tuple(prompt), n_tokens, SamplingParams(max_tokens=n_output), seed=0, cache_salt=salt
    )


def cached(kv: KVManager, roots: dict[bytes, bool], requests: Sequence[Request]) -> dict[bytes, bool]:
    """The hashes in the cache, of all blocks that any request could have; True if anybody may share it."""
    assert kv.prefixes is not None
    found: dict[bytes, bool] = {}
    for root, is_shared in roots.items():
        for req in requests:
            for one in chain_hashes(root, [*req.prompt_ids, *req.output_ids], kv.block_size):
                if kv.prefixes.find([one], 1):
                    found[one] = is_shared
    return found


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=18)
salts = st.sampled_from([(), ("", ""), ("", ""), ("key", ""), ("", "salt")])


@settings(deadline=None, max_examples=100)
@given(
    wanted=st.lists(st.tuples(prompts, st.integers(1, 9), salts), min_size=1, max_size=14),
    n_blocks=st.integers(8, 14),
    failures=st.sets(st.integers(0, 30), max_size=2),
    new_weights=st.sets(st.integers(0, 30), max_size=1),
    reservation=st.sampled_from(["full", "on-demand"]),
)
def test_at_every_moment_the_rebuilt_cache_is_the_cache(
    wanted: list[tuple[list[int], int, tuple[str, ...]]],
    n_blocks: int,
    failures: set[int],
    new_weights: set[int],
    reservation: str,
):
    serving = ServingConfig(
        max_batch_size=3,
        n_slots=n_blocks * SIZE,
        block_size=SIZE,
        max_batch_tokens=32,
        scheduling=SchedulingConfig(reservation="full" if reservation == "full" else "on-demand"),
    )
    play = Simulation(serving, token=lambda req, i: 1 + (req.prompt_ids[0] + i) % 2)
    assert play.kv.prefixes is not None
    play.kv.hash_seed = "seed"
    listener = Rebuilt()
    play.kv.prefixes.tell(listener)
    requests = [request(str(i), *one) for i, one in enumerate(wanted)]
    for i, req in enumerate(requests):
        play.add_at(1.5 * i, req)
    turn = 0
    while True:
        try:
            for _ in play.steps():
                turn += 1
                if turn in failures:
                    play.engine.fail("issue")
                if turn in new_weights and not play.scheduler.n_scheduled:
                    change_weights(play.scheduler, play.scheduler.weights_version + 1)
                check(play, listener, requests)
            break
        except EngineError:
            fail_all(play.scheduler)
            check(play, listener, requests)


def check(play: Simulation, listener: Rebuilt, requests: Sequence[Request]) -> None:
    kv = play.kv
    assert kv.prefixes is not None
    namespaces = ["", *(f"weights {i + 1}" for i in range(play.scheduler.weights_version))]
    roots = {
        root_hash("seed", namespace, *salt): not any(salt)
        for namespace in namespaces
        for salt in [(), ("", ""), ("key", ""), ("", "salt")]
    }
    found = cached(kv, roots, requests)
    assert len(found) == len(kv.prefixes), "the check looks for every block"
    assert {one for one, is_shared in found.items() if is_shared} == listener.blocks.keys()
    for one, (parent, tokens) in listener.blocks.items():
        firsts = [root for root, is_shared in roots.items() if is_shared]
        assert one in [next_hash(before, tokens) for before in ([parent] if parent else firsts)]


def admitted(kv: KVManager, req: Request) -> Request:
    req.row = kv.reserve(req.max_tokens)
    req.n_computed = len(req.prompt_ids)
    publish_full_blocks([req], kv)
    return req


def manager(seed: str = "") -> tuple[KVManager, Rebuilt]:
    kv = KVManager(n_blocks=8, block_size=SIZE, n_rows=4, max_blocks_per_row=8, prefix_caching=True)
    kv.hash_seed = seed
    listener = Rebuilt()
    assert kv.prefixes is not None
    kv.prefixes.tell(listener)
    return kv, listener


def test_a_block_s_parent_is_the_block_before_it():
    kv, listener = manager()
    admitted(kv, request("a", range(10)))
    first, second = hash_prompt(request("a", range(10)), kv)
    assert listener.blocks == {first: (None, (0, 1, 2, 3)), second: (first, (4, 5, 6, 7))}
    admitted(kv, request("b", [*range(8), 20, 21, 22, 23]))
    third = hash_prompt(request("b", [*range(8), 20, 21, 22, 23]), kv)[2]
    assert listener.blocks[third] == (second, (20, 21, 22, 23))
    assert listener.log == ["cleared", "stored", "stored", "stored"], (
        "the two blocks that were cached are not announced again"
    )


@pytest.mark.parametrize("salt", [("key", ""), ("", "salt"), ("key", "salt")])
def test_blocks_of_one_client_are_never_announced(salt: tuple[str, ...]):
    kv, listener = manager()
    kv.release(admitted(kv, request("a", range(8), salt=salt)).row)
    kv.release(admitted(kv, request("b", range(100, 127))).row)  # 7 of the 8 blocks evict one of those two
    assert kv.prefixes is not None and kv.prefixes.n_evictions == 1
    assert listener.log == ["cleared"] + ["stored"] * 6
    assert all(min(tokens) >= 100 for _, tokens in listener.blocks.values())
    kv.forget()
    assert listener.blocks == {} and listener.log[-1] == "cleared"


def test_equal_prompts_have_equal_hashes_on_every_engine_and_another_seed_has_others():
    hashes = []
    for seed in ("", "", "seed", "seed", "other"):
        kv, listener = manager(seed)
        admitted(kv, request("a", range(8)))
        hashes.append(tuple(listener.blocks))
    assert hashes[0] == hashes[1] and hashes[2] == hashes[3]
    assert len({*hashes}) == 3
    # What the hash is, worked out here: replicas of other versions must have the same.
    assert hashes[2][0].hex() == SEEDED


# sha256(sha256(b"orca_jax prefix", each part after its length) + four little-endian int32), for the parts
# "seed", "" (the namespace) and no salt.
SEEDED = "fef0830b918ff18c4c256070c64b927ce83ac67a2657ca47f3c112cef9bf15f8"


def test_who_begins_to_listen_late_knows_of_later_blocks_only():
    kv, early = manager()
    kv.release(admitted(kv, request("a", range(8))).row)
    assert kv.prefixes is not None
    late = Rebuilt()
    kv.prefixes.tell(late)
    assert late.log == ["cleared"]
    kv.release(admitted(kv, request("b", range(50, 81))).row)
    assert kv.prefixes.n_evictions == 2, "of blocks that it never learned of"
    assert late.log == ["cleared"] + ["stored"] * 7
    assert early.log == ["cleared", "stored", "stored"]
