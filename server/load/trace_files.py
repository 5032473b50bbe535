"""Reads traces from files: our own lines of JSON, a recording of `orca serve --record`, and public traces.

The format is found by the file's first line:

- Azure's LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025): CSV
  with TIMESTAMP, ContextTokens, GeneratedTokens.
- BurstGPT (Wang et al., KDD 2025): CSV with Timestamp, Request tokens, Response tokens. Rows without a
  response are requests that failed there, and are left out.
- Mooncake (Qin et al., FAST 2025): lines of JSON with `timestamp` in milliseconds, `input_length`,
  `output_length`, and `hash_ids`, a number for each block of 512 prompt tokens and what comes before it.

The public traces have lengths and no text. Prompts are random tokens; Mooncake's are made block by block from
the hashes, so that requests share the prefixes that they shared when the trace was taken.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orca_jax.errors import BadRecording
from orca_jax.service.recording import read_recording
from server.errors import TraceError
from server.load.trace import Trace, TracedRequest, random_prompt

MOONCAKE_BLOCK = 512  # tokens of one hash
_FIELDS = {"arrival", "n_input", "prompt_ids", "n_output", "after"}
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST = ("Timestamp", "Request tokens", "Response tokens")


def read_trace(path: Path, *, vocab_size: int, seed: int = 0, most: int | None = None) -> Trace:
    """Read a trace's requests in order of arrival, the first at 0; with `most` only so many of the first.

    A line of our own format is {"arrival": seconds, "n_input": tokens, "n_output": tokens}, with a random
    prompt, or with "prompt_ids": [...] instead of "n_input". The next turn of a conversation has "after", the
    number of the turn before (0 is the file's first request), and the other fields as in TracedRequest. Its
    arrivals are taken as they are.

    Raises TraceError, and OSError for a file that cannot be read.
    """
    draw = _Draw(np.random.default_rng(seed), seed, vocab_size)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            if '"orca_recording"' in first:
                return _recorded(path, most)
            read = _read_lines
            if first.lstrip()[:1] not in ("", "{"):
                read = _reader_of_table(path, first)
            requests = tuple(islice(read(path, file, draw), most))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8: {error}") from error
    if not requests:
        raise TraceError(f"{path} has no request; it needs a line of JSON, or a row, for each")
    return requests


class _Draw(NamedTuple):
    rng: np.random.Generator
    seed: int
    vocab_size: int

    def prompt(self, n_input: int) -> tuple[int, ...]:
        return random_prompt(self.rng, n_input, self.vocab_size)


class _FieldError(Exception):
    """An invalid field of a line; the message says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")


_Reader = Callable[[Path, Iterable[str], _Draw], Iterator[TracedRequest]]


def _recorded(path: Path, most: int | None) -> Trace:
    """The requests of a recording that have an end with output, with the prompts as they were."""
    try:
        recording = read_recording(path)
    except BadRecording as error:
        raise TraceError(str(error)) from error
    ended = [
        (request, len(recording.ends[request.arrival].output_ids))
        for request in recording.requests
        if request.arrival in recording.ends and recording.ends[request.arrival].output_ids
    ]
    if not ended:
        raise TraceError(f"{path} has no request that ended with output")
    start = ended[0][0].time
    return tuple(
        TracedRequest(request.encoder_ids or request.prompt_ids, n_output, request.time - start)
        for request, n_output in ended[:most]
    )


def _reader_of_table(path: Path, header: str) -> _Reader:
    columns = next(csv.reader([header]))
    if all(name in columns for name in _AZURE):
        return _table(_AZURE, _azure_seconds)
    if all(name in columns for name in _BURST):
        return _table(_BURST, _number_of_seconds)
    raise TraceError(
        f"{path} is not a trace: its first line is neither JSON nor the header of a known table; "
        f"there are {', '.join(_AZURE)} (Azure) and {', '.join(_BURST)} (BurstGPT)"
    )


def _table(columns: tuple[str, str, str], seconds_of: Callable[[str], float]) -> _Reader:
    def read(path: Path, lines: Iterable[str], draw: _Draw) -> Iterator[TracedRequest]:
        start: float | None = None
        last = 0.0
        for row, fields in enumerate(csv.DictReader(lines), 2):
            try:
                at, n_input, n_output = (fields[name] for name in columns)
                lengths = _cell(columns[1], n_input), _cell(columns[2], n_output)
                if not all(lengths):
                    continue
                seconds = seconds_of(at)
            except (_FieldError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {row}: {error}") from error
            start = seconds if start is None else start
            if seconds - start < last:
                raise TraceError(
                    f"{path}, line {row}: {columns[0]} is before that of the row above; sort them"
                )
            last = seconds - start
            yield TracedRequest(draw.prompt(lengths[0]), lengths[1], last)

    return read


def _cell(name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit():
        raise _FieldError(name, f"is {text!r}; it must be a number of tokens, 0 or more")
    return int(text)


def _azure_seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)  # of seven decimals it keeps six
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number_of_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"Timestamp is {text}; it must be seconds, 0 or more")
    return seconds


def _read_lines(path: Path, lines: Iterable[str], draw: _Draw) -> Iterator[TracedRequest]:
    blocks = _Blocks(draw)
    start: float | None = None
    last, n = 0.0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = _object(line)
            if "hash_ids" in fields:
                request = _mooncake(fields, blocks)
                start = request.arrival if start is None else start
                request = TracedRequest(request.prompt_ids, request.n_output, request.arrival - start)
            else:
                request = _request(fields, draw, n)
            if request.after is None:
                if request.arrival < last:
                    message = (
                        f"is {request.arrival:g}, before that of the request above; sort the lines by it"
                    )
                    raise _FieldError("arrival", message)
                last = request.arrival
        except _FieldError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        n += 1
        yield request


def _object(line: str) -> dict[str, Any]:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _FieldError("the line", f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _FieldError("the line", "is not a JSON object")
    return fields


class _Blocks:
    """Prompt tokens by hash: the same block for the same hash and seed."""

    def __init__(self, draw: _Draw) -> None:
        self._draw = draw
        self._known = dict[int, tuple[int, ...]]()

    def __getitem__(self, hash_id: int) -> tuple[int, ...]:
        if hash_id not in self._known:
            rng = np.random.default_rng([self._draw.seed, hash_id])
            self._known[hash_id] = random_prompt(rng, MOONCAKE_BLOCK, self._draw.vocab_size)
        return self._known[hash_id]


def _mooncake(fields: dict[str, Any], blocks: _Blocks) -> TracedRequest:
    n_input, n_output = _count(fields, "input_length"), _count(fields, "output_length")
    hashes: Any = fields["hash_ids"]
    n_blocks = -(-n_input // MOONCAKE_BLOCK)
    if (
        not isinstance(hashes, list)
        or any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in hashes)
        or len(hashes) != n_blocks
    ):
        raise _FieldError("hash_ids", f"must be {n_blocks} numbers, one for each {MOONCAKE_BLOCK} tokens")
    prompt = tuple(token for one in hashes for token in blocks[one])[:n_input]
    milliseconds = fields.get("timestamp")
    if not isinstance(milliseconds, int | float) or not 0 <= milliseconds < math.inf:
        raise _FieldError("timestamp", f"is {milliseconds!r}; it must be milliseconds, 0 or more")
    return TracedRequest(prompt, n_output, milliseconds / 1000)


def _request(fields: dict[str, Any], draw: _Draw, n_before: int) -> TracedRequest:
    """Make a request of one line of our own format, after `n_before` requests. Raises _FieldError."""
    for field in fields:
        if field not in _FIELDS:
            raise _FieldError(repr(field), f"is not known; there are {', '.join(sorted(_FIELDS))}")
    arrival = fields.get("arrival")
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or not 0 <= arrival < math.inf:
        raise _FieldError("arrival", f"is {arrival!r}; it must be seconds, 0 or more")
    n_output = _count(fields, "n_output")
    if ("n_input" in fields) == ("prompt_ids" in fields):
        raise _FieldError("n_input", "or prompt_ids must be there, and one of them alone")
    if "n_input" in fields:
        prompt_ids = draw.prompt(_count(fields, "n_input"))
    else:
        prompt_ids = _prompt_ids(fields["prompt_ids"], draw.vocab_size)
    return TracedRequest(prompt_ids, n_output, float(arrival), _after(fields, n_before))


def _after(fields: dict[str, Any], n_before: int) -> int | None:
    value = fields.get("after")
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n_before
    ):
        raise _FieldError(
            "after", f"is {value!r}; it must be the number of a request above, 0 to {n_before - 1}"
        )
    return value


def _count(fields: dict[str, Any], field: str) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _FieldError(field, f"is {value!r}; it must be a number of tokens, 1 or more")
    return value


def _prompt_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else []
    if not ids or any(not isinstance(one, int) or isinstance(one, bool) for one in ids):
        raise _FieldError("prompt_ids", "must be a list of token ids, with one at least")
    for one in ids:
        if not 0 <= one < vocab_size:
            raise _FieldError("prompt_ids", f"has {one}; the vocabulary has 0 to {vocab_size - 1}")
    return tuple(ids)
