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
from typing import cast

from orca_jax.request.request import (
    Accepted,
    InputRow,
    Request,
    RequestState,
    Row,
    RowAnswer,
    RowKind,
    SharedDrafter,
)
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.speculation.drafter import Drafter, Speculation
from orca_jax.speculation.prediction import PredictedOutput, Prediction

_INCREMENT = RequestState.INCREMENT
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

    knows_ids = True
    may_reject = True

    def __init__(self, speculation: Speculation, prediction: Prediction | None = None) -> None:
        self.speculation = speculation
        self._predicted = None if prediction is None else PredictedOutput(prediction)
        self._drafter: Drafter | None = None
        self._failed = False
        self._drafts: Sequence[int] = ()  # after the first `_n_output` output tokens
        # What the drafter drafted at once, and the index of the newest drafts there. The output has followed
        # it up to there. Empty if the output does not, or if too few tokens are left.
        self._run: Sequence[int] = ()
        self._at = 0
        self._asked_at = -1  # the length of the output at which the shared drafter was asked last
        self._n_output = 0 if prediction is None else -1  # only a prediction knows the first token
        self._declined_until = 0  # the length of the output until which no drafts are awaited
        self.sent: Sequence[int] = ()
        # The length of the output after its last drafts, and the iterations in a row that kept none of them.
        self._n_next, self._n_in_vain = -_AWAITED, 0
        # Drafts that were right, and that were compared, in an iteration up to the first wrong one; the older
        # ones count less.
        self._n_right = self._n_compared = 0.0

    @property
    def predicted(self) -> tuple[int, int] | None:
        return None if self._predicted is None else (self._predicted.n_accepted, self._predicted.n_rejected)

    @classmethod
    def chances(cls, requests: Sequence[Request]) -> list[float]:
        chances = list[float]()
        speculation, n_of_engine = None, 0.0
        for req, kind in zip(requests, _kinds(requests), strict=True):
            if kind.speculation is not speculation:
                speculation = kind.speculation
                n_of_engine = _OF_ENGINE * speculation.chance
            n_right, n_compared = kind._n_right, kind._n_compared
            n_without = len(req.output_ids) - kind._n_next
            if n_without and n_compared:
                remembered = _REMEMBERED**n_without
                n_right, n_compared = n_right * remembered, n_compared * remembered
            chances.append((n_right + n_of_engine) / (n_compared + _OF_ENGINE))
        return chances

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
        return self._asked_at < n_output and n_output >= self._n_next + _PAUSES[self._n_in_vain]

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
        is_awaited = not self._n_in_vain and n_output < self._n_next + _AWAITED
        if is_awaited or self._newest_drafts(req):
            return True
        return self._may_ask(n_output + 1) and n_output + 2 < req.most_output

    @classmethod
    def most_tokens(cls, requests: Sequence[Request]) -> list[int]:
        most = list[int]()
        for req, kind in zip(requests, _kinds(requests), strict=True):
            if req.n_in_flight:
                most.append(1)
                continue
            if len(req.output_ids) != kind._n_output:
                kind._draft(req)
            most.append(1 + len(kind._drafts))
        return most

    @classmethod
    def known_ids(cls, rows: Sequence[Row]) -> list[Sequence[int]]:
        known = list[Sequence[int]]()
        for (req, n_tokens), kind in zip(rows, _kinds([req for req, _ in rows]), strict=True):
            before = kind.sent
            if before:
                kind.sent = ()
            # Request.in_initiation, inlined for speed.
            if req.state is not _INCREMENT and req.n_in_flight == req.n_partial:
                known.append(())
            elif n_tokens > 1:
                drafts = kind._drafts
                kind.sent = sent = drafts if len(drafts) < n_tokens else drafts[: n_tokens - 1]
                known.append([req.output_ids[-1], *sent])
            else:
                if not req.n_in_flight and (kind._drafts or kind.speculation.shared is not None):
                    kind._decline(req)
                # If its last iteration sampled one token, the device has it.
                known.append([req.output_ids[-1]] if before else ())
        return known

    def _decline(self, req: Request) -> None:
        """Note that the batch has no use for drafts of this request, if it could have some."""
        if self._drafts:
            self._declined_until = self._n_output + _AWAITED
        elif self.n_wanted(req):  # the shared drafter was not asked
            self._declined_until = len(req.output_ids) + _AWAITED

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        (ids,) = self.known_ids([(req, n_tokens)])
        return [InputRow(req.row, req.n_computed, ids)] if ids else []

    @classmethod
    def accept_all(cls, requests: Sequence[Request], answers: Sequence[RowAnswer]) -> list[Accepted]:
        accepted = list[Accepted]()
        kinds = _kinds(requests)
        speculation = kinds[0].speculation
        n_drafted = n_accepted = n_all_right = n_compared = 0
        for req, kind, (sampled, logprobs) in zip(requests, kinds, answers, strict=True):
            sent = kind.sent
            n_right = n_sent = len(sent)
            if sent != sampled[:n_sent]:
                n_right = _n_right(sent, sampled)
            if req.constraint is not None:
                n_right = min(n_right, req.constraint.n_followed)
            if n_right < n_sent:
                req.n_computed -= n_sent - n_right
                sampled = sampled[: n_right + 1]
            n_next = len(req.output_ids) + n_right + 1
            if run := kind._run:  # its tokens after the newest one are the next drafts
                at, n_left = kind._at + n_right + 1, req.most_output - n_next - 1
                n = kind.speculation.n_tokens
                end = at + (n if n < n_left else n_left)
                if n_left >= 0 and end <= len(run) and run[at - 1] == sampled[-1]:
                    kind._at, kind._n_output, kind._drafts = at, n_next, run[at:end]
                else:
                    kind._run = ()
            kept = req.accept_all(sampled)
            accepted.append(kept)
            if logprobs:
                req.logprobs += logprobs[: len(kept[0])]
            if not n_sent:
                continue
            if kind.speculation is not speculation:
                speculation.count(n_drafted, n_accepted, n_all_right, n_compared)
                speculation = kind.speculation
                n_drafted = n_accepted = n_all_right = n_compared = 0
            n_drafted += n_sent
            n_kept = len(kept[0])
            n_accepted += n_right if n_right < n_kept else n_kept
            n_all_right += n_right
            # What became of the drafts, for the chances of the next ones.
            n_new = n_right + (n_right < n_sent)
            n_compared += n_new
            remembered = _REMEMBERED ** (n_next - kind._n_next)
            kind._n_next = n_next
            kind._n_right = remembered * kind._n_right + n_right
            kind._n_compared = remembered * kind._n_compared + n_new
            if n_right:
                kind._n_in_vain = 0
            elif kind._n_in_vain < len(_PAUSES) - 1:
                kind._n_in_vain += 1
        speculation.count(n_drafted, n_accepted, n_all_right, n_compared)
        return accepted

    def accept(self, req: Request, answer: RowAnswer) -> Accepted:
        return self.accept_all([req], [answer])[0]

    def _newest_drafts(self, req: Request) -> Sequence[int]:
        """The drafts after the output so far, cut where a constraint forbids one."""
        if len(req.output_ids) != self._n_output:
            self._draft(req)
        return self._drafts

    def _draft(self, req: Request) -> None:
        """Ask the drafter for drafts. One that fails is not asked again, and costs no output."""
        output_ids, speculation = req.output_ids, self.speculation
        self._n_output = n_output = len(output_ids)
        drafts: Sequence[int] = ()
        n, n_left = speculation.n_tokens, req.most_output - n_output - 1
        if n > n_left:
            n = max(0, n_left)
        self._run = ()
        if n and n_output >= self._n_next + _PAUSES[self._n_in_vain] and not self._failed:
            try:
                if self._predicted is not None:
                    drafts = self._predicted.draft(output_ids, n)
                    drafts = self._in_vocabulary(drafts)
                if not drafts:
                    if self._drafter is None:
                        self._drafter = speculation.make(list(req.prompt_ids), req.cache_salt)
                    if speculation.n_at_once > n and req.constraint is None:
                        self._run, self._at = self._drafter.draft(output_ids, speculation.n_at_once), 0
                        drafts = self._run[:n]
                    else:
                        drafts = self._drafter.draft(output_ids, n)
                    if not speculation.is_ours:
                        drafts = self._in_vocabulary([int(token_id) for token_id in drafts[:n]])
            except Exception:
                self._failed, self._drafter, drafts = True, None, ()
                _log.exception("the drafter failed; request %s goes on without drafts", req.request_id)
        if n and req.constraint is not None:
            drafts = req.constraint.drafts(req.prompt_ids, output_ids, drafts, n)
        self._drafts = drafts

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

    def _in_vocabulary(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts before the first one that is no token."""
        vocab_size = self.speculation.vocab_size
        if drafts and 0 <= min(drafts) <= max(drafts) < vocab_size:
            return drafts
        wrong = next((i for i, token_id in enumerate(drafts) if not 0 <= token_id < vocab_size), len(drafts))
        return drafts[:wrong]


def _kinds(requests: Sequence[Request]) -> "list[Drafted]":
    return cast("list[Drafted]", [req.kind for req in requests])


def _n_right(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """The number of drafts before the first that was not sampled."""
    for n, (draft, token_id) in enumerate(zip(drafts, sampled, strict=False)):
        if draft != token_id:
            return n
    return len(drafts)
