"""Drafted rows: a request's newest token and drafts of what follows are verified in one iteration.

Each of these tokens is a row of one token, side by side in their order, and a token is sampled after each.
The draw depends only on the row's logits, the request's seed and the token's index. So a sampled token is the
one that would have come without drafts if all drafts before it are right, which they are if they equal what
was sampled. These are kept, with the first sampled token after them. Keys and values of the other drafts are
overwritten: the request's next tokens have the same positions, and so the same slots.

Without drafts a request has a plain row, and its iterations may run ahead.
"""

import logging
from collections.abc import Callable, Sequence

from orca_jax.request.request import (
    FinishReason,
    InputRow,
    Request,
    RequestState,
    RowAnswer,
    RowKind,
    SharedDrafter,
)
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.speculation.drafter import Drafter, Speculation
from orca_jax.speculation.prediction import PredictedOutput, Prediction

_log = logging.getLogger(__name__)

# Output tokens for which no drafts are made, by the number of iterations in a row that kept no draft.
# Drafts that are always wrong then cost little, and a text that begins to repeat itself is found soon.
_PAUSES = (0, 0, 0, 0, 2, 6, 14, 30)
# A request's estimate of its drafts' chances keeps this fraction with each output token, so that all drafts
# are tried again some time, and counts as many drafts of the whole engine with it.
_REMEMBERED, _OF_ENGINE = 1 - 1 / 64, 4.0
# Output tokens after right drafts for which no iteration runs ahead although there are no drafts: more than
# n-grams need to find their place again. As many after drafts for which the batch had no use, iterations run
# ahead although there are some.
_AWAITED = 8


def takes_drafts(sampling: SamplingParams) -> bool:
    """Whether drafts of an output with these parameters can be verified.

    The experts of rejected drafts would be returned. An output of two tokens leaves no room for a draft.
    """
    changes = sampling.return_routed_experts or sampling.speculative == "off"
    return not changes and sampling.max_tokens > 2


class Drafted(RowKind):
    """The row kind of one request whose output is drafted, first from its `prediction`.

    `speculation` is the engine's.
    """

    def __init__(self, speculation: Speculation, prediction: Prediction | None = None) -> None:
        self.speculation = speculation
        self._predicted = None if prediction is None else PredictedOutput(prediction)
        self._drafter: Drafter | None = None
        self._failed = False
        self._drafts: Sequence[int] = ()  # after the first `_n_output` output tokens
        self._asked_at = -1  # the length of the output at which the shared drafter was asked last
        self._n_output = 0 if prediction is None else -1  # only a prediction knows the first token
        self._n_in_vain = 0  # iterations in a row that kept none of their drafts
        self._paused_until = 0  # the length of the output from which drafts are made again
        self._awaited_until = 0  # the length of the output until which no iteration runs ahead
        self._declined_until = 0  # and that until which drafts are held not to be worth that
        self.sent: Sequence[int] = ()
        # Drafts that were right, and that were compared, in an iteration up to the first wrong one: after
        # `_n_before` output tokens.
        self._n_right = self._n_compared = 0.0
        self._n_before = 0

    @property
    def predicted(self) -> tuple[int, int] | None:
        return None if self._predicted is None else (self._predicted.n_accepted, self._predicted.n_rejected)

    def chance(self, req: Request) -> float:
        remembered = _REMEMBERED ** (len(req.output_ids) - self._n_before)
        n_right = remembered * self._n_right + _OF_ENGINE * self.speculation.chance
        return n_right / (remembered * self._n_compared + _OF_ENGINE)

    @property
    def shared_drafter(self) -> SharedDrafter | None:
        return self.speculation.shared

    def n_wanted(self, req: Request) -> int:
        if req.n_in_flight or not self._may_ask(len(req.output_ids)) or self._newest_drafts(req):
            return 0
        return max(0, min(self.speculation.n_tokens, req.most_output - len(req.output_ids) - 1))

    def take_drafts(self, req: Request, drafts: Sequence[int] | None) -> None:
        self._asked_at = len(req.output_ids)
        self._failed = drafts is None
        self._drafts = drafts = self._in_vocabulary(drafts or ())
        if req.constraint is not None:
            self._drafts = req.constraint.drafts(req.prompt_ids, req.output_ids, drafts, len(drafts))

    def _may_ask(self, n_output: int) -> bool:
        """Whether the shared drafter may be asked for what follows the first `n_output` tokens."""
        shared = self.speculation.shared
        if shared is None or shared.failed or self._failed:
            return False
        return self._asked_at < n_output and n_output >= self._paused_until

    def runs_ahead(self, req: Request) -> bool:
        return not self.sent

    def holds_batch(self, req: Request, *, has_room: bool) -> bool:
        if self.sent or not has_room:
            return bool(self.sent)
        if req.state is RequestState.FINISHED or req.n_in_flight == req.n_partial:
            return False
        # After right drafts the next ones are awaited. So they are if the drafter has some already, although
        # the newest token is in flight: an iteration ahead would compute the first of them alone. A shared
        # drafter always has some once that token is there.
        n_output = len(req.output_ids)
        if n_output < self._declined_until:
            return False
        if n_output < self._awaited_until or self._newest_drafts(req):
            return True
        return self._may_ask(n_output + 1) and n_output + 2 < req.most_output

    def most_tokens(self, req: Request) -> int:
        if req.n_in_flight:
            return 1
        is_new = len(req.output_ids) != self._n_output
        return 1 + len(self._newest_drafts(req) if is_new else self._drafts)

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        before, self.sent = self.sent, ()
        if req.in_initiation:
            return []
        self.sent = sent = self._drafts[: n_tokens - 1]
        if not (sent or req.n_in_flight):
            if self._drafts:
                self._declined_until = self._n_output + _AWAITED
            elif self.n_wanted(req):  # the shared drafter was not asked
                self._declined_until = len(req.output_ids) + _AWAITED
        if not (sent or before):
            return []  # its last iteration sampled one token, so the device has it
        return [InputRow(req.row, req.n_computed, [req.output_ids[-1], *sent])]

    def accept(self, req: Request, answer: RowAnswer) -> tuple[Sequence[int], FinishReason | None]:
        sent, sampled, n_output = self.sent, answer.token_ids, len(req.output_ids)
        n_sent = len(sent)
        n_right = _n_right(sent, sampled)
        if req.constraint is not None:
            n_right = min(n_right, req.constraint.n_followed)
        req.n_computed -= n_sent - n_right
        token_ids, reason = req.accept_all(sampled[: n_right + 1])
        if answer.logprobs:
            req.logprobs += answer.logprobs[: len(token_ids)]
        if n_sent:
            self._learn(n_output, n_sent, n_right)
            self.speculation.n_accepted += min(len(token_ids), n_right)
        return token_ids, reason

    def _learn(self, n_output: int, n_sent: int, n_right: int) -> None:
        """Note how many drafts of those sent after `n_output` tokens were right."""
        n_next = n_output + 1 + n_right
        if n_right:
            self._n_in_vain = 0
            self._awaited_until, self._paused_until = n_next + _AWAITED, n_next
        else:
            self._n_in_vain = min(self._n_in_vain + 1, len(_PAUSES) - 1)
            self._awaited_until, self._paused_until = 0, n_next + _PAUSES[self._n_in_vain]
        n_compared = n_right + (n_right < n_sent)
        remembered = _REMEMBERED ** (n_output - self._n_before)
        self._n_right = remembered * self._n_right + n_right
        self._n_compared = remembered * self._n_compared + n_compared
        self._n_before = n_output
        speculation = self.speculation
        speculation.n_drafted += n_sent
        speculation.n_right += n_right
        speculation.n_compared += n_compared

    def _newest_drafts(self, req: Request) -> Sequence[int]:
        """The drafts after the output so far, cut where a constraint forbids one."""
        output_ids = req.output_ids
        n_output = len(output_ids)
        if n_output == self._n_output:
            return self._drafts
        self._n_output = n_output
        drafts: Sequence[int] = ()
        n = min(self.speculation.n_tokens, req.most_output - n_output - 1)
        if n > 0:
            if n_output >= self._paused_until and not self._failed:
                drafts = self._draft(req, n)
            if req.constraint is not None:
                drafts = req.constraint.drafts(req.prompt_ids, output_ids, drafts, n)
        self._drafts = drafts
        return drafts

    def end(self, req: Request) -> None:
        # A drafter may learn from outputs.
        if self._predicted is not None:
            self._predicted.read(req.output_ids)
        if self._failed or not self.speculation.learns:
            return
        try:
            self._drafter = self._drafter or self.speculation.make(list(req.prompt_ids), req.cache_salt)
            end: Callable[[Sequence[int]], object] = getattr(self._drafter, "end")  # noqa: B009
            end(req.output_ids)
        except Exception:
            _log.exception("the drafter failed at the end of request %s", req.request_id)

    def _draft(self, req: Request, n: int) -> Sequence[int]:
        """Ask the drafter for up to `n` drafts. One that fails is not asked again, and costs no output."""
        try:
            if self._drafter is None:
                self._drafter = self.speculation.make(list(req.prompt_ids), req.cache_salt)
            drafts = () if self._predicted is None else self._predicted.draft(req.output_ids, n)
            if not drafts:
                drafts = self._drafter.draft(req.output_ids, n)
                if self.speculation.is_ours:
                    return drafts
                drafts = [int(token_id) for token_id in drafts[:n]]
        except Exception:
            self._failed, self._drafter = True, None
            _log.exception("the drafter failed; request %s goes on without drafts", req.request_id)
            return ()
        return self._in_vocabulary(drafts)

    def _in_vocabulary(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts before the first one that is no token."""
        vocab_size = self.speculation.vocab_size
        if drafts and 0 <= min(drafts) <= max(drafts) < vocab_size:
            return drafts
        wrong = next((i for i, token_id in enumerate(drafts) if not 0 <= token_id < vocab_size), len(drafts))
        return drafts[:wrong]


def _n_right(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """The number of drafts before the first that was not sampled."""
    if drafts == sampled[: len(drafts)]:
        return len(drafts)
    for n, (draft, token_id) in enumerate(zip(drafts, sampled, strict=False)):
        if draft != token_id:
            return n
    return len(drafts)
