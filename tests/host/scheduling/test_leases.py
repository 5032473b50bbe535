"""Leases: bounded in bytes and in time, each for whoever knows its name and digest, once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.leases import Leases
from orca_jax.scheduling.prefix_lookup import hash_prompt

SIZE, STATE = 100, 70  # bytes of a block, and of a state
FACTS = TransferFacts("model", "secret")


class Packed:
    def __init__(self, blocks: Sequence[int], state: int | None) -> None:
        self.blocks, self.state, self.settled = blocks, state, False

    def settle(self) -> None:
        self.settled = True

    def parts(self, index: int) -> list[memoryview]:
        return [memoryview(bytes([self.blocks[index]] * SIZE))]


def leases_of(
    kv: KVManager,
    pack: Callable[[Sequence[int], int | None], Packed],
    *,
    state_bytes: int = 0,
    most_bytes: int = 10 * SIZE,
    seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Leases:
    return Leases(
        kv,
        FACTS,
        pack,
        block_bytes=SIZE,
        state_bytes=state_bytes,
        most_bytes=most_bytes,
        seconds=seconds,
        engine_id="engine",
        address=("127.0.0.1", 7),
        clock=clock,
    )


class Rig:
    def __init__(self, most_blocks: int, n_snapshots: int = 0) -> None:
        self.kv = KVManager(
            n_rows=4,
            max_blocks_per_row=8,
            n_blocks=32,
            block_size=4,
            prefix_caching=True,
            n_snapshots=n_snapshots,
            snapshot_blocks=1,
        )
        self.now = 0.0
        self.packed: list[Packed] = []
        self.leases = leases_of(
            self.kv,
            self.pack,
            state_bytes=STATE,
            most_bytes=most_blocks * SIZE,
            seconds=10.0,
            clock=lambda: self.now,
        )

    def pack(self, blocks: Sequence[int], state: int | None) -> Packed:
        self.packed.append(Packed(blocks, state))
        return self.packed[-1]

    def request(self, n_tokens: int, salt: tuple[str, ...] = (), **sampling: Any) -> Request:
        """A request whose lease is offered early, with a row for the tokens from 0 on."""
        request = Request(
            request_id="r",
            prompt_ids=tuple(range(n_tokens)),
            max_tokens=n_tokens + 1,
            sampling=SamplingParams(max_tokens=1, **sampling),
            seed=0,
            cache_salt=salt,
            kv_transfer=KVTransferParams(do_remote_decode=True, offer_early=True),
        )
        (request.row,) = self.kv.reserve_sharing([(n_tokens, ())])
        return request

    def compute(self, request: Request, n_computed: int) -> list[Request]:
        """Issue an iteration that computes a prompt up to so many tokens."""
        n, request.n_computed = n_computed - request.n_computed, n_computed
        return self.leases.offer([(request, n)])

    def grant(
        self,
        n_tokens: int,
        salt: tuple[str, ...] = (),
        *,
        reason: FinishReason = FinishReason.LENGTH,
        snapshots: Sequence[int] = (),
        **sampling: Any,
    ) -> tuple[KVTransferParams | None, bytes]:
        """Grant a lease for a prompt of the tokens from 0 on, whose output is the token 5.

        It has `snapshots` after so many blocks.
        """
        prompt = tuple(range(n_tokens))
        request = Request(
            request_id="r",
            prompt_ids=prompt,
            max_tokens=n_tokens + 1,
            sampling=SamplingParams(max_tokens=1, **sampling),
            seed=0,
            cache_salt=salt,
            kv_transfer=KVTransferParams(do_remote_decode=True),
        )
        (request.row,) = self.kv.reserve_sharing([(n_tokens, ())])
        request.output_ids.append(5)
        for n_blocks in snapshots:
            assert self.kv.snapshots is not None
            block_hash = hash_prompt(request, self.kv)[n_blocks - 1]
            self.kv.snapshots.make(request.row, 4 * n_blocks, prompt=n_tokens, known=block_hash, shared=True)
            self.kv.snapshots.name(request.row, n_blocks, block_hash)
        self.leases.grant(request, reason)
        self.kv.release(request.row)
        return request.kv_lease, FACTS.digest(prompt[: n_tokens // 4 * 4], salt)


def test_a_lease_has_the_full_blocks_of_a_prompt_for_one_taker() -> None:
    rig = Rig(8)
    params, digest = rig.grant(11, ("key 1", "salt"))
    assert params is not None and FACTS.trusts(params)
    assert params.remote_block_ids == (0, 1) and params.remote_engine_id == "engine"
    assert (params.remote_host, params.remote_port) == ("127.0.0.1", 7)
    assert len(rig.packed[0].blocks) == 2 and rig.leases.n_bytes == 2 * SIZE
    name = params.remote_request_id
    assert rig.leases.take(name, rig.grant(11, ("key 2", "salt"))[1]) is None
    assert rig.leases.take("x" + name, digest) is None
    lease = rig.leases.take(name, digest)
    assert lease is not None and lease.n_blocks == 2
    assert rig.leases.take(name, digest) is None
    assert rig.leases.n_bytes == 4 * SIZE, "it counts until it is sent"
    rig.leases.sent(lease)
    assert rig.leases.n_bytes == 2 * SIZE
    assert rig.grant(3)[0] is None, "no full block"


def test_the_other_server_may_begin_with_the_token_that_was_sampled() -> None:
    rig = Rig(8)
    params, _ = rig.grant(11, ("key", ""))
    assert params is not None and FACTS.first_token(params, range(11), ("key", "")) == 5
    kinds: list[dict[str, Any]] = [
        {"reason": FinishReason.STOP},  # the other server finds the end itself
        {"stop": ["a"]},
        {"logprobs": 0},
        {"return_routed_experts": True},
    ]
    for kind in kinds:
        params, _ = rig.grant(8, **kind)
        assert params is not None and params.first_token_id is None


def test_a_hybrid_s_lease_ends_at_its_last_snapshot_with_the_state_there() -> None:
    """Where the token after the prompt is not known too, the prompt's last token is computed there."""
    rig = Rig(20, n_snapshots=8)
    for n_tokens, snapshots, reason, n_leased in (
        (15, (1, 2), FinishReason.LENGTH, 2),
        (12, (2, 3), FinishReason.LENGTH, 3),
        (12, (2, 3), FinishReason.STOP, 2),
    ):
        n_bytes = rig.leases.n_bytes
        salt = (str(n_tokens), reason.value)
        params, _ = rig.grant(n_tokens, salt, reason=reason, snapshots=snapshots)
        assert params is not None and params.remote_block_ids == tuple(range(n_leased))
        packed = rig.packed[-1]
        # Snapshots are the states 4 to 11, of which each prompt takes the next two.
        assert (len(packed.blocks), packed.state) == (
            n_leased,
            3 + 2 * len(rig.packed) - (reason is FinishReason.STOP),
        )
        assert rig.leases.n_bytes - n_bytes == n_leased * SIZE + STATE
        digest = FACTS.digest(tuple(range(4 * n_leased)), salt)
        lease = rig.leases.take(params.remote_request_id, digest)
        assert lease is not None and (lease.n_blocks, lease.n_parts) == (n_leased, n_leased + 1)
    assert rig.grant(15, ("none",))[0] is None, "no snapshot"


def test_a_lease_grows_with_its_prompt_s_chunks() -> None:
    rig = Rig(8)
    request = rig.request(14, ("key",))
    assert rig.compute(request, 6) == [request] and request.kv_lease is not None
    params, digest = request.kv_lease, FACTS.digest(range(12), ("key",))
    assert params.remote_block_ids == (0, 1, 2) and params.first_token_id is None
    assert rig.leases.n_bytes == 3 * SIZE, "the memory of all its blocks"
    lease = rig.leases.take(params.remote_request_id, digest)
    assert lease is not None and rig.leases.wait(lease, 0, 0) == (1, False)
    assert rig.leases.wait(lease, 1, 0) is None
    assert rig.compute(request, 7) == [] and len(rig.packed) == 1, "no further block is full"
    rig.compute(request, 9)
    assert rig.leases.wait(lease, 1, 0) == (2, False)
    blocks = rig.kv.block_table[request.row].tolist()
    assert [each.blocks for each in rig.packed] == [[blocks[0]], [blocks[1]]]
    rig.compute(request, 14)
    assert rig.leases.wait(lease, 2, 0) is None, "the last blocks go with the first token"
    request.output_ids.append(5)
    rig.leases.grant(request, FinishReason.LENGTH)
    assert rig.leases.wait(lease, 2, 0) == (3, True) == rig.leases.wait(lease, 3, 0)
    assert [bytes(*lease.parts(i)) for i in range(3)] == [bytes([block] * SIZE) for block in blocks[:3]]
    assert request.kv_lease is params and lease.first_token is not None
    token_id, proof = lease.first_token
    said = replace(params, first_token_id=token_id, first_token_proof=proof)
    assert token_id == 5 == FACTS.first_token(said, range(14), ("key",))
    rig.leases.sent(lease)
    assert not rig.leases.n_bytes and not lease.pieces
    assert (rig.leases.n_granted, rig.leases.n_taken, rig.leases.n_expired) == (1, 1, 0)


def test_a_preempted_prompt_s_lease_goes_on_where_it_was() -> None:
    rig = Rig(8)
    request = rig.request(16)
    rig.compute(request, 9)
    rig.kv.release(request.row)
    request.n_computed = 0
    (request.row,) = rig.kv.reserve_sharing([(16, ())])
    for n in (5, 8):
        assert rig.compute(request, n) == [] and len(rig.packed) == 1
    rig.compute(request, 16)
    assert rig.packed[1].blocks == rig.kv.block_table[request.row, 2:4].tolist()


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("cause", ["cancelled", "other weights", "its time", "newer leases"])
def test_a_lease_that_does_not_become_whole_ends(cause: str, taken: bool) -> None:
    rig = Rig(4)
    request = rig.request(16)
    rig.compute(request, 9)
    assert request.kv_lease is not None
    name, digest = request.kv_lease.remote_request_id, FACTS.digest(range(16), ())
    lease = rig.leases.take(name, digest) if taken else None
    if cause == "cancelled":
        rig.leases.grant(request, FinishReason.CANCELLED)
    if cause == "other weights":
        rig.leases.stop()
    if cause == "its time":
        rig.now = 10.0
        rig.leases.expire()
    if cause == "newer leases":
        assert (rig.grant(4)[0] is None) == taken, "what is being sent keeps its memory"
    if lease is None:
        assert rig.leases.take(name, digest) is None
        assert rig.leases.n_bytes == SIZE * (cause == "newer leases") and rig.leases.n_expired == 1
    elif cause in ("cancelled", "other weights"):
        assert rig.leases.wait(lease, 0, 0) is None and rig.leases.n_bytes == 4 * SIZE
        rig.leases.sent(lease)
        assert rig.leases.n_bytes == 0
    if cause == "cancelled":
        return
    n_packed = len(rig.packed)
    assert rig.compute(request, 16) == [], "no second lease"
    assert len(rig.packed) == n_packed + (taken and cause != "other weights")
    request.output_ids.append(5)
    rig.leases.grant(request, FinishReason.LENGTH)
    if lease is not None and cause != "other weights":
        assert rig.leases.wait(lease, 0, 0) == (4, True)
        rig.leases.sent(lease)
    assert rig.leases.n_bytes == SIZE * (cause == "newer leases" and not taken)


def test_a_growing_lease_s_time_begins_again_with_each_chunk() -> None:
    rig = Rig(8)
    request, later = rig.request(16), rig.request(8, ("later",))
    rig.compute(request, 5)
    rig.now = 6.0
    rig.compute(later, 8)
    rig.now = 9.0
    rig.compute(request, 9)
    rig.now = 17.0
    rig.leases.expire()
    assert len(rig.leases) == 1
    rig.now = 19.0
    rig.leases.expire()
    assert len(rig.leases) == 0 and rig.leases.n_bytes == 0


def test_the_devices_hold_the_copies_of_two_iterations() -> None:
    rig = Rig(20)
    requests = [rig.request(16, (str(i),)) for i in range(2)]
    for n in range(1, 5):
        for request in requests:
            request.n_computed = 4 * n
        rig.leases.offer([(request, 4) for request in requests])
        settled = [each.settled for each in rig.packed]
        assert settled == [True] * 2 * max(0, n - 2) + [False] * 2 * min(n, 2)


def test_only_who_asks_for_it_is_offered_a_lease_early() -> None:
    rig = Rig(20)
    request = rig.request(16)
    request.kv_transfer = KVTransferParams(do_remote_decode=True)
    assert rig.compute(request, 16) == [] and request.kv_lease is None and not rig.packed
    request = rig.request(3)
    assert rig.compute(request, 3) == [] and request.kv_lease is None, "no full block"
    request = Rig(3).request(16)
    assert rig.compute(request, 16) == [request]
    assert Rig(3).leases.offer([(request, 0)]) == [], "it has a lease"
    hybrid = Rig(20, n_snapshots=8)
    request = hybrid.request(16)
    assert hybrid.compute(request, 16) == [] and request.kv_lease is None, "its end tells how much travels"


def test_leases_end_with_their_time_and_for_newer_ones() -> None:
    rig = Rig(5)
    first, digest = rig.grant(8)
    rig.now = 9.0
    second, _ = rig.grant(8)
    assert first is not None and second is not None and rig.packed[0].settled
    rig.now = 10.0
    assert rig.leases.take(first.remote_request_id, digest) is None
    assert (len(rig.leases), rig.leases.n_bytes, rig.leases.n_expired) == (1, 2 * SIZE, 1)
    third, _ = rig.grant(16)
    assert third is not None and len(rig.leases) == 1, "the second made room"
    assert rig.grant(24)[0] is None and len(rig.leases) == 0, "more than all"
    held, digest = rig.grant(16)
    assert held is not None
    taken = rig.leases.take(held.remote_request_id, digest)
    assert taken is not None and rig.grant(8)[0] is None, "no room beside what is being sent"
    rig.leases.sent(taken)
    assert rig.grant(8)[0] is not None
    rig.leases.stop()
    assert rig.grant(8)[0] is None and not rig.leases.n_bytes and not len(rig.leases)
