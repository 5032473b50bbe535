"""Answers a JSONL file of requests with a JSONL file of records in the same order, or goes on with one.

A request is a prompt or a conversation; `conversation_lines.py` reads the latter.
"""

import io
import json
import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TimeElapsedColumn

from orca_jax.errors import EngineError, InvalidRequest, OutputFailed, QueueFull
from orca_jax.request.routed_experts import as_base64
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams, with_defaults
from orca_jax.service.generation import Generation, GenerationResult
from server.commands.answer_file import OTHERWISE, Answers, AnswerStream, Kept, locked_answers
from server.commands.conversation_lines import check_fields, message_fields, prepare_reply
from server.commands.notes import description, progress_bar
from server.commands.replies import Prepared, Replies, close_outputs, start_outputs
from server.commands.request_lines import BadLine, Line, read_lines, request_hash
from server.errors import UsageError

if TYPE_CHECKING:
    from orca_jax import LLM

MAX_MESSAGE = 1000  # characters; a message may quote a long value
_BATCHES_IN_FLIGHT = 4  # read this many full batches ahead, so that no iteration waits for input
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
NO_MODEL = "0" * 16  # as a model's hash


@dataclass(frozen=True, slots=True)
class Request:
    """A line as a request: its JSON object, or None and the `error`; and the request's hash."""

    line: Line
    values: dict[str, Any] | None
    hash: str
    error: BadLine | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A request in flight: its running outputs, or its error; with the `reply` if it is a conversation."""

    request: Request
    outcome: list[Generation] | InvalidRequest | QueueFull
    reply: Prepared | None = None

    @property
    def n_outputs(self) -> int:
        """The number of outputs, running or finished."""
        return len(self.outcome) if isinstance(self.outcome, list) else 0

    def close(self) -> None:
        """Cancel the outputs that are still running."""
        if isinstance(self.outcome, list):
            close_outputs(self.outcome)


@contextmanager
def open_files(
    input_name: str, output_name: str | None, *, overwrite: bool = False
) -> Iterator[tuple[BinaryIO, Answers]]:
    """Open both files and read the output's records. `-` is stdin or stdout; no output name is stdout too.

    Raises UsageError if a file cannot be opened, if both are the same, or if the output holds anything but
    records and may not be overwritten. Changes nothing in it.
    """
    with ExitStack() as opened:
        source: BinaryIO = sys.stdin.buffer
        try:
            if input_name != "-":
                source = opened.enter_context(open(input_name, "rb"))
            descriptor = None if output_name in (None, "-") else _open_output(output_name)
        except (OSError, ValueError) as error:
            name = getattr(error, "filename", None)
            raise UsageError(f"cannot open {name}: {getattr(error, 'strerror', error)}") from error
        if output_name is None or descriptor is None:
            yield source, AnswerStream(sys.stdout.buffer)
            return
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            # Unbuffered: each record is written completely, or its error is reported.
            sink = opened.enter_context(os.fdopen(descriptor, "wb", buffering=0))
            yield source, AnswerStream(sink)
            return
        file = opened.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
        input_status = _regular_file(source)
        if input_status is not None and os.path.samestat(input_status, status):
            raise UsageError("--output is the same file as --input; name another one")
        yield source, locked_answers(file, output_name, overwrite=overwrite)


def _open_output(name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # such as a pipe's end, which is for writing only
        return os.open(name, os.O_WRONLY)


def _regular_file(file: BinaryIO) -> os.stat_result | None:
    try:
        status = os.fstat(file.fileno())
    except io.UnsupportedOperation:  # a stand-in for stdin
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def run(
    llm: "LLM",
    source: BinaryIO,
    answers: Answers,
    defaults: SamplingParams,
    console: Console,
    *,
    replies: Callable[[], Replies] | None = None,
    model: str = NO_MODEL,
    retry_errors: bool = False,
) -> int:
    """Answer every line that has no answer yet; returns the exit status: 1 if any line has an error, else 0.

    Reads only a few batches ahead, and writes the records in order. `replies` is called at the first
    conversation. `model` is the model's hash. An error of an earlier run stays, unless its line has changed
    or `retry_errors` is set.

    Raises UsageError if an answer of an earlier run is to another request or of another model, and
    NotSupported if there are conversations and the model reads none. Raises EngineError if the engine fails;
    lines in flight then have no records.
    """
    starter = _Starter(llm, defaults, replies)
    _check_model(answers, model)
    n_before, last_before, n_met = len(answers), answers.last_line, 0
    most_in_flight = _BATCHES_IN_FLIGHT * llm.serving.max_batch_size
    n_in_flight = 0
    jobs: deque[Job] = deque()

    def finish_first() -> None:
        nonlocal n_in_flight
        n_in_flight -= jobs[0].n_outputs
        _finish(jobs[0], answers, report, model)
        jobs.popleft()

    with _Report(console, source, answers) as report:
        try:
            for line in read_lines(source):
                request = _request(line, defaults)
                kept = answers.kept(line.number) if line.number <= last_before else None
                if kept is not None:
                    n_met += 1
                    if _stays(request, kept, answers.name, retry_errors=retry_errors):
                        report.keep(line, is_error=kept.is_error)
                        continue
                job = starter.start(request)
                while isinstance(job.outcome, QueueFull) and jobs:
                    finish_first()  # and so make room
                    job = starter.start(request)
                jobs.append(job)
                n_in_flight += job.n_outputs
                while n_in_flight >= most_in_flight or len(jobs) >= most_in_flight:
                    finish_first()
            while jobs:
                finish_first()
            _check_met(answers, n_before, n_met)
            answers.finish()
        except EngineError as error:
            then = f"; the same command goes on after line {answers.last_line}" if answers.name else ""
            raise EngineError(
                f"the engine failed; the remaining lines were not run{then}: {error}"
            ) from error
        finally:
            for job in jobs:
                job.close()
    return 1 if report.n_errors else 0


def check_answers(
    source: BinaryIO, answers: Answers, defaults: SamplingParams, *, model: str, retry_errors: bool = False
) -> None:
    """Raise the errors of `run` about an earlier run's answers before the model is loaded.

    Checks nothing if the input cannot be read twice.
    """
    _check_model(answers, model)
    if not len(answers) or _regular_file(source) is None:
        return
    begin, n_met = source.tell(), 0
    for line in read_lines(source):
        if line.number > answers.last_line:
            break
        kept = answers.kept(line.number)
        if kept is not None:
            n_met += 1
            _stays(_request(line, defaults), kept, answers.name, retry_errors=retry_errors)
    source.seek(begin)
    _check_met(answers, len(answers), n_met)


def _check_model(answers: Answers, model: str) -> None:
    if answers.model_hash not in (None, model):
        raise UsageError(
            f"{answers.name} has answers of another model: its weights, tokenizer, chat template, dtype or "
            f"load format differ; give the model of the first run, {OTHERWISE}"
        )


def _check_met(answers: Answers, n_before: int, n_met: int) -> None:
    """Raise UsageError if some of the `n_before` records are of lines that the input does not have."""
    if n_met < n_before:
        raise UsageError(
            f"{answers.name} has answers to {n_before - n_met} lines that the input does not have; give the "
            f"input of the first run, {OTHERWISE}"
        )


def _request(line: Line, defaults: SamplingParams) -> Request:
    try:
        values = line.values()
    except BadLine as error:
        return Request(line, None, request_hash(line, None, defaults), error)
    return Request(line, values, request_hash(line, values, defaults))


def _stays(request: Request, kept: Kept, name: str, *, retry_errors: bool) -> bool:
    """Whether this record of an earlier run stays."""
    if kept.is_error:
        return kept.request_hash == request.hash and not retry_errors
    if kept.request_hash != request.hash:
        raise UsageError(
            f"{name} has an answer to line {request.line.number}, but to another request: the line or a "
            f"sampling flag has changed; give the input and the flags of the first run, {OTHERWISE}"
        )
    return True


class _Starter:
    """Starts requests; `defaults` are the sampling parameters that a line does not set."""

    def __init__(self, llm: "LLM", defaults: SamplingParams, replies: Callable[[], Replies] | None) -> None:
        self._llm, self._defaults, self._new_replies = llm, defaults, replies
        self._replies: Replies | None = None

    def start(self, request: Request) -> Job:
        """Start a request; an invalid one, or one without room for its grammar, is a job with an error."""
        values = request.values
        replies = None
        if values is not None and values.get("messages") is not None and self._new_replies is not None:
            replies = self._replies = self._replies or self._new_replies()
            replies.prompts.template()  # without one every such line would have the same error
        try:
            if values is None:
                assert request.error is not None
                raise request.error
            check_fields(values, _SAMPLING_FIELDS)
            given = {name: value for name, value in values.items() if name in _SAMPLING_FIELDS}
            sampling = _with_seed(replace(self._defaults, **with_defaults({}, given)))
            if replies is None:
                return Job(request, start_outputs(self._llm, values["prompt"], sampling))
            reply = prepare_reply(replies, values, sampling)
            return Job(request, replies.start(reply), reply)
        except (InvalidRequest, QueueFull) as error:  # QueueFull: running grammars take all their memory
            return Job(request, error)


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """Set a seed where nothing is drawn: a random one would make the records of two runs differ."""
    draws = sampling.temperature > 0 and not sampling.use_beam_search
    return sampling if draws or sampling.seed is not None else replace(sampling, seed=0)


def _finish(job: Job, answers: Answers, report: "_Report", model: str) -> None:
    request = job.request
    error: Exception | None = None
    results: list[GenerationResult] = []
    try:
        if not isinstance(job.outcome, list):
            raise job.outcome
        results = [result for output in job.outcome for result in output.results()]
    except (InvalidRequest, QueueFull, OutputFailed) as caught:
        job.close()
        error = caught
    # `answer_file.py` reads these first fields, in this order.
    record: dict[str, Any] = {"line": request.line.number, "request_hash": request.hash, "model_hash": model}
    if error is not None:
        record["error"] = _as_error(error)
    for name in ("prompt", "messages"):
        if request.values is not None and request.values.get(name) is not None:
            record[name] = request.values[name]
    if error is None:
        choices = [_choice(result) for result in results]
        if job.reply is not None:
            for i, (choice, result) in enumerate(zip(choices, results, strict=True)):
                choice |= message_fields(job.reply, result, call_id=f"call_{request.hash}{i:04x}")
        record |= _as_record(results, choices)
    answers.append(_as_line(record))
    report.add(request.line, results, is_error=error is not None)


def _as_error(error: Exception) -> dict[str, Any]:
    message = str(error)
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"type": type(error).__name__, "param": param, "message": message}


def _as_record(results: Sequence[GenerationResult], choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The outputs' fields of a record: at its top level for one output, in `choices` for several."""
    first = results[0]
    record: dict[str, Any] = choices[0] if len(choices) == 1 else {"choices": choices}
    record["n_input"] = first.n_input
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


def _as_line(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # the prompt has lone surrogates: repeat it escaped, as it arrived
        return json.dumps(record).encode("ascii") + b"\n"


class _Report:
    """A progress bar over the bytes of the input, if stderr is a terminal, and a final line."""

    def __init__(self, console: Console, source: BinaryIO, answers: Answers) -> None:
        self.n_lines = self.n_errors = 0
        self._n_kept = self._n_kept_errors = self._n_tokens = self._n_input = self._n_cached = 0
        self._console = console
        status = _regular_file(source)
        columns = (description(), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = progress_bar(console, *columns, redirects=False)
        self._task: TaskID = self._progress.add_task("Compiling", total=status and status.st_size)
        self._start = time.monotonic()
        if len(answers):
            self._say(f"{answers.name} has the answers up to line {answers.last_line:,}; going on")

    def __enter__(self) -> "_Report":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._say(self._so_far())
        if self._n_input:
            self._say(f"{self._n_cached:,} of {self._n_input:,} prompt tokens were in the prefix cache")
        if self._n_kept_errors:
            self._say(f"{self._n_kept_errors:,} errors are an earlier run's; --retry-errors runs them again")

    def keep(self, line: Line, *, is_error: bool) -> None:
        """Count a record that an earlier run wrote."""
        self._n_kept += 1
        self._n_kept_errors += is_error
        self._count(line, is_error=is_error)

    def add(self, line: Line, results: Sequence[GenerationResult], *, is_error: bool) -> None:
        self._n_tokens += sum(len(result.token_ids) for result in results)
        if results:
            self._n_input += results[0].n_input
            self._n_cached += results[0].n_cached
        self._count(line, is_error=is_error)

    def _count(self, line: Line, *, is_error: bool) -> None:
        self.n_lines += 1
        self.n_errors += is_error
        self._progress.update(self._task, completed=line.end, description=self._so_far())

    def _so_far(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        kept = f" ({self._n_kept:,} kept)" if self._n_kept else ""
        rate = f"{self._n_tokens:,} tokens in {seconds:.1f} s ({self._n_tokens / seconds:,.0f} tokens/s)"
        return f"{self.n_lines:,} lines{kept}, {self.n_errors:,} with errors, {rate}"

    def _say(self, text: str) -> None:
        self._console.out(text, style="dim", highlight=False)
