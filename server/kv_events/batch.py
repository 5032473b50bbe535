"""Batches of events in vLLM's wire format: MessagePack, as vllm/distributed/kv_events.py describes it.

A batch is the array [time, events, rank]; an event is a map with its name under "type". vLLM before its pull
request 42892 wrote events as arrays; routers that read only those do not understand ours.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from server.kv_events.event_queue import Cleared, Event, Removed, Stored, event_bytes

# Routers rank the memories that a block can be in. This one is the fastest, next to the device's arithmetic;
# for an engine on a CPU, too: "CPU" is where vLLM's GPUs offload blocks to.
_MEDIUM = "GPU"
_RANK = 0  # of data parallelism: our replicas are servers of their own
_MAX_BYTES = 1 << 16  # of a batch's events, by the estimate of `event_bytes`


def batches(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """These events in order, in batches of bounded size, each with at least one."""
    start, n_bytes = 0, 0
    for i, event in enumerate(events):
        n_bytes += event_bytes(event)
        if n_bytes > _MAX_BYTES and i > start:
            yield events[start:i]
            start, n_bytes = i, event_bytes(event)
    if start < len(events):
        yield events[start:]


def encoded(events: Sequence[Event], *, time: float, block_size: int) -> bytes:
    """The payload of a batch; `time` is in seconds since 1970."""
    return msgpack.Packer().pack([time, list(_maps(events, block_size)), _RANK])


def _maps(events: Sequence[Event], block_size: int) -> Iterator[dict[str, Any]]:
    """Blocks that follow one another in a prompt become one event, as in vLLM."""
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
