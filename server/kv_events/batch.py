"""Batches of events in vLLM's wire format: MessagePack, as vllm/distributed/kv_events.py describes it.

A batch is the array [time, events, rank]; an event is a map with its name under "type". Before its pull
request 42892 vLLM wrote events as arrays; routers that read only arrays do not understand our batches.
"""

import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

_LOW_64_BITS = 8  # bytes, at the end of a hash
_EVENT_BYTES = 200  # an event in memory, without its tokens
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """The prefix cache can find a block. Hashes are the low 64 bits of the cache's hashes."""

    block_hash: int
    parent: int | None
    token_ids: "array[int]"


@dataclass(frozen=True, slots=True)
class Removed:
    """The prefix cache can no longer find a block."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The prefix cache is empty."""


Event = Stored | Removed | Cleared


class EventQueue:
    """A `BlockListener` that keeps the events of the prefix cache until the publisher takes them.

    It holds at most `max_events` events of `max_bytes` in all. Once an event does not fit, it and all later
    ones are dropped until the next `take`, so that the published events have no gap but at their end.
    """

    def __init__(self, *, max_events: int = 100_000, max_bytes: int = 64 << 20) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # for the fields below; only held briefly
        self._events: list[Event] = []
        self._n_bytes = 0
        self._n_lost = 0  # since the last `take`
        self._n_dropped = 0

    @property
    def n_dropped(self) -> int:
        """Number of events dropped since the start."""
        return self._n_dropped

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        tokens = array("i", token_ids)
        self._append(Stored(short_hash(block_hash), None if parent is None else short_hash(parent), tokens))

    def removed(self, block_hash: bytes) -> None:
        self._append(Removed(short_hash(block_hash)))

    def cleared(self) -> None:
        self._append(Cleared())

    def take(self) -> tuple[list[Event], bool]:
        """Remove and return all events, and whether later ones were dropped."""
        with self._lock:
            taken, lost = self._events, self._n_lost > 0
            self._events, self._n_bytes, self._n_lost = [], 0, 0
        return taken, lost

    def _append(self, event: Event) -> None:
        n_bytes = event_bytes(event)
        with self._lock:
            full = len(self._events) >= self._max_events or self._n_bytes + n_bytes > self._max_bytes
            if self._n_lost or full:
                self._n_lost += 1
                self._n_dropped += 1
                return
            self._events.append(event)
            self._n_bytes += n_bytes


def short_hash(block_hash: bytes) -> int:
    """Return the part of a block's hash that is published: the last 64 bits, as in vLLM."""
    return int.from_bytes(block_hash[-_LOW_64_BITS:], "big")


def event_bytes(event: Event) -> int:
    """Estimate the memory that an event takes."""
    return _EVENT_BYTES + (_TOKEN_BYTES * len(event.token_ids) if isinstance(event, Stored) else 0)


# Routers rank the memories that a block can be in; this is the fastest, next to the device's arithmetic. An
# engine on a CPU says so too, because "CPU" is the memory that vLLM's GPUs offload blocks to.
_MEDIUM = "GPU"
_RANK = 0  # in data parallelism, which we have not: each replica is a server
_MAX_BYTES = 1 << 16  # of a batch's events, as `event_bytes` estimates them


def batches(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Split the events, in order, into batches of bounded size with at least one event each."""
    start, n_bytes = 0, 0
    for i, event in enumerate(events):
        n_bytes += event_bytes(event)
        if n_bytes > _MAX_BYTES and i > start:
            yield events[start:i]
            start, n_bytes = i, event_bytes(event)
    if start < len(events):
        yield events[start:]


def encoded(events: Sequence[Event], *, time: float, block_size: int) -> bytes:
    """Encode a batch as the payload of a message; `time` is in seconds since 1970."""
    return msgpack.Packer().pack([time, list(_maps(events, block_size)), _RANK])


def _maps(events: Sequence[Event], block_size: int) -> Iterator[dict[str, Any]]:
    """Make the events' maps. Consecutive blocks of a prompt become one event, as in vLLM."""
    run: list[Stored] = []
    for event in events:
        if run and not (isinstance(event, Stored) and event.parent == run[-1].block_hash):
            yield _stored(run, block_size)
            run = []
        if isinstance(event, Stored):
            run.append(event)
        elif isinstance(event, Removed):
            yield {"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": _MEDIUM}
        else:
            assert isinstance(event, Cleared)
            yield {"type": "AllBlocksCleared"}
    if run:
        yield _stored(run, block_size)


def _stored(run: Sequence[Stored], block_size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [each.block_hash for each in run],
        "parent_block_hash": run[0].parent,
        "token_ids": [token for each in run for token in each.token_ids],
        "block_size": block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }
