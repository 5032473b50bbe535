"""The scheduler's iterations as lines of JSON, for recordings and the live view."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from orca_jax.request.request import Row
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import IterationRecord

ALL_WAITING = -1  # instead of an arrival number
_MOST_NAMED = 256  # waiting requests of a line


class IterationLines:
    """Makes a line for each iteration of a scheduler, on its thread. docs/serving.md describes the lines.

    A full batch takes some tens of microseconds, so use it only while somebody wants the lines.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: dict[int, dict[str, Any]] = {}  # by the iteration's number

    def begin(self, record: IterationRecord, rows: Sequence[Row]) -> dict[str, Any]:
        """The line of an iteration that is about to be issued. The caller may add to it."""
        scheduler = self._scheduler
        prefill = [i for i, is_prompt in enumerate(record.initiation) if is_prompt]
        line: dict[str, Any] = {
            "iteration": record.number,
            "issued": record.issued,
            "rows": [(req.arrival, n) for req, n in rows],
            "bucket": record.bucket,
            "prefill": prefill,
            "starts": [rows[i][0].n_computed for i in prefill],
            "partial": [i for i in prefill if rows[i][1] < rows[i][0].n_to_compute],
            "slots": _slots(scheduler),
            "waiting": scheduler.pool.n_waiting,
            "held": _held(scheduler),
            "preempted": [req.arrival for req in scheduler.waiting_again],
        }
        if scheduler.adapters is not None:
            line["adapters"] = _without_adapter(scheduler)
        if scheduler.kv.snapshots is not None:
            line["snapshots"] = len(scheduler.kv.snapshots)
        if scheduler.kv.host is not None:
            line["host_blocks"] = len(scheduler.kv.host)
        if scheduler.kv.host_states is not None:
            line["host_states"] = len(scheduler.kv.host_states)
        self._in_flight[record.number] = line
        return line

    def end(self, record: IterationRecord) -> dict[str, Any] | None:
        """Complete the line of an iteration that has returned; None if there was no `begin` for it."""
        line = self._in_flight.pop(record.number, None)
        for lost in [number for number in self._in_flight if number < record.number]:
            del self._in_flight[lost]
        if line is not None:
            line["returned"] = record.returned
        return line


def _slots(scheduler: Scheduler) -> tuple[int, int, int]:
    """The slots that requests hold, how many of these have keys and values, and those only cached."""
    kv: KVManager = scheduler.kv
    n_held = (kv.n_blocks - kv.n_free_blocks) * kv.block_size
    admitted = scheduler.pool.admitted()
    n_empty = sum([max(0, kv.slots_of[req.row] - req.n_computed) for req in admitted if req.row >= 0])
    n_cached = 0 if kv.prefixes is None else kv.prefixes.n_idle * kv.block_size
    return n_held, max(0, n_held - n_empty), n_cached


def _without_adapter(scheduler: Scheduler) -> list[int]:
    """The first waiting requests whose LoRA adapter is on its way to the devices, by arrival numbers."""
    slots, waiting = scheduler.adapters, scheduler.pool.in_arrival_order().waiting()
    assert slots is not None
    return [req.arrival for req in islice(waiting, _MOST_NAMED) if slots.waits(req)]


def _held(scheduler: Scheduler) -> tuple[int, str] | None:
    """The first request that had to wait, by its arrival number, and why."""
    if scheduler.gate != "open" and scheduler.pool.n_waiting:
        return ALL_WAITING, "gate"
    return None if scheduler.held is None else (scheduler.held[0].arrival, scheduler.held[1])
