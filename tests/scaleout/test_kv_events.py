"""K/V events, read by a subscriber written from vLLM's published schema (vllm_subscriber.py)."""

import hashlib
import struct
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import ConfigError
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import publish_full_blocks
from server.kv_events.batch import Cleared, Event, EventQueue, Removed, Stored, batches, encoded
from server.kv_events.publisher import Publisher
from server.kv_events.replay_log import ReplayLog
from tests.host.engines import SOON
from tests.scaleout.vllm_subscriber import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Index,
    Subscriber,
    batch,
)

SIZE = 4


def manager(n_blocks: int = 8, seed: str = "") -> KVManager:
    kv = KVManager(n_blocks=n_blocks, block_size=SIZE, n_rows=4, max_blocks_per_row=64, prefix_caching=True)
    kv.hash_seed = seed
    return kv


def admit(kv: KVManager, prompt: Sequence[int], salt: tuple[str, ...] = ()) -> int:
    """Compute a prompt as the scheduler would, and publish its blocks; returns its row."""
    params = SamplingParams(max_tokens=1)
    req = Request("r", tuple(prompt), len(prompt) + 1, params, seed=0, cache_salt=salt)
    req.row = kv.reserve(req.max_tokens)
    req.n_computed = len(prompt)
    publish_full_blocks([req], kv)
    return req.row


def true_hashes(prompt: Sequence[int], seed: str = "") -> list[int]:
    """The published hashes of a prompt's blocks, computed as the documentation describes them."""
    root = hashlib.sha256(b"orca_jax prefix")
    for part in (seed.encode(), b""):
        root.update(struct.pack("<Q", len(part)) + part)
    before, hashes = root.digest(), []
    for start in range(0, len(prompt) - SIZE + 1, SIZE):
        before = hashlib.sha256(before + struct.pack("<4i", *prompt[start : start + SIZE])).digest()
        hashes.append(int.from_bytes(before[24:], "big"))
    return hashes


class Addresses:
    """Two unused addresses for sockets on this machine."""

    def __init__(self, folder: Path) -> None:
        name = uuid.uuid4().hex[:8]
        self.events, self.replay = f"ipc://{folder}/{name}.e", f"ipc://{folder}/{name}.r"


@pytest.fixture
def addresses(tmp_path: Path) -> Addresses:
    return Addresses(tmp_path)


@contextmanager
def publishing(
    addresses: Addresses,
    kv: KVManager,
    *,
    topic: str = "kv@pod@model",
    queue: EventQueue | None = None,
    log: ReplayLog | None = None,
) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher of this manager's blocks, and a subscriber that has read its first message."""
    publisher = Publisher(addresses.events, addresses.replay, topic=topic, queue=queue, log=log)
    try:
        with Subscriber(addresses.events, addresses.replay, topic=topic) as subscriber:
            publisher.start(kv)
            until_connected(publisher, subscriber, kv)
            yield publisher, subscriber
    finally:
        publisher.close()
        assert not [one for one in threading.enumerate() if one.name == "orca K/V events"]


def until_connected(publisher: Publisher, subscriber: Subscriber, kv: KVManager) -> None:
    """Clear the cache until the SUB socket receives it: events before its subscription arrives are lost."""
    end = time.monotonic() + SOON
    while subscriber.read(0.05) is None:
        assert time.monotonic() < end
        kv.forget()
    while subscriber.read(0.2) is not None:
        pass


def read_until(subscriber: Subscriber, index: Index, reached: Callable[[], bool]) -> list[Batch]:
    read: list[Batch] = []
    while not reached():
        one = subscriber.read()
        assert one is not None, f"nothing comes after {len(read)} batches"
        index.apply(one)
        read.append(one)
    return read


# The wire.


def test_a_message_is_as_vllm_s_schema_says() -> None:
    from_prompt = [Stored(1 << 63, None, array("i", [7, 8])), Stored(5, 1 << 63, array("i", [9, 70_000]))]
    events: list[Event] = [*from_prompt, Stored(6, 1 << 63, array("i", [1, 2])), Removed(5), Cleared()]
    payload = encoded(events, time=1234.5, block_size=2)
    decoded = batch([b"topic", struct.pack(">q", 3), payload], b"topic")
    assert decoded == Batch(
        number=3,
        ts=1234.5,
        events=[
            BlockStored([1 << 63, 5], None, [7, 8, 9, 70_000], 2, None, "GPU", None),
            BlockStored([6], 1 << 63, [1, 2], 2, None, "GPU", None),
            BlockRemoved([5], "GPU"),
            AllBlocksCleared(),
        ],
        data_parallel_rank=0,
    )


def test_batches_are_bounded_and_keep_the_order() -> None:
    events = [Stored(i, None, array("i", range(1024))) for i in range(100)]
    parts = list(batches(events))
    assert [one for part in parts for one in part] == events
    assert len(parts) > 5 and all(len(encoded(part, time=0.0, block_size=1024)) < 1 << 17 for part in parts)
    huge = [Stored(i, None, array("i", range(1 << 16))) for i in range(2)]
    assert [len(part) for part in batches(huge)] == [1, 1], "one that is above the bound goes alone"
    assert list(batches([])) == []


# What is published.


def test_hashes_parents_and_tokens(addresses: Addresses) -> None:
    kv = manager(seed="one")
    prompt = list(range(100, 111))
    with publishing(addresses, kv) as (_, subscriber):
        admit(kv, prompt)
        read = subscriber.read()
        assert read is not None
        first, second = true_hashes(prompt, "one")
        assert read.events == [BlockStored([first, second], None, prompt[:8], SIZE, None, "GPU", None)]
        assert abs(read.ts - time.time()) < SOON
        admit(kv, [*prompt[:8], 1, 2, 3, 4])
        read = subscriber.read()
        assert read is not None
        third = true_hashes([*prompt[:8], 1, 2, 3, 4], "one")[2]
        assert read.events == [BlockStored([third], second, [1, 2, 3, 4], SIZE, None, "GPU", None)]
        kv.forget()
        read = subscriber.read()
        assert read is not None and read.events == [AllBlocksCleared()]


def test_blocks_of_a_key_or_a_salt_are_not_published(addresses: Addresses) -> None:
    kv = manager()
    with publishing(addresses, kv) as (_, subscriber):
        kv.release(admit(kv, range(8), ("key", "")))
        kv.release(admit(kv, range(8), ("", "salt")))
        admit(kv, range(50, 54))
        admit(kv, range(60, 83))  # with the one before all 8 blocks, so what is salted is evicted
        assert kv.prefixes is not None and kv.prefixes.n_evictions == 4
        index = Index()
        mine = {*true_hashes(range(50, 54)), *true_hashes(range(60, 83))}
        read = read_until(subscriber, index, lambda: index.blocks.keys() >= mine)
        assert index.blocks.keys() == mine
        assert not [one for each in read for one in each.events if isinstance(one, BlockRemoved)]
        assert subscriber.read(0.2) is None


_ACTIONS = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14)),
    st.tuples(st.just("clear"), st.just([0])),
)


@settings(deadline=None, max_examples=15)
@given(actions=st.lists(_ACTIONS, min_size=1, max_size=25), topic=st.sampled_from(["", "kv@a@b", "é"]))
def test_a_replayed_log_rebuilds_exactly_the_cache(
    actions: list[tuple[str, list[int]]], topic: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The live events and the replay from the start meet at the last published number."""
    kv = manager(n_blocks=5)
    addresses = Addresses(tmp_path_factory.getbasetemp())
    everything: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    with publishing(addresses, kv, topic=topic) as (publisher, subscriber):
        rows: list[int] = []
        for what, prompt in actions:
            if what == "clear":
                for row in rows:
                    kv.release(row)
                rows.clear()
                kv.forget()
                continue
            n_blocks = -(-(len(prompt) + 1) // SIZE)
            while rows and (kv.n_free_blocks < n_blocks or not kv.n_free_rows):
                kv.release(rows.pop(0))
            rows.append(admit(kv, prompt))
            hashes = true_hashes(prompt)
            for i, one in enumerate(hashes):
                tokens = tuple(prompt[i * SIZE : (i + 1) * SIZE])
                everything[one] = (hashes[i - 1] if i else None), tokens
        marker = true_hashes([9, 9, 9, 9])[0]
        for row in rows:
            kv.release(row)
        admit(kv, [9, 9, 9, 9])
        live = Index()
        read_until(subscriber, live, lambda: marker in live.blocks)
        assert kv.prefixes is not None
        assert len(live.blocks) == len(kv.prefixes)
        everything[marker] = None, (9, 9, 9, 9)
        for one, block in live.blocks.items():
            assert everything[one] == block
        replayed = Index()
        again = subscriber.missed(0)
        for each in again:
            replayed.apply(each)
        assert [each.number for each in again] == list(range(len(again)))
        assert replayed.blocks == live.blocks
        counts = {metric.name: metric.samples[0].value for metric in publisher.collect()}
        assert counts == {"orca_kv_event_batches": len(again), "orca_kv_events_dropped": 0}


def test_equal_prompts_on_two_engines_have_equal_hashes_and_another_seed_has_others(tmp_path: Path) -> None:
    seen = []
    for seed in ("a", "a", "b"):
        kv, index = manager(seed=seed), Index()
        with publishing(Addresses(tmp_path), kv) as (_, subscriber):
            admit(kv, range(8))
            read_until(subscriber, index, lambda index=index: len(index.blocks) == 2)
        seen.append(index.blocks)
    assert (
        seen[0]
        == seen[1]
        == dict(
            zip(
                true_hashes(range(8), "a"),
                [(None, (0, 1, 2, 3)), (true_hashes(range(8), "a")[0], (4, 5, 6, 7))],
                strict=True,
            )
        )
    )
    assert not seen[0].keys() & seen[2].keys()


# Gaps and what was missed.


def test_a_full_queue_skips_a_number_and_clears_all_blocks(addresses: Addresses) -> None:
    kv, queue = manager(), EventQueue(max_events=3)
    for i in range(5):
        queue.stored(bytes([i] * 32), None, [1, 2, 3, 4])
    with publishing(addresses, kv, queue=queue) as (publisher, subscriber):
        first, second, *_ = subscriber.missed(0)
        assert [first.number, second.number] == [0, 2], "the gap"
        hashes = [one.block_hashes for one in first.events if isinstance(one, BlockStored)]
        assert hashes == [[int.from_bytes([i] * 8, "big")] for i in range(3)]
        assert second.events == [AllBlocksCleared()]
        counts = {metric.name: metric.samples[0].value for metric in publisher.collect()}
        assert counts["orca_kv_events_dropped"] == 2 + 1, "also what `start` says"
        index = Index()
        admit(kv, range(4))
        read_until(subscriber, index, lambda: len(index.blocks) == 1)
        replayed = Index()
        for each in subscriber.missed(1):
            replayed.apply(each)
        assert replayed.blocks == index.blocks


@given(
    events=st.lists(st.integers(0, 40), max_size=30),
    max_events=st.integers(1, 9),
    max_bytes=st.integers(200, 2000),
)
def test_the_queue_is_bounded_in_events_and_bytes(events: list[int], max_events: int, max_bytes: int) -> None:
    queue = EventQueue(max_events=max_events, max_bytes=max_bytes)
    n_kept = kept = n_bytes = 0
    for n_tokens in events:
        queue.stored(bytes(32), None, range(n_tokens))
        if n_kept >= 0:
            n_bytes += 200 + 4 * n_tokens
            if n_kept == max_events or n_bytes > max_bytes:
                kept, n_kept = n_kept, -1
            else:
                n_kept += 1
    expected = n_kept if n_kept >= 0 else kept
    taken, lost = queue.take()
    assert [len(one.token_ids) for one in taken if isinstance(one, Stored)] == events[:expected]
    assert lost == (expected < len(events)) and queue.n_dropped == len(events) - expected
    assert queue.take() == ([], False)
    queue.cleared()
    assert queue.take() == ([Cleared()], False), "and goes on after that"


def test_a_subscriber_gets_the_batches_that_it_missed(addresses: Addresses) -> None:
    kv = manager(n_blocks=64)
    with publishing(addresses, kv) as (_, subscriber):
        last = subscriber.missed(0)[-1].number
        for i in range(6):
            admit_and_release(kv, range(100 * i, 100 * i + 4))
            one = subscriber.read()
            assert one is not None and one.number == last + 1 + i
        for start in (0, last + 1, last + 4, last + 6):
            numbers = [each.number for each in subscriber.missed(start)]
            assert numbers == list(range(start, last + 7))
        assert subscriber.missed(last + 7) == [] and subscriber.missed(1 << 63) == []
        with Subscriber(addresses.events, addresses.replay, topic="kv@pod@model") as late:
            index = Index()
            for each in late.missed(0):
                index.apply(each)
            assert len(index.blocks) == 6


def admit_and_release(kv: KVManager, prompt: Sequence[int]) -> None:
    kv.release(admit(kv, prompt))


def test_the_log_is_bounded_in_batches_and_bytes() -> None:
    log = ReplayLog(max_batches=3, max_bytes=100)
    assert list(log.since(0)) == []
    for number in range(5):
        log.add(number, bytes(10))
    assert [number for number, _ in log.since(0)] == [2, 3, 4]
    assert [number for number, _ in log.since(3)] == [3, 4]
    log.add(6, bytes(85))
    assert [number for number, _ in log.since(0)] == [4, 6]
    assert [number for number, _ in log.since(5)] == [6], "5 is a gap"
    assert list(log.since(7)) == []


def test_a_client_that_does_not_read_delays_nobody_and_rubbish_is_ignored(addresses: Addresses) -> None:
    queue = EventQueue()
    for i in range(300):  # 300 batches of 48 kB or more, which is more than the sockets take
        queue.stored(i.to_bytes(32, "big"), None, range(1 << 16, 5 << 14))
    with publishing(addresses, manager(), queue=queue) as (_, subscriber):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            idle, rude = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
            idle.setsockopt(zmq.RCVHWM, 1)
            for one in (idle, rude):
                one.connect(addresses.replay)
            idle.send_multipart([b"", struct.pack(">Q", 0)])
            for frames in ([b"x"], [b"", b"abc"], [b"", b"", b"", b""], [b"", bytes(900)]):
                rude.send_multipart(frames)
            assert [each.number for each in subscriber.missed(0)][:300] == list(range(300))
            assert not rude.poll(100)
            assert struct.unpack(">q", idle.recv_multipart()[2])[0] == 0
            numbers = [struct.unpack(">q", idle.recv_multipart()[2])[0] for _ in range(299)]
            assert numbers == list(range(1, 300)), "and it can read on"
        finally:
            context.destroy(linger=0)


# Mistakes.


def test_unusable_addresses_are_refused(addresses: Addresses) -> None:
    for bad in ("tcp://*:port", "nowhere://*:1", "tcp://*"):
        with pytest.raises(ConfigError, match=r"kv_events is .* give an address such as tcp://\*:5557"):
            Publisher(bad)
        with pytest.raises(ConfigError, match="kv_events_replay is"):
            Publisher(addresses.events, bad)
    first = Publisher("tcp://*:*")
    first.close()
    first.close()


def test_without_a_prefix_cache_there_is_nothing_to_publish(addresses: Addresses) -> None:
    publisher = Publisher(addresses.events)
    kv = KVManager(n_blocks=8, block_size=4, n_rows=2, max_blocks_per_row=8)
    with pytest.raises(ConfigError, match="this engine has none; turn prefix_caching on"):
        publisher.start(kv)
    publisher.close()
