"""Drafted rows: a request's newest token and drafts of what follows are verified in one iteration.

Each of these tokens is a row of one token, side by side in their order, and a token is sampled after each.
The draw depends only on the row's logits, the request's seed and the token's index. So a sampled token is the
one that would have come without drafts if all drafts before it are right, which they are if they equal what
was sampled. These are kept, with the first sampled token after them. Keys and values of the other drafts are
overwritten: the request's next tokens have the same positions, and so the same slots.
"""

import logging
from collections.abc import Iterator, Sequence

from orca_jax.request.request import FinishReason, InputRow, Request, RowAnswer, RowKind
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.speculation.drafter import Drafter, Speculation
from orca_jax.speculation.prediction import PredictedOutput, Prediction

_log = logging.getLogger(__name__)

# Output tokens for which no drafts are made, by the number of iterations in a row that kept no draft.
# Drafts that are always wrong then cost little, and a text that begins to repeat itself is found soon.
_PAUSES = (0, 0, 0, 0, 2, 6, 14, 30)
# A request's estimate of its drafts' chances forgets this fraction with each iteration, and counts as many
# drafts of the whole engine with it.
_FORGOTTEN, _OF_ENGINE = 1 / 64, 4.0


def takes_drafts(sampling: SamplingParams) -> bool:
    """Whether drafts of an output with these parameters can be verified.

    Penalties and biases count tokens in a table that has only one entry for each request, and the experts of
    rejected drafts would be returned. An output of two tokens leaves no room for a draft.
    """
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    changes = sampling.logit_bias or penalties != (1, 0, 0) or sampling.return_routed_experts
    return not changes and sampling.max_tokens > 2 and sampling.speculative != "off"


class Drafted(RowKind):
    """The row kind of one request whose output is drafted, first from its `prediction`.

    `speculation` is the engine's.
    """

    # The next rows depend on which drafts are kept.
    runs_ahead = False

    def __init__(self, speculation: Speculation, prediction: Prediction | None = None) -> None:
        self.speculation = speculation
        self._predicted = None if prediction is None else PredictedOutput(prediction)
        self._drafter: Drafter | None = None
        self._failed = False
        self._drafts: Sequence[int] = ()  # after the first `_n_output` output tokens
        self._n_output = 0
        self._n_in_vain = 0  # iterations in a row that kept none of their drafts
        self._paused_until = 0  # the length of the output from which drafts are made again
        self.sent: Sequence[int] = ()  # the drafts of the iteration in flight
        # Drafts that were right, and those that were compared: in an iteration up to the first wrong one.
        self._n_right = self._n_compared = 0.0

    @property
    def predicted(self) -> tuple[int, int] | None:
        return None if self._predicted is None else (self._predicted.n_accepted, self._predicted.n_rejected)

    @property
    def chance(self) -> float:
        n_right = self._n_right + _OF_ENGINE * self.speculation.chance
        return n_right / (self._n_compared + _OF_ENGINE)

    def most_tokens(self, req: Request) -> int:
        n_output = len(req.output_ids)
        if n_output != self._n_output:
            self._n_output = n_output
            n = min(self.speculation.n_tokens, req.most_output - n_output - 1)
            self._drafts = self._draft(req, n) if n > 0 and n_output >= self._paused_until else ()
        return 1 + len(self._drafts)

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        self.sent = ()
        if req.in_initiation:
            return super().rows(req, n_tokens, places)
        self.sent = self._drafts[: n_tokens - 1]
        known = (req.output_ids[-1], *self.sent)
        return [InputRow(req.row, req.n_computed + i, (token_id,)) for i, token_id in enumerate(known)]

    def accept(self, req: Request, answer: RowAnswer) -> Iterator[tuple[int, FinishReason | None]]:
        sent, sampled, speculation = self.sent, answer.token_ids, self.speculation
        n_right = 0
        while n_right < len(sent) and sent[n_right] == sampled[n_right]:
            n_right += 1
        req.n_computed -= len(sent) - n_right
        if sent:
            self._n_in_vain = 0 if n_right else min(self._n_in_vain + 1, len(_PAUSES) - 1)
            self._paused_until = len(req.output_ids) + 1 + _PAUSES[self._n_in_vain]
        n_compared = min(n_right + 1, len(sent))
        self._n_right += n_right - _FORGOTTEN * self._n_right
        self._n_compared += n_compared - _FORGOTTEN * self._n_compared
        speculation.n_right += n_right
        speculation.n_compared += n_compared
        speculation.n_drafted += len(sent)
        for i in range(n_right + 1):
            req.logprobs += answer.logprobs[i : i + 1]
            reason = req.accept(sampled[i])
            if i < n_right:
                speculation.n_accepted += 1
            if reason is not None:
                self._end(req)
            yield sampled[i], reason
            if reason is not None:
                return

    def _end(self, req: Request) -> None:
        """Tell a drafter that learns from outputs that this one is complete."""
        if self._predicted is not None:
            self._predicted.read(req.output_ids)
        end = getattr(self._drafter, "end", None)
        try:
            if end is not None:
                end(req.output_ids)
        except Exception:
            _log.exception("the drafter failed at the end of request %s", req.request_id)

    def _draft(self, req: Request, n: int) -> Sequence[int]:
        """Ask the drafter for up to `n` drafts. One that fails is not asked again, and costs no output."""
        if self._failed:
            return ()
        try:
            if self._drafter is None:
                self._drafter = self.speculation.make(list(req.prompt_ids), req.cache_salt)
            drafts = () if self._predicted is None else self._predicted.draft(req.output_ids, n)
            drafts = drafts or [int(token_id) for token_id in self._drafter.draft(req.output_ids, n)[:n]]
        except Exception:
            self._failed, self._drafter = True, None
            _log.exception("the drafter failed; request %s goes on without drafts", req.request_id)
            return ()
        vocab_size = self.speculation.vocab_size
        wrong = next((i for i, token_id in enumerate(drafts) if not 0 <= token_id < vocab_size), len(drafts))
        return drafts[:wrong]
