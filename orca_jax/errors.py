"""The error classes. Every mistake that a user can make has a class here; `assert` is for our own invariants.

A message says what was given, what is allowed, and what to do. `InvalidRequest.param` names the field at
fault, for the endpoint's own error format.
"""

import difflib
import re
import shlex
from collections.abc import Iterable
from enum import Enum
from importlib.metadata import PackageNotFoundError, requires

_MOST_SHOWN = 100  # characters of a value in a message
LIKELY = 0.75  # the share of common letters at which one name is probably a misspelling of the other
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([\w-]+)["']""")


class OrcaError(Exception):
    """Base class of everything that this package raises on purpose."""


class ConfigError(OrcaError, ValueError):
    """A configuration that cannot work, detected when it is made."""


class UnevenBlocks(ConfigError):
    """Packed weights whose blocks the devices of a stage cannot share; the message has degrees that work."""


class DifferentTokenizer(ConfigError):
    """A draft model whose token ids mean other tokens than the served model's; the message has the first."""


class HeadMismatch(ConfigError):
    """The head that is to draft was made for another model than the one that is served."""


class WorkerRefused(ConfigError):
    """A worker that differs from what the engine master expects, or has another secret; the message names
    the difference, expected and found.
    """


class WorkerUnreachable(ConfigError):
    """No answer from a worker's address within the timeout."""


class EngineError(OrcaError, RuntimeError):
    """The engine failed while running; requests in flight end with the reason `error`."""


class NotCompiledAhead(EngineError):
    """A program was needed that had not been compiled before the engine was ready, and the engine is
    configured to fail rather than make requests wait for the compiler.
    """


class OutputFailed(EngineError):
    """One output cannot continue, for example because its grammar exceeded its limits; others can."""


class AdapterFailed(OutputFailed):
    """The LoRA adapter of a request could not be read again from its directory."""


class GrammarExhausted(OutputFailed):
    """The request's own grammar exceeded its limits or left no token, so that the same request would fail
    again.
    """


class LossCause(Enum):
    """The cause of a worker's loss, which scheduling/quarantine.py weighs against the requests in flight."""

    FAULT = "fault"  # it crashed, raised, hung or sent nonsense: a request may have caused that
    MEMORY = "memory"  # the kernel's OOM killer ended it: because of a request, or of anything else
    UNKNOWN = "unknown"  # its line broke, and nobody knows how its process ended
    OUTSIDE = "outside"  # another process's signal ended or stopped it


class WorkerLost(EngineError):
    """A worker died, hangs or sends malformed messages. Its keys and values are lost, and so is everything in
    flight; an engine that can restart its workers resumes from there.

    `stage` counts from 0; the message counts from 1.
    """

    def __init__(self, stage: int, why: str, cause: LossCause = LossCause.FAULT) -> None:
        super().__init__(f"stage {stage + 1}: {why}")
        self.stage = stage
        self.why = why
        self.cause = cause


class BadPolicy(OrcaError, RuntimeError):
    """A scheduling policy broke an invariant in a simulation.

    `turn` is the number of the call of `choose`, from 1; `why` names what it returned and what is allowed.
    """

    def __init__(self, turn: int, why: str) -> None:
        super().__init__(f"turn {turn} of the policy: {why}")
        self.turn = turn
        self.why = why


class BadFrame(OrcaError, ValueError):
    """Bytes on the control plane that are not a valid message, or not one for this engine."""


class ServiceClosed(OrcaError, RuntimeError):
    """A request arrived after the service was closed."""


class EngineAsleep(OrcaError, RuntimeError):
    """A request arrived while the engine sleeps; it must be woken first."""


class RequestsStillRunning(OrcaError, TimeoutError):
    """A change that waits for running requests was given up, because they did not finish in time; nothing
    was changed.
    """


class QueueFull(OrcaError, RuntimeError):
    """The pool holds its maximum of waiting requests; try again later."""


class RequestEnded(OrcaError, RuntimeError):
    """An accepted request ended before it was complete."""


class RequestCancelled(RequestEnded):
    """Cancelled by its user, or by the server."""


class RequestTimedOut(RequestEnded, TimeoutError):
    """The request's deadline passed."""


class InvalidRequest(OrcaError, ValueError):
    """A request that can never run, detected when it is added; other requests are not affected."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidPrompt(InvalidRequest):
    """A prompt that is neither text nor token ids, or not valid text."""


class EmptyPrompt(InvalidRequest):
    """A prompt without tokens."""


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for one output token within the model's positions."""


class TokenOutOfRange(InvalidRequest):
    """A token id that is not in the vocabulary."""


class RequestTooLarge(InvalidRequest):
    """`max_tokens` that could never be reserved, even on an idle engine."""


class InvalidSamplingParameter(InvalidRequest):
    """A sampling parameter outside its range."""


class InvalidSchedulingParameter(InvalidRequest):
    """A scheduling parameter outside its range, or without effect under the engine's scheduling policy."""


class UnknownAdapter(InvalidRequest):
    """A request for a LoRA adapter that the engine does not have."""


class NotSupported(InvalidRequest):
    """A known parameter that is not implemented; rejected rather than ignored."""


class BadRecording(OrcaError, ValueError):
    """A file that is not a recording of `--record`, or not one that this version reads."""


class CheckpointError(OrcaError):
    """A checkpoint that cannot be read. The message names file, tensor, expected and found."""


class NotACheckpoint(CheckpointError):
    """No checkpoint there: the path or a required file is missing."""


class UnsupportedModel(CheckpointError):
    """A checkpoint whose architecture, or an option of it, this engine does not implement."""


class BadModelConfig(CheckpointError):
    """A config.json with absurd, contradictory or missing values, or files that disagree."""


class CorruptFile(CheckpointError):
    """A truncated, malformed or hostile file."""


class UnsafeFile(CheckpointError):
    """A pickle (.bin, .pt, .pth, .ckpt ...): rejected, because reading one runs code."""


class TensorMismatch(CheckpointError):
    """A tensor that is missing, or whose shape or dtype differs from the config."""


class BadAdapter(CheckpointError):
    """A LoRA adapter that does not fit the served model, or computes something that is not computed here."""


def shown(value: object) -> str:
    """A short form of the client's value for an error message, at a cost that does not grow with it."""
    if isinstance(value, list):
        return f"a list of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[: _MOST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def closest(name: str, known: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """The known name closest to `name`, whatever its case; None if none shares that much with it."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=at_least)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error message: the known name closest to `name`, compared without their `prefix`."""
    found = closest(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known])
    return f"; did you mean {prefix}{found}?" if found else ""


def install_line(extra: str) -> str:
    """A pip command for the packages of an extra; it does not name this package, which no index has."""
    try:
        listed = [each.partition(";") for each in requires("orca_jax") or ()]
    except PackageNotFoundError:  # run from its files, without being installed
        listed = []
    needed = [shlex.quote(name.strip()) for name, _, marker in listed if extra in _EXTRA.findall(marker)]
    return f"pip install {' '.join(needed)}" if needed else f"pip install -e '.[{extra}]' -c constraints.txt"


def is_failure(error: BaseException) -> bool:
    """Whether this is an Exception or a panic of a Rust library, unlike KeyboardInterrupt and its relatives.

    pyo3 creates a class PanicException for each library, which cannot be imported; hence the name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
