"""Arriving blocks: what happens to a fetch whose engine loses its memory, or whose request waits too long."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.arriving_blocks import ArrivingBlocks, Receiver
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import host_blocks
from orca_jax.scheduling.tier_costs import TierCosts

FACTS = TransferFacts("model", "secret")
PROMPT = tuple(range(13))


class Wire:
    """A transport whose fetches end when a test says so."""

    n_done = 0

    def __init__(self) -> None:
        self.fetches: list[tuple[int, int, Receiver]] = []

    def views(self, place: int) -> Sequence[memoryview]:
        return [memoryview(bytearray(1))]

    def fetch(
        self,
        params: KVTransferParams,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        receiver: Receiver,
        seconds: float,
        seconds_each: float,
    ) -> None:
        assert 0 < seconds <= seconds_each == 5.0
        assert digest == FACTS.digest(PROMPT[: 4 * len(params.remote_block_ids)], ("key", ""))
        self.fetches.append((first, len(into), receiver))

    def close(self) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.kv = KVManager(
            n_rows=4, max_blocks_per_row=8, n_blocks=32, block_size=4, prefix_caching=True, n_host_blocks=8
        )
        assert self.kv.host is not None
        self.host, self.wire, self.now = self.kv.host, Wire(), 0.0
        self.arriving = ArrivingBlocks(
            self.kv, FACTS, self.wire, self.wire, seconds=5.0, clock=lambda: self.now
        )

    def ask(self, n_blocks: int = 3) -> Request:
        request = Request(
            request_id="r",
            prompt_ids=PROMPT,
            max_tokens=20,
            sampling=SamplingParams(max_tokens=7),
            seed=0,
            cache_salt=("key", ""),
            kv_transfer=FACTS.new_lease(engine_id="", host="a", port=7, n_blocks=n_blocks),
        )
        self.arriving.ask(request)
        return request


def test_blocks_are_found_once_they_are_whole() -> None:
    rig = Rig()
    request = rig.ask()
    assert rig.arriving.awaits(request) and not rig.wire.fetches
    rig.arriving.step()
    ((first, n, receiver),) = rig.wire.fetches
    assert (first, n) == (0, 3) and rig.arriving.awaits(request) and not len(rig.host)
    receiver.arrived(3)
    receiver.done(True)
    assert rig.arriving.awaits(request), "until the scheduler's thread has seen it"
    rig.arriving.step()
    assert not rig.arriving.awaits(request) and len(rig.host) == 3
    rig.arriving.step()
    other = rig.ask()
    rig.arriving.step()
    assert rig.wire.fetches[1][:2] == (0, 0), "all are here: the lease is ended"
    assert not rig.arriving.awaits(other)


@pytest.mark.parametrize(("seconds", "fetched"), [(4.5, 3), (5.0, 0)])
def test_a_prompt_that_is_quicker_to_compute_is_not_fetched(seconds: float, fetched: int) -> None:
    """Twelve tokens take 12 + 0.04 x 78 = 15.12 seconds to compute here, since they see 78 keys."""
    rig = Rig()
    rig.host.costs = TierCosts(block_size=4, token=1.0, pair=0.04, host=1.0, disk=9.0, peer=seconds + 0.06)
    request = rig.ask()
    rig.arriving.step()
    ((first, n, _),) = rig.wire.fetches
    assert (first, n) == (0, fetched), "the lease is ended either way"
    assert rig.arriving.awaits(request) == (fetched > 0)


@pytest.mark.parametrize("cause", ["failed", "lost memory", "new weights"])
def test_what_did_not_arrive_whole_is_not_found(cause: str) -> None:
    rig = Rig()
    request = rig.ask()
    rig.arriving.step()
    if cause == "lost memory":
        rig.host.clear()
    if cause == "new weights":
        rig.arriving.stop()
    receiver = rig.wire.fetches[0][2]
    if cause != "failed":
        receiver.arrived(3)
    receiver.done(cause != "failed")
    rig.arriving.step()
    assert not rig.arriving.awaits(request)
    assert len(rig.host) == 0 and rig.host.n_free == 8 and rig.arriving.n_failed == 1
    assert rig.ask() and rig.arriving.n_under_way == (cause != "new weights")


def test_a_request_waits_for_a_bounded_time_and_its_places_longer() -> None:
    rig = Rig()
    request = rig.ask()
    rig.arriving.step()
    behind = rig.ask()
    rig.arriving.step()
    assert len(rig.wire.fetches) == 1 and rig.arriving.awaits(behind), "no room for both"
    rig.now = 5.0
    rig.arriving.step()
    assert not rig.arriving.awaits(request) and not rig.arriving.awaits(behind)
    assert rig.host.n_free == 5, "somebody may still write there"
    rig.wire.fetches[0][2].done(False)
    rig.arriving.step()
    assert rig.host.n_free == 8 and not rig.arriving.n_under_way


def test_each_piece_begins_the_wait_again_and_what_came_is_kept() -> None:
    """Four seconds between pieces are in time; the two blocks before the break are found."""
    rig = Rig()
    request = rig.ask()
    rig.arriving.step()
    receiver = rig.wire.fetches[0][2]
    for rig.now in (4.0, 8.0):
        receiver.arrived(int(rig.now) // 4)
        rig.arriving.step()
    rig.now = 12.9
    assert rig.arriving.awaits(request) and not len(rig.host), "nothing can be evicted before the end"
    rig.now = 13.0
    assert not rig.arriving.awaits(request)
    receiver.done(False)
    rig.arriving.step()
    assert len(rig.host) == 2 and rig.host.n_free == 6
    assert host_blocks(request, 0, rig.kv) == 2
    assert (rig.arriving.n_failed, rig.arriving.n_blocks) == (1, 2)


def proof(request: Request, token_id: int, prompt: Sequence[int] = PROMPT) -> str:
    assert request.kv_transfer is not None
    return FACTS.with_first_token(request.kv_transfer, token_id, prompt, ("key", "")).first_token_proof


def test_a_first_token_that_comes_with_the_blocks_begins_the_output_once() -> None:
    rig = Rig()
    request = rig.ask()
    assert rig.arriving.step() == []
    receiver = rig.wire.fetches[0][2]
    # Of another prompt that begins with the same blocks, of another token, and without a proof.
    for wrong in (proof(request, 9, PROMPT[:12]), proof(request, 8), ""):
        receiver.said(9, wrong)
        assert rig.arriving.step() == []
    for _ in range(2):
        receiver.said(9, proof(request, 9))
    assert rig.arriving.step() == [(request, 9)] and rig.arriving.awaits(request)
    request.output_ids.append(9)
    receiver.said(9, proof(request, 9))
    assert rig.arriving.step() == []


@pytest.mark.parametrize("why", ["several outputs", "it ends the output", "the request ends", "it runs"])
def test_a_first_token_is_left_where_the_output_cannot_begin_with_it(why: str) -> None:
    rig = Rig()
    request = rig.ask()
    assert request.kv_transfer is not None
    if why == "several outputs":
        request.kv_transfer = replace(request.kv_transfer, samples_first=True)
    if why == "it ends the output":
        request.end_token_ids = frozenset({9})
    rig.arriving.step()
    if why == "the request ends":
        request.ending = FinishReason.CANCELLED
    if why == "it runs":  # after its time, without its blocks
        request.n_iterations = 1
    rig.wire.fetches[0][2].said(9, proof(request, 9))
    assert rig.arriving.step() == []


def test_more_blocks_than_the_prompt_has_are_not_fetched() -> None:
    rig = Rig()
    request = rig.ask(n_blocks=4)
    rig.arriving.step()
    assert not rig.wire.fetches and not rig.arriving.awaits(request) and rig.arriving.n_failed == 1
