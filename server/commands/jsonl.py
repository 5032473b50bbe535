"""Continues a JSONL file of prompts and writes a JSONL file of results in the same order."""

import io
import json
import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from orca_jax.errors import EngineError, InvalidRequest, QueueFull
from orca_jax.request.routed_experts import as_base64
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams, with_defaults
from orca_jax.service.generation import Generation, GenerationResult
from server.commands import outputs
from server.errors import UsageError

if TYPE_CHECKING:
    from orca_jax import LLM

MAX_LINE_BYTES = 1 << 22
MAX_MESSAGE = 1000  # characters; a message may quote a long value
_BATCHES_IN_FLIGHT = 4  # read this many full batches ahead, so that no iteration waits for input
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadLine(InvalidRequest):
    """A line that is not a valid request."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input; `data` is None if the line is too long."""

    number: int
    end: int  # offset of its end in the input, in bytes
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Job:
    """A line in flight: its running outputs, or its error."""

    line: Line
    prompt: Any
    outcome: list[Generation] | InvalidRequest | QueueFull

    @property
    def n_outputs(self) -> int:
        """The number of outputs, running or finished."""
        return len(self.outcome) if isinstance(self.outcome, list) else 0

    def close(self) -> None:
        """Cancel the outputs that are still running."""
        if isinstance(self.outcome, list):
            outputs.close(self.outcome)


@contextmanager
def open_files(input_name: str, output_name: str | None) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open both files without truncating the output. `-` means stdin or stdout; no output means stdout.

    Raises UsageError if one cannot be opened or both are the same.
    """
    with ExitStack() as opened:
        try:
            source: BinaryIO = sys.stdin.buffer
            if input_name != "-":
                source = opened.enter_context(open(input_name, "rb"))
            sink: BinaryIO = sys.stdout.buffer
            if output_name is not None and output_name != "-":
                descriptor = os.open(output_name, os.O_WRONLY | os.O_CREAT, 0o666)
                # Unbuffered: each record is written completely, or its error is reported.
                sink = opened.enter_context(os.fdopen(descriptor, "wb", buffering=0))
        except (OSError, ValueError) as error:
            name = getattr(error, "filename", None)
            raise UsageError(f"cannot open {name}: {getattr(error, 'strerror', error)}") from error
        input_file, output_file = _regular_file(source), _regular_file(sink)
        if input_file and output_file and os.path.samestat(input_file, output_file):
            raise UsageError("--output is the same file as --input; name another one")
        yield source, sink


def _regular_file(file: BinaryIO) -> os.stat_result | None:
    try:
        status = os.fstat(file.fileno())
    except io.UnsupportedOperation:  # a stand-in for stdin or stdout
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def run(llm: "LLM", source: BinaryIO, sink: BinaryIO, defaults: SamplingParams, console: Console) -> int:
    """Continue every line; returns the exit status: 1 if any line had an error, else 0.

    Reads only a few batches ahead, and writes each result once the results before it are written. If the
    engine fails, writes a record for each line in flight, then raises EngineError.
    """
    if _regular_file(sink) is not None and sink is not sys.stdout.buffer:
        sink.truncate(0)
    most_in_flight = _BATCHES_IN_FLIGHT * llm.serving.max_batch_size
    n_in_flight = 0
    jobs: deque[Job] = deque()
    with _Report(console, source) as report:
        try:
            for line in _lines(source):
                if llm.service.failure is not None:
                    break
                try:
                    jobs.append(_start(llm, line, defaults))
                except EngineError:  # raised below, after the records of lines in flight
                    break
                n_in_flight += jobs[-1].n_outputs
                while n_in_flight >= most_in_flight or len(jobs) >= most_in_flight:
                    n_in_flight -= jobs[0].n_outputs
                    _finish(jobs.popleft(), sink, report)
            while jobs:
                _finish(jobs.popleft(), sink, report)
        finally:
            for job in jobs:
                job.close()
    if llm.service.failure is not None:
        raise EngineError(f"the engine failed; the remaining lines were not run: {llm.service.failure}")
    return 1 if report.n_errors else 0


def _start(llm: "LLM", line: Line, defaults: SamplingParams) -> Job:
    prompt = None
    try:
        values = _values(line)
        prompt = values.pop("prompt", None)
        if prompt is None:
            raise BadLine("the line has no prompt", param="prompt")
        if unknown := sorted(values.keys() - _SAMPLING_FIELDS):
            allowed = ", ".join(["prompt", *sorted(_SAMPLING_FIELDS)])
            raise BadLine(f"unknown field {unknown[0]!r}; the fields are {allowed}", param=unknown[0])
        return Job(line, prompt, outputs.start(llm, prompt, replace(defaults, **with_defaults({}, values))))
    except (InvalidRequest, QueueFull) as error:  # QueueFull: too many grammars are being compiled
        return Job(line, prompt, error)


def _finish(job: Job, sink: BinaryIO, report: "_Report") -> None:
    record: dict[str, Any] = {"line": job.line.number}
    if job.prompt is not None:
        record["prompt"] = job.prompt
    n_tokens = 0
    try:
        if not isinstance(job.outcome, list):
            raise job.outcome
        results = [result for output in job.outcome for result in output.results()]
        n_tokens = sum(len(result.token_ids) for result in results)
        record |= _as_record(results)
    except (InvalidRequest, QueueFull, EngineError) as error:
        job.close()
        param = error.param if isinstance(error, InvalidRequest) else None
        message = str(error)
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        record["error"] = {"type": type(error).__name__, "param": param, "message": message}
    _write(sink, record)
    report.add(job.line, n_tokens, is_error="error" in record)


def _as_record(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """The outputs' fields of a record: at its top level for one output, in `choices` for several."""
    first = results[0]
    choices = [_choice(result) for result in results]
    record: dict[str, Any] = choices[0] if len(choices) == 1 else {"choices": choices}
    record["n_input"] = first.n_input
    record["n_cached"] = first.n_cached
    if first.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(first.prompt_logprobs)
    return record


def _choice(result: GenerationResult) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
    }
    if result.score is not None:
        choice["score"] = result.score
    if result.logprobs is not None:
        choice["logprobs"] = _logprobs(result.logprobs)
    if result.routed_experts is not None:
        choice["routed_experts"] = as_base64(result.routed_experts)
    return choice


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token_id,
            "logprob": _finite(logprob),
            "top": [[other, _finite(value)] for other, value in top],
        }
        for token_id, logprob, top in logprobs
    ]


def _finite(logprob: float) -> float | None:
    """None for the logarithm of probability 0, because JSON has no infinity."""
    return logprob if math.isfinite(logprob) else None


def _write(sink: BinaryIO, record: dict[str, Any]) -> None:
    try:
        data = json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:  # the prompt has lone surrogates: repeat it escaped, as it arrived
        data = json.dumps(record).encode("ascii")
    try:
        data += b"\n"
        while data:
            data = data[sink.write(data) :]
        sink.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"cannot write the output: {error.strerror}") from error


def _lines(source: BinaryIO) -> Iterator[Line]:
    """The lines that are not blank. Never holds more of a line than MAX_LINE_BYTES."""
    number = end = 0
    while data := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        end += len(data)
        too_long = len(data) > MAX_LINE_BYTES
        while too_long and not data.endswith(b"\n") and (data := source.readline(MAX_LINE_BYTES)):
            end += len(data)
        if number == 1 and not too_long:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if too_long or data.strip():
            yield Line(number, end, None if too_long else data)


def _values(line: Line) -> dict[str, Any]:
    """The JSON object of a line. Raises BadLine for anything else."""
    if line.data is None:
        raise BadLine(f"the line has more than {MAX_LINE_BYTES} bytes", param="line")
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"the line is not UTF-8: {error.reason} at byte {error.start}", param="line") from error
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise BadLine("the line is not usable JSON: it is nested too deeply", param="line") from error
    except ValueError as error:
        raise BadLine(f"the line is not JSON: {error}", param="line") from error
    if not isinstance(values, dict):
        raise BadLine(f"the line holds {type(values).__name__}, not an object", param="line")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key appears twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


class _Report:
    """A progress bar over the bytes of the input, if stderr is a terminal, and a final line."""

    def __init__(self, console: Console, source: BinaryIO) -> None:
        self.n_lines = self.n_errors = self.n_tokens = 0
        self._console = console
        status = _regular_file(source)
        self._progress = Progress(
            TextColumn("{task.description}", style="dim"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID = self._progress.add_task("Compiling", total=status and status.st_size)
        self._start = time.monotonic()

    def __enter__(self) -> "_Report":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._console.out(self._so_far(), style="dim", highlight=False)

    def add(self, line: Line, n_tokens: int, *, is_error: bool) -> None:
        """Count a written record."""
        self.n_lines += 1
        self.n_errors += is_error
        self.n_tokens += n_tokens
        self._progress.update(self._task, completed=line.end, description=self._so_far())

    def _so_far(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = f"{self.n_tokens:,} tokens in {seconds:.1f} s ({self.n_tokens / seconds:,.0f} tokens/s)"
        return f"{self.n_lines:,} lines, {self.n_errors:,} with errors, {rate}"
