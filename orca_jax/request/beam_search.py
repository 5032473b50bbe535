"""Beam search as pure arithmetic: from candidate tokens to the next beams and the complete outputs.

The rules are exactly those of Hugging Face's `generate(num_beams=k)`. This file knows neither the scheduler
nor the K/V cache: `parents` says whose keys and values each beam of the next iteration continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

EarlyStopping = bool | Literal["never"]


class Hypothesis(NamedTuple):
    """A complete output. `score` is its log-probability over its length to the power of the length penalty.

    `stopped`: `token_ids` ends with an end-of-sequence token; otherwise it has the maximum length.
    """

    token_ids: tuple[int, ...]
    score: float
    stopped: bool


class _Beam(NamedTuple):
    """An output in the making, linked to the one it continues. `total` is its log-probability."""

    token_id: int
    total: float
    before: "_Beam | None"


class BeamSearch:
    """The beams of one request, at most `width`, the likeliest first.

    Each step takes the `n_candidates` likeliest next tokens of every beam. All continuations are sorted by
    descending total log-probability (ties: earlier beam, then smaller token id). The first `width` that do
    not end the output are the next beams. Among the first `width` of all, those that end the output are
    complete; the `width` complete outputs with the best scores are kept. At `max_tokens` every output ends.

    The search is over at `max_tokens`, or once `width` outputs are complete and `early_stopping` allows it:
    True, at once; False, if no beam would score better than the worst complete output if it ended now;
    "never", if none would with its present log-probability at `max_tokens` (with a length penalty above 0).

    A token that is `forced` at an index of the output costs nothing, and no other continues a beam there.

    Before the first step, and after `restart`, there is one beam, the prompt.
    """

    def __init__(
        self,
        width: int,
        *,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        end_token_ids: frozenset[int] = frozenset(),
        forced: Mapping[int, int] | None = None,
    ) -> None:
        self.width = width
        self.max_tokens = max_tokens
        self.n_candidates = n_candidates(width, end_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._end_token_ids = end_token_ids
        self._forced = forced or {}
        self.restart()

    def restart(self) -> None:
        """Forget all steps."""
        self.n_tokens = 0  # tokens of each beam
        self.parents: list[int] = [0]  # for each beam, the previous step's beam that it continues
        self.finished: list[Hypothesis] = []  # best first
        self.done = False
        self._beams: list[_Beam | None] = [None]

    @property
    def found(self) -> bool:
        """Whether the search is over and has found an output."""
        return self.done and bool(self.finished)

    @property
    def last_ids(self) -> list[int]:
        """The newest token of each beam, after a step that did not end the search."""
        return [beam.token_id for beam in self._beams if beam is not None]

    def step(self, candidates: Sequence[TokenLogprobs]) -> None:
        """Advance by a token, given each beam's likeliest next tokens (the `top` of its TokenLogprobs)."""
        assert not self.done and len(candidates) == len(self._beams)
        self.n_tokens += 1
        at_end = self.n_tokens == self.max_tokens
        totals = [0.0 if beam is None else beam.total for beam in self._beams]
        ranked = sorted(
            (-(total + logprob), i, token_id)
            for i, (total, one) in enumerate(zip(totals, candidates, strict=True))
            for token_id, logprob in self._allowed(one)
        )
        beams: list[_Beam] = []
        parents: list[int] = []
        for place, (minus, i, token_id) in enumerate(ranked):
            beam = _Beam(token_id, -minus, self._beams[i])
            stops = token_id in self._end_token_ids
            if not (stops or at_end):
                beams.append(beam)
                parents.append(i)
                if len(beams) == self.width:
                    break
            elif place < self.width:
                score = beam.total / self.n_tokens**self._length_penalty
                self.finished.append(Hypothesis(_token_ids(beam), score, stops))
        self.finished = sorted(self.finished, key=lambda one: -one.score)[: self.width]
        self._beams, self.parents = [*beams], parents
        self.done = not beams or self._is_over(beams[0].total)

    def _allowed(self, one: TokenLogprobs) -> Iterable[tuple[int, float]]:
        """The next tokens of a beam that are allowed at this step, with their log-probabilities."""
        token_id = self._forced.get(self.n_tokens - 1)
        return one.top if token_id is None else [(token_id, 0.0)]

    def _is_over(self, best_total: float) -> bool:
        """Whether to end although beams are left, the likeliest of which has log-probability `best_total`."""
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        hopes = self._early_stopping == "never" and self._length_penalty > 0
        length = self.max_tokens if hopes else self.n_tokens
        return best_total / length**self._length_penalty <= self.finished[-1].score


def n_candidates(width: int, end_token_ids: frozenset[int]) -> int:
    """Number of a beam's top next tokens that can matter: `width` to continue with, and all end tokens."""
    return width + len(end_token_ids)


def begin_search(
    sampling: SamplingParams, end_token_ids: frozenset[int], forced: Mapping[int, int] | None = None
) -> BeamSearch:
    """The beam search of a new request with these parameters."""
    return BeamSearch(
        sampling.n_beams,
        max_tokens=sampling.max_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        end_token_ids=end_token_ids,
        forced=forced,
    )


def check_beams(
    sampling: SamplingParams, end_token_ids: frozenset[int], *, vocab_size: int, max_batch_size: int
) -> None:
    """Raise InvalidSamplingParameter if an engine of these sizes cannot run the requested beams."""
    n_end, width = len(end_token_ids), sampling.n_beams
    limits = {
        max_batch_size: "max_batch_size, for all beams run in one batch",
        MAX_TOP_LOGPROBS
        - n_end: f"{MAX_TOP_LOGPROBS} candidates of a beam, of which {n_end} may end the output",
        vocab_size - n_end: "the tokens of the vocabulary that do not end the output",
    }
    most = min(limits)
    if width > most:
        message = f"best_of is {width}; this engine allows {max(0, most)} beams: {limits[most]}"
        raise InvalidSamplingParameter(message, param="best_of")


def _token_ids(beam: _Beam) -> tuple[int, ...]:
    ids: list[int] = []
    link: _Beam | None = beam
    while link is not None:
        ids.append(link.token_id)
        link = link.before
    return tuple(reversed(ids))
