"""Reads traces from files: our own lines of JSON, a recording of `orca serve --record`, and public traces.

The format is found by the file's first line:

- Azure's LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025): CSV
  with TIMESTAMP, ContextTokens, GeneratedTokens.
- BurstGPT (Wang et al., KDD 2025): CSV with Timestamp, Request tokens, Response tokens. Rows without a
  response are requests that failed there, and are left out.
- Mooncake (Qin et al., FAST 2025): lines of JSON with `timestamp` in milliseconds, `input_length`,
  `output_length`, and `hash_ids`, a number for each block of 512 prompt tokens and what comes before it.

- AgentX, ServeGen's clients, conversations as text and fitted traces: agentx.py, servegen.py, sharegpt.py and
  fitted.py. The first two may be directories.

A file whose name ends in .gz is unpacked. The public traces have lengths and no text. Prompts are random
tokens; those of Mooncake and AgentX are made block by block from the hashes, so that requests share the
prefixes that they shared when the trace was taken.
"""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from orca_jax.errors import BadRecording
from orca_jax.service.recording import read_recording
from server.errors import TraceError
from server.load import agentx, fitted, servegen, sharegpt
from server.load.drawn_prompts import Blocks, Draw
from server.load.trace import Trace, TracedRequest
from server.load.trace_fields import FieldError, count, hashes, seconds

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
    draw = Draw(np.random.default_rng(seed), seed, vocab_size, most)
    try:
        if path.is_dir():
            requests = tuple(islice(_read_folder(path, draw), most))
        else:
            unpack = gzip.open if path.suffix == ".gz" else open
            with unpack(path, "rt", encoding="utf-8-sig", newline="") as file:
                first = file.readline()
                file.seek(0)
                if '"orca_recording"' in first:
                    return _recorded(path, most)
                requests = tuple(islice(_reader(path, first)(path, file, draw), most))
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not UTF-8: {error}") from error
    if not requests:
        raise TraceError(f"{path} has no request; it needs a line of JSON, or a row, for each")
    return requests


_Reader = Callable[[Path, Iterable[str], Draw], Iterator[TracedRequest]]


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


def _reader(path: Path, first: str) -> _Reader:
    """Find the reader of a file with this first line. Raises TraceError."""
    begin = first.lstrip()[:1]
    if begin not in ("", "{", "["):
        return _reader_of_table(path, first)
    try:
        fields: Any = json.loads(first)
    except (ValueError, RecursionError):
        fields = None
    if begin == "[" or fields is None or sharegpt.is_conversation(fields):
        return _read_objects
    if agentx.is_conversation(fields) or "fitted" in fields:
        return _read_objects
    return _read_lines


def _read_folder(folder: Path, draw: Draw) -> Iterator[TracedRequest]:
    """ServeGen's clients, or AgentX's conversations, one in each file."""
    if servegen.is_servegen(folder):
        yield from servegen.servegen_requests(folder, draw)
        return
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise TraceError(
            f"{folder} is no trace; a directory has ServeGen's chunk-*-trace.csv, or AgentX's *.json"
        )
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            found.append(_object(path.read_text(encoding="utf-8")))
        except FieldError as error:
            raise TraceError(f"{path}: {error}") from error
    try:
        yield from agentx.agentx_requests(found, draw)
    except FieldError as error:
        raise TraceError(f"{folder}: {error}") from error


def _read_objects(path: Path, lines: Iterable[str], draw: Draw) -> Iterator[TracedRequest]:
    """Conversations, as one list, one object, or an object in each line; or a fitted trace."""
    text = "".join(lines)
    try:
        objects = _objects(text)
        first = objects[0] if objects and isinstance(objects[0], dict) else {}
        if "fitted" in first:
            yield from fitted.fitted_requests(first, draw)
        elif agentx.is_conversation(first):
            yield from agentx.agentx_requests(objects, draw)
        elif sharegpt.is_conversation(first):
            yield from sharegpt.sharegpt_requests(objects, draw.vocab_size)
        elif objects:  # one request over several lines
            yield from _read_lines(path, [json.dumps(one) for one in objects], draw)
    except FieldError as error:
        raise TraceError(f"{path}: {error}") from error


def _objects(text: str) -> list[Any]:
    try:
        whole: Any = json.loads(text)
    except RecursionError as error:
        raise FieldError("the file", "is nested too deeply") from error
    except ValueError:
        return [_object(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


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
    def read(path: Path, lines: Iterable[str], draw: Draw) -> Iterator[TracedRequest]:
        start: float | None = None
        last = 0.0
        for row, fields in enumerate(csv.DictReader(lines), 2):
            try:
                at, n_input, n_output = (fields[name] for name in columns)
                lengths = _cell(columns[1], n_input), _cell(columns[2], n_output)
                if not all(lengths):
                    continue
                time = seconds_of(at)
            except (FieldError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {row}: {error}") from error
            start = time if start is None else start
            if time - start < last:
                raise TraceError(
                    f"{path}, line {row}: {columns[0]} is before that of the row above; sort them"
                )
            last = time - start
            yield TracedRequest(draw.prompt(lengths[0]), lengths[1], last)

    return read


def _cell(name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit():
        raise FieldError(name, f"is {text!r}; it must be a number of tokens, 0 or more")
    return int(text)


def _azure_seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)  # of seven decimals it keeps six
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number_of_seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(f"Timestamp is {text}; it must be seconds, 0 or more")
    return number


def _read_lines(path: Path, lines: Iterable[str], draw: Draw) -> Iterator[TracedRequest]:
    blocks = Blocks(draw, MOONCAKE_BLOCK)
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
                    raise FieldError("arrival", message)
                last = request.arrival
        except FieldError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        n += 1
        yield request


def _object(line: str) -> dict[str, Any]:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FieldError("the line", f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise FieldError("the line", "is not a JSON object")
    return fields


def _mooncake(fields: dict[str, Any], blocks: Blocks) -> TracedRequest:
    n_input, n_output = count(fields, "input_length"), count(fields, "output_length")
    known = hashes(fields, -(-n_input // MOONCAKE_BLOCK), MOONCAKE_BLOCK)
    milliseconds = seconds(fields, "timestamp", "milliseconds")
    return TracedRequest(blocks.prompt(known, n_input), n_output, milliseconds / 1000)


def _request(fields: dict[str, Any], draw: Draw, n_before: int) -> TracedRequest:
    """Make a request of one line of our own format, after `n_before` requests. Raises FieldError."""
    for field in fields:
        if field not in _FIELDS:
            raise FieldError(repr(field), f"is not known; there are {', '.join(sorted(_FIELDS))}")
    arrival = seconds(fields, "arrival")
    n_output = count(fields, "n_output")
    if ("n_input" in fields) == ("prompt_ids" in fields):
        raise FieldError("n_input", "or prompt_ids must be there, and one of them alone")
    if "n_input" in fields:
        prompt_ids = draw.prompt(count(fields, "n_input"))
    else:
        prompt_ids = _prompt_ids(fields["prompt_ids"], draw.vocab_size)
    return TracedRequest(prompt_ids, n_output, arrival, _after(fields, n_before))


def _after(fields: dict[str, Any], n_before: int) -> int | None:
    value = fields.get("after")
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n_before
    ):
        raise FieldError(
            "after", f"is {value!r}; it must be the number of a request above, 0 to {n_before - 1}"
        )
    return value


def _prompt_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else []
    if not ids or any(not isinstance(one, int) or isinstance(one, bool) for one in ids):
        raise FieldError("prompt_ids", "must be a list of token ids, with one at least")
    for one in ids:
        if not 0 <= one < vocab_size:
            raise FieldError("prompt_ids", f"has {one}; the vocabulary has 0 to {vocab_size - 1}")
    return tuple(ids)
