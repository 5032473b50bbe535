"""A request's output on its way from the scheduler's thread to the user's, and the handle to read it by."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from orca_jax.errors import EngineError, OutputFailed
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.request import FinishReason, OutputSink, Request
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.tokenizer import TextStream

LOOK_SECONDS = 1.0  # a waiting user checks this often whether the service is still running


@dataclass(frozen=True, slots=True)
class Piece:
    """The output since the last piece: tokens, text that can no longer change, and the finish reason.

    Text lags behind tokens while it may begin a stop string or be part of a character. Only the last piece
    has a finish reason, and the version of the weights that computed the last token. `logprobs` belong to
    `token_ids`, if requested. The output of a beam search is one piece, with its `score`.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    weights_version: int | None = field(default=None, compare=False)
    score: float | None = None


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The tokens of an output up to now, from which another request can continue it.

    `logprobs` belong to `token_ids`, and are empty unless requested. `weights_versions` are those of a
    GenerationResult. The finish reason is None if further tokens were to come.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    weights_versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason | None = None


class PublishedSink(OutputSink, Protocol):
    """The sink of a request of the service, which publishes once an iteration what has been pushed."""

    def publish(self, reason: FinishReason | None, failure: EngineError | None) -> None:
        """Show the user all tokens so far. After a finish reason, further calls do nothing."""
        ...


class Output(PublishedSink):
    """The output of one request: the service writes it, and one user reads it in pieces.

    Tokens and log-probabilities stay in the request, which only appends to them. The scheduler publishes them
    once per iteration, or for a beam search at its end, so a user never sees the last token without its
    finish reason. `new_stream` makes the decoder from tokens to text; None for a model without a tokenizer.
    `stopped` returns why the service will publish nothing more, or None while it runs. `on_end` is called on
    the scheduler's thread once the finish reason can be read, and must not wait.
    """

    def __init__(
        self,
        request: Request,
        new_stream: Callable[[], TextStream | None],
        stopped: Callable[[], EngineError | None],
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.request = request
        self._on_end = on_end
        self.finish_reason: FinishReason | None = None
        self.failure: EngineError | None = None
        self._new_stream = new_stream
        self._stream = new_stream()
        self._stopped = stopped
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._n_tokens = 0  # published
        self._n_taken = 0
        self._text: list[str] = []  # published and not taken
        self._last_taken = False
        self._is_waiting = False

    # For the scheduler's thread.

    def push(self, token_id: int) -> bool:
        """OutputSink: True if a stop string is complete."""
        return self._stream is not None and self._stream.push(token_id)

    def publish(self, reason: FinishReason | None, failure: EngineError | None) -> None:
        """Show the user all tokens so far. After a finish reason, further calls do nothing."""
        stream = self._stream
        if stream is not None and reason is not None:
            stream.finish()
            if stream.stopped and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP  # an incomplete last character completed a stop string
        text = "" if stream is None else stream.take()
        with self._lock:  # the lock of `_changed`; entering `_changed` would cost two more calls per token
            if self.finish_reason is not None:
                return
            self._n_tokens = len(self.request.final_ids)
            self._text.append(text)
            self.finish_reason = reason
            self.failure = failure
            if self._is_waiting:
                self._is_waiting = False
                self._changed.notify_all()
        if reason is not None and self._on_end is not None:
            self._on_end()

    # For the user's thread.

    @property
    def text(self) -> str:
        """All text so far, taken or not."""
        return "" if self._stream is None else self._stream.text

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return None if self._stream is None else self._stream.stop_string

    def so_far(self) -> OutputSoFar:
        """The published tokens, also if the engine has failed meanwhile."""
        request = self.request
        with self._lock:  # the request may have more tokens by now, and only appends
            n, reason = self._n_tokens, self.finish_reason
        first, *others = request.weights_versions or ((0, 0),)
        return OutputSoFar(
            tuple(request.final_ids[:n]),
            tuple(request.logprobs[:n]),
            (first, *(pair for pair in others if pair[0] < n)),
            None if reason is FinishReason.ERROR else reason,
        )

    def pieces(self) -> list[Piece]:
        """The `n` best whole outputs of a beam search, best first; none before its end."""
        pieces: list[Piece] = []
        for one in (self.request.kind.found or ())[: self.request.sampling.n]:
            stream = self._new_stream()
            if stream is not None:
                for token_id in one.token_ids:
                    stream.push(token_id)
                stream.finish()
            reason = FinishReason.STOP if one.stopped else FinishReason.LENGTH
            text = "" if stream is None else stream.text
            version = self.request.weights_version
            pieces.append(Piece(one.token_ids, text, reason, weights_version=version, score=one.score))
        return pieces

    def take(self, timeout: float | None) -> Piece | None:
        """The next piece, None after the last; see `Generation.next_piece`."""
        with self._changed:
            if self._last_taken:
                self._raise_failure()
                return None
            self._wait(self._has_news, timeout)
            return self._next_piece()

    def poll(self) -> Piece | None:
        """The next piece if there is one already; None otherwise, and after the last piece. Never waits."""
        with self._changed:
            if self._last_taken:
                return None
            if not self._has_news():
                failure = self._stopped()
                if failure is None:
                    return None
                self.finish_reason, self.failure = FinishReason.ERROR, failure
            return self._next_piece()

    def wait_for_end(self, timeout: float | None) -> FinishReason:
        """Wait for the finish reason. Raises TimeoutError, and EngineError if the engine failed."""
        with self._changed:
            self._wait(lambda: self.finish_reason is not None, timeout)
            self._raise_failure()
            assert self.finish_reason is not None
            return self.finish_reason

    # Under the lock.

    def _has_news(self) -> bool:
        return self._n_tokens > self._n_taken or self.finish_reason is not None

    def _next_piece(self) -> Piece:
        request, new = self.request, slice(self._n_taken, self._n_tokens)
        logprobs = tuple(request.logprobs[new])  # empty unless requested
        version = None if self.finish_reason is None else request.weights_version
        text = "".join(self._text)
        token_ids = tuple(request.final_ids[new])
        piece = Piece(token_ids, text, self.finish_reason, logprobs, version, request.score)
        self._n_taken = self._n_tokens
        self._text.clear()
        self._last_taken = self.finish_reason is not None
        return piece

    def _raise_failure(self) -> None:
        if self.failure is not None:
            kind = type(self.failure) if isinstance(self.failure, OutputFailed) else EngineError
            raise kind(str(self.failure)) from self.failure

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no output came within {timeout} seconds")
            failure = self._stopped()
            if failure is not None:
                self.finish_reason, self.failure = FinishReason.ERROR, failure
                return
            self._is_waiting = True  # until the next `publish`
            self._changed.wait(min(left, LOOK_SECONDS))


def no_stream() -> None:
    """The `new_stream` of an output without text."""


class RequestHandle:
    """A submitted request, for one consumer. `Generation` adds blocking reads; the server adds async ones.

    Unread output is kept, so a slow consumer gets it as one larger piece. Leaving early, by `close`, by
    `with` or by dropping the handle, cancels the request and frees its slots within an iteration. The service
    holds the Output and never the handle; otherwise a dropped handle would go unnoticed.
    """

    def __init__(
        self, output: Output, end: Callable[[FinishReason], object], drop: Callable[[], object]
    ) -> None:
        """`end` asks the service to end the request. `drop` cancels it later, and takes no lock."""
        self._output = output
        self._request = output.request
        self._end = end
        self._drop = drop

    @property
    def request_id(self) -> str:
        """The caller's name for the request, or a generated one."""
        return self._request.request_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens; with an encoder, the encoder's input."""
        return self._request.encoder_ids or self._request.prompt_ids

    @property
    def n_input(self) -> int:
        """The number of prompt tokens; with an encoder, of its input."""
        return self._request.n_input

    @property
    def pooled(self) -> Vector | None:
        """The pooled hidden states of a request for an embedding that has ended."""
        return self._request.pooled_vector

    @property
    def routed_experts(self) -> ExpertIds | None:
        """The experts of an ended request's tokens, if requested; see GenerationResult."""
        return self._request.routed_experts

    @property
    def n_cached(self) -> int:
        """Prompt tokens whose keys and values were in the prefix cache; 0 before the first piece."""
        return self._request.n_cached

    @property
    def kv_lease(self) -> KVTransferParams | None:
        """The params with which another server fetches the prompt; None without a lease.

        They come with the request's end, or while its prompt is computed if it has `offer_early`.
        """
        return self._request.kv_lease

    @property
    def predicted(self) -> tuple[int, int] | None:
        """The numbers of the prediction's tokens that the output has and has not; None without one."""
        return self._request.kind.predicted

    @property
    def weights_version(self) -> int:
        """The version of the weights that computed the newest token, or will compute the first one."""
        return self._request.weights_version

    @property
    def seed(self) -> int:
        """The caller's seed, or the random one chosen for the request."""
        return self._request.seed

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of prompt tokens after the first, if requested; None before the first piece."""
        return self._request.prompt_logprobs

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the output tokens so far, if requested."""
        return self._request.logprobs

    def pieces(self) -> list[Piece]:
        """The whole outputs of a beam search that has ended, best first; for other requests none."""
        return self._output.pieces()

    def so_far(self) -> OutputSoFar:
        """The output up to now. Never waits, and can be read after a failure of the engine too."""
        return self._output.so_far()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return self._output.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the request; None if there is none (yet)."""
        return self._output.stop_string

    @property
    def failure(self) -> EngineError | None:
        """The engine's failure, if it ended the request."""
        return self._output.failure

    def poll(self) -> Piece | None:
        """The next piece if there is one already; None if there is nothing new, and after the last piece.

        Raises nothing: if the last piece has the reason `error`, `failure` is the cause.
        """
        return self._output.poll()

    def end(self, reason: FinishReason) -> None:
        """Ask the service to end the request. Output from before the end can still be read."""
        if self.finish_reason is None:
            self._end(reason)

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self.end(FinishReason.CANCELLED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may call this anywhere, under any lock, so it takes none.
        if self.finish_reason is None:
            self._drop()
