"""The one object through which a user holds a request."""

from collections.abc import Callable
from typing import Self

from orca_jax.errors import EngineError
from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.service.output import Output, Piece


class RequestHandle:
    """A submitted request, for one consumer. `Generation` adds blocking reads; the server adds async ones.

    Output that the consumer has not read is kept, at most the request's whole output, and a slow consumer
    gets it as one larger piece. Leaving early, by `close`, by `with` or by dropping the handle, cancels the
    request and frees its slots within an iteration. The service holds the Output and never the handle, or a
    dropped handle could not be noticed.
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
        return self._request.prompt_ids

    @property
    def n_input(self) -> int:
        """The number of prompt tokens."""
        return len(self._request.prompt_ids)

    @property
    def seed(self) -> int:
        """The caller's seed, or the random one chosen for the request."""
        return self._request.seed

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Of each prompt token after the first. None before the first piece, or if not requested."""
        return self._request.prompt_logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return self._output.finish_reason

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
