"""Which tokens may come next in one request's output, as a bit mask."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orca_jax.grammar.grammar import Grammar, GrammarState
from orca_jax.grammar.token_mask import Words, words_of
from orca_jax.request.bad_words import BadWords, History


@dataclass(frozen=True, kw_only=True)
class ConstraintRules:
    """A request's constraints, shared by all its outputs.

    `end_token_ids` are forbidden until the output has `min_tokens`.
    """

    vocab_size: int
    end_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    bad_words: BadWords = field(default_factory=BadWords)
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None

    @cached_property
    def base(self) -> Words:
        """The allowed tokens where no grammar decides."""
        return words_of(self.allowed_token_ids, self.vocab_size)

    def begin(self) -> "Constraint | None":
        """The state of one output; None if every token is always allowed."""
        early = self.min_tokens > 0 and len(self.end_token_ids) > 0
        if not (early or self.bad_words or self.grammar) and self.allowed_token_ids is None:
            return None
        return Constraint(self)


class Constraint:
    """The constraint of one output. Used only on the scheduler's thread."""

    def __init__(self, rules: ConstraintRules) -> None:
        self._rules = rules
        self._grammar: GrammarState | None = None if rules.grammar is None else rules.grammar.start()
        self._history: History | None = None  # made when first needed; only for bad words
        self._always = bool(rules.bad_words or rules.grammar) or rules.allowed_token_ids is not None

    @property
    def failure(self) -> str | None:
        """Why the output cannot continue; None while it can."""
        return None if self._grammar is None else self._grammar.failure

    def acts(self, n_output: int) -> bool:
        """Whether some token may be forbidden next; a cheap check, without computing the mask."""
        return self._always or n_output < self._rules.min_tokens

    def allowed(self, prompt_ids: Sequence[int], output_ids: Sequence[int], into: Words) -> None:
        """Write the mask of allowed next tokens into `into`, `[n_words]`; at least one is always allowed.

        If `bad_words` and `min_tokens` would forbid every token, they are ignored.
        """
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
        return self._grammar is not None and self._grammar.accept(token_id)

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
