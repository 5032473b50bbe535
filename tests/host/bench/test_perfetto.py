"""The timeline of a run as trace viewers read it, event by event."""

import json
from array import array
from pathlib import Path

from bench.paper.perfetto import events, write_timeline
from bench.paper.request_level import RowsRecord, RowWork
from bench.paper.serving_records import ServingRecords
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord

GENERATING, FED, DONE = RowWork
ENGINE, REQUESTS = 1, 2  # process ids


def request(name: str, n_input: int, *times: float) -> RequestRecord:
    """Arrival, first iteration, tokens."""
    arrived, scheduled, *tokens = times
    return RequestRecord(
        name, n_input, arrived, scheduled, array("d", tokens), tokens[-1], FinishReason.LENGTH
    )


def iteration(
    number: int, issued: float, returned: float, rows: dict[str, int], first: str = ""
) -> IterationRecord:
    """`rows` are input lengths by request; those of `first` are in their initiation phase."""
    lengths = tuple(rows.values())
    initiation = tuple(name in first for name in rows)
    return IterationRecord(number, issued, tuple(rows), initiation, lengths, sum(lengths), returned)


def test_the_tracks_of_a_small_serving() -> None:
    """A generates three tokens, B joins it for one; B's iteration is issued before A's first returned."""
    records = ServingRecords(
        requests=[request("B", 2, 0.5, 0.75, 2.0), request("A", 4, 0.0, 0.0, 1.0, 2.0, 3.0)],
        iterations=[
            iteration(0, 0.0, 1.0, {"A": 4}, first="A"),
            iteration(1, 0.75, 2.0, {"A": 1, "B": 2}, first="B"),
            iteration(2, 1.0, 3.0, {"A": 1}),
        ],
    )

    def ran(name: str, track: int, ts: float, dur: float, args: dict[str, object]) -> dict[str, object]:
        return {"name": name, "ph": "X", "pid": ENGINE, "tid": track, "ts": ts, "dur": dur, "args": args}

    def phase(name: str, track: int, ts: float, dur: float) -> dict[str, object]:
        args = {"n_input": (4, 2)[track], "n_output": (3, 1)[track]}
        return {"name": name, "ph": "X", "pid": REQUESTS, "tid": track, "ts": ts, "dur": dur, "args": args}

    def named(kind: str, process: int, track: int, name: str) -> dict[str, object]:
        return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}

    assert list(events(records, "orca(2)")) == [
        named("process_name", ENGINE, 0, "orca(2): engine"),
        named("process_name", REQUESTS, 0, "orca(2): requests"),
        named("thread_name", ENGINE, 0, "batch in flight 1"),
        ran("iteration 0: 1 rows, 4 tokens", 0, 0, 1e6,
            {"requests": "A", "initiation": 1, "increment": 0, "tokens": 4, "bucket": 4}),
        named("thread_name", ENGINE, 1, "batch in flight 2"),
        ran("iteration 1: 2 rows, 3 tokens", 1, 0.75e6, 1.25e6,
            {"requests": "A B", "initiation": 1, "increment": 1, "tokens": 3, "bucket": 3}),
        ran("iteration 2: 1 rows, 1 tokens", 0, 1e6, 2e6,
            {"requests": "A", "initiation": 0, "increment": 1, "tokens": 1, "bucket": 1}),
        named("thread_name", REQUESTS, 0, "request A"),
        phase("initiation", 0, 0, 1e6),
        phase("increment", 0, 1e6, 2e6),
        named("thread_name", REQUESTS, 1, "request B"),
        phase("queue", 1, 0.5e6, 0.25e6),
        phase("initiation", 1, 0.75e6, 1.25e6),
    ]  # fmt: skip


def test_the_baseline_s_tracks_show_fed_tokens_and_waiting_requests(tmp_path: Path) -> None:
    """A (1 in, 2 out) and B (3 in, 2 out): B's input takes three iterations, and A waits two of them."""
    rows = [(GENERATING, FED), (GENERATING, FED), (DONE, GENERATING), (DONE, GENERATING)]
    names = {"A": 1, "B": 1}
    records = ServingRecords(
        requests=[request("A", 1, 0.0, 0.0, 4.0, 4.0), request("B", 3, 0.0, 0.0, 4.0, 4.0)],
        iterations=[iteration(i, i, i + 1, names, first="AB" if i == 0 else "") for i in range(4)],
        rows=[RowsRecord(i, 0, row) for i, row in enumerate(rows)],
    )
    path = tmp_path / "timeline.json"
    write_timeline({"ft(2, 2)": records, "again": records}, path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [
        (e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == REQUESTS
    ]
    assert slices == [
        (0, "initiation", 0, 1e6), (0, "increment", 1e6, 1e6), (0, "waits for its batch", 2e6, 2e6),
        (1, "initiation", 0, 1e6), (1, "input, token by token", 1e6, 1e6), (1, "increment", 2e6, 2e6),
    ]  # fmt: skip
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        1: "ft(2, 2): engine", 2: "ft(2, 2): requests", 3: "again: engine", 4: "again: requests"
    }  # fmt: skip
    assert (
        len(events) % 2 == 0
        and [e | {"pid": e["pid"] + 2} for e in events[2 : len(events) // 2]]
        == (events[len(events) // 2 + 2 :])
    )
    works = [
        {work.value: e["args"][work.value] for work in RowWork}
        for e in events
        if e["ph"] == "X" and e["pid"] == ENGINE
    ]
    assert works == [
        {"generating": 1, "fed": 1, "done": 0}, {"generating": 1, "fed": 1, "done": 0},
        {"generating": 1, "fed": 0, "done": 1}, {"generating": 1, "fed": 0, "done": 1},
    ]  # fmt: skip
