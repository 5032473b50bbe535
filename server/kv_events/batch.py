"""Batches of events in vLLM's wire format: MessagePack, as vllm/distributed/kv_events.py describes it.

A batch is the array [time, events, rank]; an event is a map with its name under "type". Before its pull
request 42892 vLLM wrote events as arrays; routers that read only arrays do not understand our batches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from server.kv_events.event_queue import Cleared, Event, Removed, Stored, event_bytes

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
