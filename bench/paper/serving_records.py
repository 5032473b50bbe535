"""The records of playing a trace, on a real engine or a simulated one: requests, iterations, rows.

Times are seconds after the trace's start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.paper.request_level import RowsRecord
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord


@dataclass(frozen=True, slots=True)
class ServingRecords:
    """Records of one play: finished requests in order of their ends, iterations in order of issue.

    `rows` has the baseline's rows for each iteration; without it every row's token is part of an output.
    """

    requests: Sequence[RequestRecord]
    iterations: Sequence[IterationRecord]
    rows: Sequence[RowsRecord] = ()

    def __post_init__(self) -> None:
        assert not self.rows or [one.number for one in self.rows] == [one.number for one in self.iterations]


def as_json(records: ServingRecords) -> dict[str, Any]:
    """Every request and iteration in JSON's types; a row is the first letter of its RowWork."""
    works = ["".join(work[0] for work in one.rows) for one in records.rows]
    return {
        "requests": [
            {
                "id": one.request_id,
                "n_input": one.n_input,
                "n_output": one.n_output,
                "arrived": _rounded(one.arrived),
                "scheduled": _rounded(one.scheduled),
                "first_token": _rounded(one.token_times[0] if one.token_times else None),
                "finished": _rounded(one.finished),
            }
            for one in records.requests
        ],
        "iterations": [
            {
                "issued": _rounded(one.issued),
                "returned": _rounded(one.returned),
                "requests": " ".join(one.request_ids),
                "input_lengths": list(one.input_lengths),
                "bucket": one.bucket,
                **({"rows": works[i]} if works else {}),
            }
            for i, one in enumerate(records.iterations)
        ],
    }


def _rounded(seconds: float | None) -> float | None:
    """Round to microseconds."""
    return None if seconds is None else round(seconds, 6)
