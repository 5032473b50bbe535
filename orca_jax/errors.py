"""The error tree. Every mistake a user can make is a leaf here; `assert` is for our own invariants.

A message says what came, what is allowed, and what to do. `InvalidRequest.param` names the field at
fault, so that an endpoint can put it into its own error shape.
"""


class OrcaError(Exception):
    """Anything this package raises on purpose."""


class ConfigError(OrcaError, ValueError):
    """A configuration that cannot work, found when it is made."""


class WorkerRefused(ConfigError):
    """A worker that is another than the engine master takes it for, or knows another secret; the message
    names what differs, expected and found.
    """


class WorkerUnreachable(ConfigError):
    """Nothing answers at a worker's address within the time allowed."""


class EngineError(OrcaError, RuntimeError):
    """The engine failed while it ran; the requests in flight end with the reason `error`."""


class NotCompiledAhead(EngineError):
    """A program was needed that had not been compiled before the engine was ready, and the engine is one that
    fails rather than let requests wait for a compiler.
    """


class OutputFailed(EngineError):
    """One output cannot go on, as where its grammar outgrew its limits; the engine and all others do."""


class WorkerLost(EngineError):
    """A worker died, hangs or answers rubbish. Keys and values are lost, and with them what is in flight; an
    engine that can bring its workers up again goes on from there.

    `stage` counts from 0; the message counts as its reader does, from 1.
    """

    def __init__(self, stage: int, why: str) -> None:
        super().__init__(f"stage {stage + 1}: {why}")
        self.stage = stage
        self.why = why


class BadFrame(OrcaError, ValueError):
    """Bytes on the control plane that are no message of its protocol, or not one for this engine."""


class ServiceClosed(OrcaError, RuntimeError):
    """A request came after the service was closed."""


class QueueFull(OrcaError, RuntimeError):
    """As many requests wait as the pool may hold; try again later."""


class RequestEnded(OrcaError, RuntimeError):
    """A request that was accepted ended before it was complete."""


class RequestCancelled(RequestEnded):
    """Its user cancelled it, or the server had to."""


class RequestTimedOut(RequestEnded, TimeoutError):
    """Its deadline passed."""


class InvalidRequest(OrcaError, ValueError):
    """A request that can never be run, found when it is added; nothing else is disturbed."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidPrompt(InvalidRequest):
    """A prompt that is neither text nor token ids, or not valid text."""


class EmptyPrompt(InvalidRequest):
    """A prompt without a token."""


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for one output token within the model's positions."""


class TokenOutOfRange(InvalidRequest):
    """A token id that is not in the vocabulary."""


class RequestTooLarge(InvalidRequest):
    """`max_tokens` that could never be reserved, whatever else runs."""


class InvalidSamplingParameter(InvalidRequest):
    """A sampling parameter outside its range."""


class NotSupported(InvalidRequest):
    """A parameter that is understood but not built; refused rather than ignored."""


class CheckpointError(OrcaError):
    """A checkpoint that cannot be read. The message names file, tensor, expected and found."""


class NotACheckpoint(CheckpointError):
    """No checkpoint at that place: the path or a needed file is missing."""


class UnsupportedModel(CheckpointError):
    """A checkpoint of an architecture, or with an option, that this engine does not compute."""


class BadModelConfig(CheckpointError):
    """A config.json with absurd, contradictory or missing values, or files that disagree."""


class CorruptFile(CheckpointError):
    """A truncated, malformed or hostile file."""


class UnsafeFile(CheckpointError):
    """A pickle (.bin, .pt, .pth, .ckpt ...): reading one runs code, so it is refused."""


class TensorMismatch(CheckpointError):
    """A tensor that is missing, or has another shape or dtype than the config says."""
