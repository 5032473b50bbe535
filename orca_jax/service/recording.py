"""Reads the file that a Recorder wrote."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca_jax.errors import BadRecording, InvalidRequest
from orca_jax.request.pooling import Pooling, checked_pooling
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.recorder import RECORDING_VERSION


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """An arrival. `arrival` is its number; `max_tokens` counts input and output, as in Request."""

    arrival: int
    turn: int
    time: float
    request_id: str
    prompt_ids: tuple[int, ...]
    scored_ids: tuple[int, ...]  # the known output of a request for log-probabilities
    encoder_ids: tuple[int, ...]  # the encoder's input, if there is one
    pooling: Pooling | None  # for a request for an embedding
    max_tokens: int
    seed: int
    sampling: SamplingParams
    owner: str
    priority: int
    cache_salt: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    """An iteration's rows (arrival number, tokens), with the turns and seconds of its issue and return."""

    turn: int
    returned_in: int
    issued: float
    returned: float
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """The end of a request, with its output and the output's log-probabilities, if requested."""

    turn: int
    time: float
    reason: FinishReason
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None


@dataclass(slots=True)
class Recording:
    """A recording. `asked` has pairs (arrival number, reason) of the requests asked to end, by turn.

    `last_turn` is the last turn that is complete in the file and can be repeated. `why_last` says why the
    recording ends there; "" if the service was closed.
    """

    header: dict[str, Any]
    requests: list[RecordedRequest] = field(default_factory=list[RecordedRequest])
    asked: dict[int, list[tuple[int, FinishReason]]] = field(
        default_factory=dict[int, "list[tuple[int, FinishReason]]"]
    )
    iterations: dict[int, RecordedIteration] = field(default_factory=dict[int, RecordedIteration])
    ends: dict[int, RecordedEnd] = field(default_factory=dict[int, RecordedEnd])
    weights: dict[str, float] = field(default_factory=dict[str, float])  # owners' shares
    last_turn: int = -1
    why_last: str = "the file ends there"


def read_recording(path: str | Path) -> Recording:
    """Read a recording, even if its end is missing. Raises BadRecording."""
    lines = _lines(Path(path))
    header = next(lines, (1, {}))[1]
    version = header.get("orca_recording")
    if version != RECORDING_VERSION:
        what = "is not a recording of orca" if version is None else f"is a recording of version {version}"
        raise BadRecording(f"{path} {what}; this version reads recordings of version {RECORDING_VERSION}")
    recording = Recording(header)
    for number, line in lines:
        try:
            if not _take(recording, line):
                break
        except (KeyError, TypeError, ValueError, InvalidRequest) as error:
            message = f"{path}, line {number} is not a line of a recording: {type(error).__name__}: {error}"
            raise BadRecording(message) from error
    if [request.arrival for request in recording.requests] != list(range(len(recording.requests))):
        raise BadRecording(f"{path} lacks arrivals between others; record again")
    return recording


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and object, without an incomplete last line."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise BadRecording(f"{path}, line {number} is not an object of JSON")
                yield number, line
    except OSError as error:
        raise BadRecording(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadRecording(f"{path} is not a file of JSON lines: {error}") from error


def _take(recording: Recording, line: dict[str, Any]) -> bool:
    """Add a line; False after the last that counts."""
    if "closed" in line:
        recording.last_turn, recording.why_last = line["closed"], ""
        return False
    if "stopped" in line:
        recording.why_last = f"the recording was stopped: {line['stopped']}"
        return False
    if "not_repeatable" in line:
        recording.last_turn, recording.why_last = line["turn"] - 1, str(line["not_repeatable"])
        return False
    if "arrived" in line:
        recording.requests.append(_request(line))
    elif "weights" in line:
        recording.weights |= line["weights"]
    elif "ends" in line:
        asked = recording.asked.setdefault(line["turn"], [])
        asked.append((line["ends"], FinishReason(line["reason"])))
    elif "iteration" in line:
        rows = tuple([(int(arrival), int(n)) for arrival, n in line["rows"]])
        recording.iterations[line["iteration"]] = RecordedIteration(
            line["turn"], line["returned_in"], line["issued"], line["returned"], rows
        )
    elif "finished" in line:
        logprobs = line.get("logprobs")
        recording.ends[line["finished"]] = RecordedEnd(
            line["turn"],
            line["time"],
            FinishReason(line["reason"]),
            tuple(line["output"]),
            None if logprobs is None else tuple(logprobs),
        )
    turn = line.get("returned_in", line["turn"])
    recording.last_turn = max(recording.last_turn, turn - 1)  # other lines of this turn may be missing
    return True


def _request(line: dict[str, Any]) -> RecordedRequest:
    return RecordedRequest(
        arrival=line["arrived"],
        turn=line["turn"],
        time=line["time"],
        request_id=line["id"],
        prompt_ids=tuple(line["prompt"]),
        scored_ids=tuple(line.get("given", ())),
        encoder_ids=tuple(line.get("encoder", ())),
        pooling=None if line.get("pooling") is None else checked_pooling(line["pooling"]),
        max_tokens=line["max_tokens"],
        seed=line["seed"],
        sampling=SamplingParams(**line["sampling"]),
        owner=line["owner"],
        priority=line["priority"],
        cache_salt=(line["salt"],),
    )
