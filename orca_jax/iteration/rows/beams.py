"""Rows of a beam search: a row of the block table for each beam, whose newest token the host has chosen.

The host decides which beams continue, from the likeliest next tokens of each, so it always knows their
tokens. The K/V manager lets a beam's row begin with the blocks of the beam that it continues.
"""

from collections.abc import Sequence

from orca_jax.request.beam_search import BeamSearch, Hypothesis
from orca_jax.request.request import FinishReason, InputRow, Request, RowAnswer, RowKind
from orca_jax.request.sampled import TokenLogprobs


class Beams(RowKind):
    """The row kind of one request, with its beam search.

    While the search runs, the request's `output_ids` has the newest token of the likeliest beam at each step;
    after its end it is the best output. After a loss or a preemption the search starts over.
    """

    forks = True
    greedy = True  # the sampled token is not used

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.n_rows = search.width

    @property
    def parents(self) -> Sequence[int]:
        return self.search.parents

    @property
    def found(self) -> Sequence[Hypothesis]:
        return self.search.finished if self.search.found else ()

    def runs_ahead(self, req: Request) -> bool:
        return False

    def n_logprobs(self, req: Request) -> int:
        return self.search.n_candidates

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        if req.in_initiation:
            return super().rows(req, n_tokens, places)
        newest = self.search.last_ids
        return [InputRow(place, req.n_computed, (id_,)) for place, id_ in zip(places, newest, strict=True)]

    def accept(self, req: Request, answer: RowAnswer) -> tuple[Sequence[int], FinishReason | None]:
        token_ids, logprobs = answer
        req.logprobs += logprobs[:1]  # the likeliest beam's, for recordings
        return token_ids[:1], self._step(req, logprobs)

    def restart(self, req: Request) -> None:
        self.search.restart()
        req.output_ids.clear()

    def _step(self, req: Request, logprobs: Sequence[TokenLogprobs]) -> FinishReason | None:
        """Advance the search by a token. An exception from the sink ends only this request."""
        search = self.search
        search.step(logprobs)
        if not search.done:
            req.output_ids.append(search.last_ids[0])
            return None
        if not search.finished:
            req.failure = "no token has a probability: the model's logits are not finite"
            return FinishReason.ERROR
        best = search.finished[0]
        req.output_ids[:] = best.token_ids
        try:
            if req.sink is not None:
                for token_id in best.token_ids:
                    req.sink.push(token_id)
        except Exception as error:
            req.failure = f"{type(error).__name__}: {error}"
            return FinishReason.ERROR
        return FinishReason.STOP if best.stopped else FinishReason.LENGTH
