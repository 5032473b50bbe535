"""A playing's timeline for Perfetto (https://ui.perfetto.dev) and chrome://tracing: Chrome's trace events.

There are two groups of tracks. The engine has a track for each batch that may be in flight at the same time.
Each request has a track with the time in the queue, the initiation phase and the increment phase; for the
baseline also the time in which input tokens are fed one by one, and the time in which a request has all its
tokens and waits for its batch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.paper.request_level import RowWork
from bench.paper.serving_records import ServingRecords
from orca_jax.scheduling.timeline import RequestRecord

Event = dict[str, Any]
PHASES = {RowWork.FED: "input, token by token", RowWork.GENERATING: "increment"}  # after the initiation


def write_timeline(playings: Mapping[str, ServingRecords], path: Path) -> None:
    """Write the events of several plays, keyed by system, on one time axis, as JSON."""
    all_events = [
        event
        for i, (name, records) in enumerate(playings.items())
        for event in events(records, name, first_process=2 * i + 1)
    ]
    with path.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": all_events, "displayTimeUnit": "ms"}, file)


def events(records: ServingRecords, name: str, *, first_process: int = 1) -> Iterator[Event]:
    """Chrome's trace events: names ("M"), and a complete event ("X") for each slice; microseconds.

    The engine is the process `first_process`, the requests are the next one.
    """
    yield _named("process_name", first_process, 0, f"{name}: engine")
    yield _named("process_name", first_process + 1, 0, f"{name}: requests")
    yield from _of_engine(records, first_process)
    yield from _of_requests(records, first_process + 1)


def _of_engine(records: ServingRecords, process: int) -> Iterator[Event]:
    free_at: list[float] = []  # by track
    for i, one in enumerate(records.iterations):
        if one.returned is None:  # it was lost
            continue
        track = next((t for t, time in enumerate(free_at) if time <= one.issued), len(free_at))
        if track == len(free_at):
            free_at.append(0.0)
            yield _named("thread_name", process, track, f"batch in flight {track + 1}")
        free_at[track] = one.returned
        n_first = sum(one.initiation)
        args: dict[str, Any] = {
            "requests": " ".join(one.request_ids),
            "initiation": n_first,
            "increment": one.n_rows - n_first,
            "tokens": one.n_tokens,
            "bucket": one.bucket,
        }
        if records.rows:
            args |= {work.value: records.rows[i].rows.count(work) for work in RowWork}
        name = f"iteration {one.number}: {one.n_rows} rows, {one.n_tokens} tokens"
        yield _slice(name, process, track, one.issued, one.returned, args)


def _of_requests(records: ServingRecords, process: int) -> Iterator[Event]:
    phases: dict[str, dict[str, float]] = {}  # by request: its phases so far, and their ends
    for i, one in enumerate(records.iterations):
        for j, name in enumerate(one.request_ids):
            work = records.rows[i].rows[j] if records.rows else RowWork.GENERATING
            if one.returned is not None and work is not RowWork.DONE:
                begins = name not in phases if records.rows else one.initiation[j]
                phases.setdefault(name, {})["initiation" if begins else PHASES[work]] = one.returned
    for track, one in enumerate(sorted(records.requests, key=lambda one: one.arrived)):
        yield _named("thread_name", process, track, f"request {one.request_id}")
        ends = phases.get(one.request_id, {})
        if ends and one.finished is not None:
            if records.rows:
                ends["waits for its batch"] = one.finished
            else:  # tokens are delivered shortly after the return
                ends[list(ends)[-1]] = one.finished
        yield from _of_request(one, process, track, ends)


def _of_request(one: RequestRecord, process: int, track: int, ends: dict[str, float]) -> Iterator[Event]:
    """A request's time in the queue, followed by its phases."""
    args = {"n_input": one.n_input, "n_output": one.n_output}
    start = one.arrived
    if one.scheduled is not None:
        ends = {"queue": one.scheduled, **ends}
    for name, end in ends.items():
        if end > start:
            yield _slice(name, process, track, start, end, args)
            start = end


def _slice(name: str, process: int, track: int, start: float, end: float, args: dict[str, Any]) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": round(start * 1e6, 3),
        "dur": round((end - start) * 1e6, 3),
        "args": args,
    }


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
