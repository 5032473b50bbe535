"""The constraint of a request's output: a bit mask of the tokens that may come next."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from orca_jax.errors import GrammarExhausted, OutputFailed
from orca_jax.grammar.grammar import Grammar, GrammarState
from orca_jax.grammar.token_mask import Words, words_of


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
        forced = self._rules.forced.get(len(output_ids))
        if forced is not None:
            into[:] = words_of((forced,), self._rules.vocab_size)
            return
        if self._grammar is None:
            into[:] = self._rules.base
        else:
            self._grammar.allowed(into)
        banned = self._banned(prompt_ids, output_ids)
        if banned:
            without = into.copy()
            without &= ~words_of(banned, self._rules.vocab_size)
            if without.any():
                into[:] = without

    def accept(self, token_id: int) -> bool:
        """Take the sampled token; True when the grammar is complete."""
        place, self._n_accepted = self._n_accepted, self._n_accepted + 1
        if self._grammar is None or place in self._rules.forced:
            return False
        return self._grammar.accept(token_id)

    def _banned(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> set[int]:
        banned = set[int]()
        if len(output_ids) < self._rules.min_tokens:
            banned |= self._rules.end_token_ids
        words = self._rules.bad_words
        if words:
            if self._history is None:
                self._history = History(prompt_ids, words.longest)
            self._history.follow(output_ids)
            banned |= words.completed_by(self._history)
        return banned


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
