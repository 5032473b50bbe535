"""A generation: a request that is read by blocking calls, as `LLM` returns it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orca_jax.request.request import FinishReason
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.service.output import Piece, RequestHandle


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One output of a prompt.

    `text` is the output without special tokens, cut before a stop string; empty if the model has no
    tokenizer. `token_ids` are all generated tokens, including an end-of-sequence token and the tokens of a
    stop string. The same `seed` gives the same tokens again. `logprobs` belong to `token_ids`, and
    `prompt_logprobs` to the prompt tokens after the first; None if not requested. The keys and values of the
    first `n_cached` of the `n_input` prompt tokens were in the prefix cache.

    `routed_experts` are the experts chosen by all tokens of prompt and output but the last, which never runs:
    [n_input + len(token_ids) - 1, layers with experts, experts that a token chooses], uint8, or uint16 with
    more than 256 experts. None if not requested; fewer tokens if the request ended early.

    `score` is the score of a beam search's output: its log-probability over its length to the power of
    `length_penalty`.

    `weights_version` is the version of the weights that computed the output. If the weights were replaced
    meanwhile (`LLM.update_weights` with running="continue") it is the version for the last token, and
    `weights_versions` has a pair (index of its first token, version) for each version.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    n_input: int
    seed: int
    request_id: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    n_cached: int = 0
    weights_version: int = 0
    weights_versions: tuple[tuple[int, int], ...] = ((0, 0),)
    score: float | None = None
    routed_experts: ExpertIds | None = None

    @property
    def token_versions(self) -> list[int]:
        """The version of the weights that computed each of `token_ids`."""
        ends = [*(first for first, _ in self.weights_versions[1:]), len(self.token_ids)]
        pairs = zip(self.weights_versions, ends, strict=True)
        return [version for (first, version), end in pairs for _ in range(first, end)]


class Generation(RequestHandle):
    """An iterator of output pieces that can be closed at any moment; `result` is the whole output."""

    def next_piece(self, timeout: float | None = None) -> Piece | None:
        """Wait for the next piece; None after the last.

        `timeout` is in seconds; None waits as long as the service lives. Raises TimeoutError; and EngineError
        after a last piece with the reason `error`.
        """
        return self._output.take(timeout)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self.next_piece()
        if piece is None:
            raise StopIteration
        return piece

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end and return the whole output, whether pieces of it have been read or not.

        A beam search returns its best output. Raises TimeoutError, and EngineError if the engine failed.
        """
        reason = self._output.wait_for_end(timeout)
        request = self._request
        versions, n_output = request.weights_versions, len(request.final_ids)
        return GenerationResult(
            text=self._output.text,
            token_ids=list(request.final_ids),
            finish_reason=reason,
            n_input=self.n_input,
            seed=self.seed,
            request_id=self.request_id,
            logprobs=None if request.sampling.logprobs is None else list(request.logprobs),
            prompt_logprobs=request.prompt_logprobs,
            n_cached=self.n_cached,
            weights_version=self.weights_version,
            # A version may have computed no token, if the request ended just after an update.
            weights_versions=(*versions[:1], *(pair for pair in versions[1:] if pair[0] < n_output)),
            score=request.score,
            routed_experts=request.routed_experts,
        )

    def results(self, timeout: float | None = None) -> list[GenerationResult]:
        """Wait like `result`, and return the `n` best outputs of a beam search, or the one output."""
        best = self.result(timeout)
        return [
            replace(
                best,
                text=piece.text,
                token_ids=list(piece.token_ids),
                finish_reason=piece.finish_reason or best.finish_reason,
                score=piece.score,
            )
            for piece in self._output.pieces()
        ] or [best]

    def cancel(self) -> None:
        """Cancel the request if it has not ended; the same as `close`."""
        self.close()
