"""The constraint of a request's output: a bit mask of the tokens that may come next."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from orca_jax.errors import GrammarExhausted, OutputFailed
from orca_jax.grammar.grammar import Grammar, GrammarState
from orca_jax.grammar.token_mask import Words, has, words_of


class BadWords:
    """The sequences of a request, indexed so that each iteration can check quickly; immutable.

    The last token of a sequence must not follow the others, whether those are in the prompt or the output, as
    in Hugging Face. Takes four bytes per token; compares only sequences whose second last token is the
    newest.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] = ()) -> None:
        self._always = set[int]()  # sequences of one token
        # By second last token: the tokens before the last, and the last.
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        self.longest = 0  # tokens of history that the comparison needs
        for sequence in dict.fromkeys(map(tuple, sequences)):
            *before, last = sequence
            if not before:
                self._always.add(last)
                continue
            self._after.setdefault(before[-1], []).append((_as_bytes(before), last))
            self.longest = max(self.longest, len(before))

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    @property
    def n_bytes(self) -> int:
        return sum(128 + len(before) for group in self._after.values() for before, _ in group)

    def completed_by(self, history: "History") -> set[int]:
        """The tokens that would complete a sequence."""
        group = self._after.get(history.newest)
        if not group:
            return self._always
        ends_with = history.tokens.endswith
        return self._always.union([last for before, last in group if ends_with(before)])


class History:
    """At least the newest `n_kept` tokens of a prompt and its output, as bytes."""

    def __init__(self, prompt_ids: Sequence[int], n_kept: int) -> None:
        self.tokens = bytearray(_as_bytes(prompt_ids[max(0, len(prompt_ids) - n_kept) :]))
        self.newest = prompt_ids[-1] if prompt_ids else -1
        self._n_kept = max(n_kept, 1)
        self._n_output = 0

    def follow(self, output_ids: Sequence[int]) -> None:
        if len(output_ids) == self._n_output:
            return
        self.tokens += _as_bytes(output_ids[self._n_output :])
        self.newest = output_ids[-1]
        self._n_output = len(output_ids)
        self._shorten()

    def copy(self) -> "History":
        """A copy that goes on by itself."""
        other = History((), self._n_kept)
        other.tokens, other.newest, other._n_output = self.tokens[:], self.newest, self._n_output
        return other

    def append(self, token_id: int) -> None:
        self.tokens += _as_bytes((token_id,))
        self.newest = token_id
        self._n_output += 1

    def _shorten(self) -> None:
        if len(self.tokens) > 8 * (self._n_kept + 64):
            del self.tokens[: -4 * self._n_kept]


@dataclass(frozen=True, kw_only=True)
class ConstraintRules:
    """A request's constraints, shared by all its outputs.

    `end_token_ids` are forbidden until the output has `min_tokens`. `forced` has the only token that is
    allowed at some indices of the output, whatever else holds; a grammar does not see it.
    """

    vocab_size: int
    end_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    bad_words: BadWords = field(default_factory=BadWords)
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    forced: Mapping[int, int] = field(default_factory=dict[int, int])

    @cached_property
    def base(self) -> Words:
        """The allowed tokens where no grammar decides."""
        return words_of(self.allowed_token_ids, self.vocab_size)

    def begin(self) -> "Constraint | None":
        """The state of one output; None if every token is always allowed."""
        early = self.min_tokens > 0 and len(self.end_token_ids) > 0
        unbound = not (early or self.bad_words or self.grammar or self.forced)
        return None if unbound and self.allowed_token_ids is None else Constraint(self)


class Constraint:
    """The constraint of one output. Used only on the scheduler's thread."""

    def __init__(self, rules: ConstraintRules) -> None:
        self._rules = rules
        self._grammar: GrammarState | None = None if rules.grammar is None else rules.grammar.start()
        self._history: History | None = None  # made when first needed; only for bad words
        self._always = bool(rules.bad_words or rules.grammar) or rules.allowed_token_ids is not None
        self._n_accepted = 0
        self.n_followed = 0  # of the newest drafts, those that masks follow

    @property
    def failure(self) -> str | None:
        """Why the output cannot continue; None while it can."""
        return None if self._grammar is None else self._grammar.failure

    @property
    def failure_kind(self) -> type[OutputFailed]:
        """GrammarExhausted if the grammar is the cause, OutputFailed if the server is."""
        exhausted = self._grammar is not None and self._grammar.is_exhausted
        return GrammarExhausted if exhausted else OutputFailed

    def acts(self, n_output: int) -> bool:
        """Whether some token may be forbidden next; a cheap check, without computing the mask."""
        return self._always or n_output < self._rules.min_tokens or n_output in self._rules.forced

    def allowed(self, prompt_ids: Sequence[int], output_ids: Sequence[int], into: Words) -> None:
        """Write the mask of allowed next tokens into `into`, `[n_words]`; at least one is always allowed.

        If `bad_words` and `min_tokens` would forbid every token, they are ignored.
        """
        history = self._follow(prompt_ids, output_ids)
        self._write(len(output_ids), self._grammar, history, into)

    def drafts(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], drafts: Sequence[int], n: int
    ) -> Sequence[int]:
        """The first of these drafts that may follow and do not end the output, or the grammar's own.

        What a grammar forces is at most `n` tokens, and replaces fewer drafts.
        """
        first = len(output_ids)
        wanted = [i - first for i in self._rules.forced if first <= i < first + n]
        n = min(wanted, default=n)  # a grammar does not see the tokens that the model forces
        drafts = drafts[: self._n_permitted(prompt_ids, output_ids, drafts[:n])]
        if self._grammar is not None and len(drafts) < n:
            forced = self._grammar.forced(n)
            if len(forced) > len(drafts):
                forced = forced[: self._n_permitted(prompt_ids, output_ids, forced)]
                drafts = max(drafts, forced, key=len)
        self.n_followed = len(drafts)
        return drafts

    def allowed_after(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], drafts: Sequence[int], into: Words
    ) -> None:
        """Write the mask of the tokens allowed after each draft into `into`, `[len(drafts), n_words]`.

        Where a grammar ends or fails, and after that, the masks allow all; `n_followed` is the number of
        drafts before.
        """
        grammar = None if self._grammar is None else self._grammar.fork()
        history = self._follow(prompt_ids, output_ids)
        history = None if history is None else history.copy()
        for i, draft in enumerate(drafts):
            if history is not None:
                history.append(draft)
            is_over = grammar is not None and grammar.accept(draft)
            if not is_over:
                self._write(len(output_ids) + i + 1, grammar, history, into[i])
            if is_over or (grammar is not None and grammar.failure is not None):
                self.n_followed = min(self.n_followed, i)
                into[i:] = -1
                return

    def accept(self, token_id: int) -> bool:
        """Take the sampled token; True when the grammar is complete."""
        place, self._n_accepted = self._n_accepted, self._n_accepted + 1
        if self._grammar is None or place in self._rules.forced:
            return False
        return self._grammar.accept(token_id)

    def _write(self, place: int, grammar: GrammarState | None, history: History | None, into: Words) -> None:
        """Write the mask at a place of the output, where the grammar and the bad words have come thus far."""
        forced = self._rules.forced.get(place)
        if forced is not None:
            into[:] = words_of((forced,), self._rules.vocab_size)
            return
        if grammar is None:
            into[:] = self._rules.base
        else:
            grammar.allowed(into)
        banned = self._banned(place, history)
        if banned:
            without = into.copy()
            without &= ~words_of(banned, self._rules.vocab_size)
            if without.any():
                into[:] = without

    def _banned(self, place: int, history: History | None) -> Set[int]:
        banned = self._rules.end_token_ids if place < self._rules.min_tokens else frozenset[int]()
        return banned if history is None else banned | self._rules.bad_words.completed_by(history)

    def _follow(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> History | None:
        """The tokens so far, for bad words; None without any."""
        words = self._rules.bad_words
        if not words:
            return None
        if self._history is None:
            self._history = History(prompt_ids, words.longest)
        self._history.follow(output_ids)
        return self._history

    def _n_permitted(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], drafts: Sequence[int]
    ) -> int:
        """The number of drafts that may follow one another, with more to come after them."""
        n = len(drafts) if self._grammar is None else self._grammar.n_permitted(drafts)
        history = self._follow(prompt_ids, output_ids)
        history = None if history is None else history.copy()
        base = (
            None if self._rules.allowed_token_ids is None or self._grammar is not None else self._rules.base
        )
        for i, draft in enumerate(drafts[:n]):
            is_allowed = base is None or has(base, draft)
            if not is_allowed or draft in self._banned(len(output_ids) + i, history):
                return i
            if history is not None:
                history.append(draft)
        return n


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
