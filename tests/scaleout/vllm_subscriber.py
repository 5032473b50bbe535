"""A subscriber to K/V events, written from vLLM's published schema and independent of our publisher.

The schema is vllm/distributed/kv_events.py of vLLM 0.32, restated here. A message on the PUB socket has three
frames: the topic, the sequence number in 8 bytes (big-endian), the payload. A request on the ROUTER socket
is a sequence number, and its answers have the same three frames, until one has the number -1, no payload.
The payload is MessagePack: EventBatch is an array (`array_like`), events are maps with a "type" (`tag`).
"""

import struct
from dataclasses import MISSING, dataclass, fields
from typing import Any

import msgpack
import zmq

SECONDS = 20.0
END = -1


@dataclass(frozen=True)
class BlockStored:
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


@dataclass(frozen=True)
class BlockRemoved:
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
EVENTS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


@dataclass(frozen=True)
class Batch:
    number: int
    ts: float
    events: list[Event]
    data_parallel_rank: int | None


def event(fields_of: dict[str, Any]) -> Event:
    """Decode like msgspec: a field without a default is required, and unknown fields are ignored."""
    kind = EVENTS[fields_of.pop("type")]
    names = {field.name for field in fields(kind)}
    missing = {field.name for field in fields(kind) if field.default is MISSING} - fields_of.keys()
    assert not missing, f"{kind.__name__} lacks {missing}"
    assert fields_of.keys() <= names, f"{kind.__name__} has {fields_of.keys() - names}"
    return kind(**fields_of)


def batch(frames: list[bytes], topic: bytes) -> Batch:
    """Decode a message."""
    name, number, payload = frames
    assert name == topic
    ts, events, rank = msgpack.unpackb(payload)
    assert isinstance(ts, float)
    return Batch(struct.unpack(">q", number)[0], ts, [event(each) for each in events], rank)


class Subscriber:
    """Reads batches from a PUB socket, and missed ones from a ROUTER socket."""

    def __init__(self, endpoint: str, replay: str | None = None, *, topic: str = "") -> None:
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._sub.connect(endpoint)
        self._replay = replay

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def read(self, seconds: float = SECONDS) -> Batch | None:
        """The next batch; None if there is none for `seconds`."""
        if not self._sub.poll(int(1000 * seconds)):
            return None
        return batch(self._sub.recv_multipart(), self._topic)

    def missed(self, number: int) -> list[Batch]:
        """The batches from this number on that the publisher still has."""
        assert self._replay is not None
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._replay)
        dealer.send_multipart([b"", struct.pack(">Q", number)])
        batches = []
        while True:
            assert dealer.poll(int(1000 * SECONDS)), f"no end after {len(batches)} batches"
            empty, *frames = dealer.recv_multipart()
            assert empty == b""
            if struct.unpack(">q", frames[1])[0] == END:
                assert frames[0] == frames[2] == b""
                dealer.close(linger=0)
                return batches
            batches.append(batch(frames, self._topic))


class Index:
    """A router's index of one engine: its blocks by hash, each with its parent and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, batch: Batch) -> None:
        """Apply the events to the index."""
        for one in batch.events:
            if isinstance(one, BlockStored):
                size, parent = one.block_size, one.parent_block_hash
                assert len(one.token_ids) == size * len(one.block_hashes)
                for i, block_hash in enumerate(one.block_hashes):
                    self.blocks[block_hash] = parent, tuple(one.token_ids[i * size : (i + 1) * size])
                    parent = block_hash
            elif isinstance(one, BlockRemoved):
                for block_hash in one.block_hashes:
                    self.blocks.pop(block_hash, None)
            else:
                self.blocks.clear()
