"""A generation: a request as its user holds it, and the mailbox that the service fills for it."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from orca_jax.errors import EngineError, OutputFailed
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.tokenizer import TextStream

LOOK_SECONDS = 1.0  # no wait goes longer without a look at whether the service still lives


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the piece before: tokens, the text that is certain by now, and the reason of the end.

    Text lags behind tokens while it may be the beginning of a stop string or part of a character. Only
    the last piece has a finish reason. `logprobs` are those of `token_ids`, where they were asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One output of a prompt.

    `text` is the output alone, without special tokens and cut before a stop string; it is empty where the
    model has no tokenizer. `token_ids` are all that were generated, with the end-of-sequence token and
    those of a stop string. `seed` gives the same tokens again. `logprobs` are those of `token_ids`, and
    `prompt_logprobs` those of the prompt's tokens behind the first, which nothing comes before; None where
    they were not asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    n_input: int
    seed: int
    request_id: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Mailbox:
    """The service's end of a generation: the request's sink, and what its user has not taken yet.

    `stream` makes text of the tokens; without one there is none. `gone` tells why nothing will be put any
    more, None while the service works.
    """

    def __init__(self, stream: TextStream | None, gone: Callable[[], EngineError | None]) -> None:
        self.finish_reason: FinishReason | None = None
        self.failure: EngineError | None = None
        self.stream = stream
        self._gone = gone
        self._changed = threading.Condition(threading.Lock())
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._last_taken = False
        self._is_waiting = False

    # For the scheduler's thread.

    def push(self, token_id: int) -> bool:
        """OutputSink: True when a stop string is complete."""
        return self.stream is not None and self.stream.push(token_id)

    def put(
        self,
        token_id: int | None,
        reason: FinishReason | None,
        failure: EngineError | None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """A delivery; nothing changes after the one with a reason."""
        text = ""
        if self.stream is not None:
            if reason is not None:
                self.stream.finish()
            text = self.stream.take()
        with self._changed:
            if self.finish_reason is not None:
                return
            if token_id is not None:
                self._token_ids.append(token_id)
            if logprobs is not None:
                self._logprobs.append(logprobs)
            self._text.append(text)
            self.finish_reason = reason
            self.failure = failure
            if self._is_waiting:
                self._is_waiting = False
                self._changed.notify_all()

    # For the user's.

    def take(self, timeout: float | None) -> Piece | None:
        """The next piece, None after the last; see `Generation.next_piece`."""
        with self._changed:
            if self._last_taken:
                self._raise_failure()
                return None
            self._wait(lambda: bool(self._token_ids) or self.finish_reason is not None, timeout)
            return self._piece()

    def poll(self) -> Piece | None:
        """What is there now, without a wait; None when there is nothing new, or after the last piece."""
        with self._changed:
            if not self._token_ids and self.finish_reason is None:
                gone = self._gone()
                if gone is None:
                    return None
                self.finish_reason, self.failure = FinishReason.ERROR, gone
            return None if self._last_taken else self._piece()

    def wait_for_end(self, timeout: float | None) -> FinishReason:
        """The finish reason, once there is one; raises what the engine failed with."""
        with self._changed:
            self._wait(lambda: self.finish_reason is not None, timeout)
            self._raise_failure()
            assert self.finish_reason is not None
            return self.finish_reason

    def _piece(self) -> Piece:
        piece = Piece(tuple(self._token_ids), "".join(self._text), self.finish_reason, tuple(self._logprobs))
        self._token_ids.clear()
        self._logprobs.clear()
        self._text.clear()
        self._last_taken = self.finish_reason is not None
        return piece

    def _raise_failure(self) -> None:
        if self.failure is not None:
            kind = OutputFailed if isinstance(self.failure, OutputFailed) else EngineError
            raise kind(str(self.failure)) from self.failure

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing came within {timeout} seconds")
            gone = self._gone()
            if gone is not None:
                self.finish_reason, self.failure = FinishReason.ERROR, gone
                return
            self._is_waiting = True  # until the next delivery
            self._changed.wait(min(left, LOOK_SECONDS))


class Generation:
    """A request as its user holds it: an iterator of pieces that can be closed at any moment.

    For one consumer. What is not taken is kept, no more than the request's own output, and a slow consumer
    gets it as one larger piece. Leaving early, by `close`, by `with` or by dropping it, ends the request as
    cancelled and frees its slots within an iteration.
    """

    def __init__(
        self,
        request: Request,
        mailbox: Mailbox,
        *,
        end: Callable[[FinishReason], object],
        drop: Callable[[], object],
    ) -> None:
        self._request = request
        self._mailbox = mailbox
        self._end = end
        self._drop = drop

    @property
    def request_id(self) -> str:
        """The request's name, the caller's or one that was given."""
        return self._request.request_id

    @property
    def n_input(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.prompt_ids)

    @property
    def seed(self) -> int:
        """The caller's seed, or the one that was drawn."""
        return self._request.seed

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return self._request.prompt_ids

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Those of the prompt's tokens behind the first, from the first piece on; None if not asked for."""
        return self._request.prompt_logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self._mailbox.finish_reason

    @property
    def failure(self) -> EngineError | None:
        """What the engine failed with, if that ended it."""
        return self._mailbox.failure

    def poll(self) -> Piece | None:
        """The next piece if there is one already; None when there is nothing new, and after the last piece.

        Nothing is raised: a last piece with the reason `error` leaves why in `failure`.
        """
        return self._mailbox.poll()

    def next_piece(self, timeout: float | None = None) -> Piece | None:
        """Wait for the next piece; None after the last.

        `timeout` is in seconds; None waits for as long as the service lives. Raises TimeoutError; and
        EngineError after the last piece, if that has the reason `error`.
        """
        return self._mailbox.take(timeout)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self.next_piece()
        if piece is None:
            raise StopIteration
        return piece

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end; the whole output, whether pieces of it were taken or not.

        Raises TimeoutError, and EngineError if the engine failed.
        """
        reason = self._mailbox.wait_for_end(timeout)
        return GenerationResult(
            text="" if self._mailbox.stream is None else self._mailbox.stream.text,
            token_ids=list(self._request.output_ids),
            finish_reason=reason,
            n_input=self.n_input,
            seed=self.seed,
            request_id=self.request_id,
            logprobs=None if self._request.sampling.logprobs is None else list(self._request.logprobs),
            prompt_logprobs=self._request.prompt_logprobs,
        )

    def end(self, reason: FinishReason) -> None:
        """Ask the request to end for `reason`, if it has not yet; what came before can still be taken."""
        if self.finish_reason is None:
            self._end(reason)

    def cancel(self) -> None:
        """Ask the request to end as cancelled."""
        self.end(FinishReason.CANCELLED)

    def close(self) -> None:
        """The same as `cancel`, under the name that iterators have for it."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The garbage collector may call this anywhere, under any lock, so it takes none.
        if self.finish_reason is None:
            self._drop()
