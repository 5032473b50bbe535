"""Drafters: what guesses the next tokens of an output, and the one that the user chose."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orca_jax.checks import named_object
from orca_jax.config import SchedulingConfig
from orca_jax.errors import ConfigError
from orca_jax.request.request import SharedDrafter
from orca_jax.speculation.ngram import NgramDrafter
from orca_jax.speculation.suffix import SuffixMemory


class Drafter(Protocol):
    """Guesses the next tokens of one request. Its class is called with the prompt, a list of token ids.

    A wrong guess costs time, and never changes a token. All calls are on the scheduler's thread, so they must
    be short.

    A drafter that learns from one request for later ones has a method `end(output_ids)`, which is called when
    its output is complete. Its class is also called with `salt` if it has an argument of that name: what it
    has learnt must serve only requests of the same salt, since others may be another tenant's.
    """

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        """Up to `n` tokens that may follow the prompt and `output_ids`, in order; none if nothing is likely.

        It is called at most once for each length of the output, which begins with the output of the call
        before. `output_ids` must be copied if it is kept, and never changed.
        """
        ...


_AT_ONCE = 32  # tokens of n-grams: copying so many costs no more than copying four
_HOPED, _FIRST = 8, 10  # the first estimate, as if of so many drafts so many had been right

# Makes the drafter of a request from its prompt and its salt.
Make = Callable[[Sequence[int], tuple[str, ...]], Drafter]


@dataclass(slots=True, eq=False)
class Speculation:
    """The drafts of an engine's requests: who makes them, at most how many, and what became of them.

    Each request has a drafter of its own, or all have the `shared` one, a draft model.

    `n_drafted` counts the drafts that were verified, `n_accepted` those that became output tokens; `n_right`
    counts those that were right and `n_compared` them and the first wrong one of each iteration and request.
    """

    make: Make
    n_tokens: int  # the most drafts of a request in an iteration
    vocab_size: int
    learns: bool = False  # whether drafters have a method `end`
    shared: SharedDrafter | None = None
    is_ours: bool = False  # drafts are at most as many as asked for, and tokens of the vocabulary
    # Tokens that a drafter is asked for at once if that is more than are verified: while an output follows
    # them, it is not asked again.
    n_at_once: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_right: int = 0
    n_compared: int = 0

    @property
    def chance(self) -> float:
        """The estimated probability that a draft is right if those before it are; hopeful at first."""
        return (self.n_right + _HOPED) / (self.n_compared + _FIRST)

    def count(self, n_drafted: int, n_accepted: int, n_right: int, n_compared: int) -> None:
        """Count what became of some drafts."""
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.n_right += n_right
        self.n_compared += n_compared


class _Silent:
    """The drafter of one request where a shared one drafts for all."""

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return ()


_SILENT = _Silent()


def configured_speculation(
    config: SchedulingConfig, *, vocab_size: int, draft_model: SharedDrafter | None = None
) -> Speculation | None:
    """The configured drafts of an engine with this draft model; None if it makes none. Raises ConfigError."""
    if not config.speculates:
        return None
    n_tokens = config.speculative_tokens
    if config.drafts_on_device:
        if draft_model is None:
            raise ConfigError(
                f"speculative is {config.speculative!r}, and a simulation has no draft model; leave "
                "--simulate out"
            )
        return Speculation(lambda *_: _SILENT, n_tokens, vocab_size, shared=draft_model)
    if config.speculative == "suffix":
        return Speculation(SuffixMemory(), n_tokens, vocab_size, learns=True, is_ours=True)
    if config.speculative == "ngram":
        return Speculation(
            _without_salt(NgramDrafter), n_tokens, vocab_size, is_ours=True, n_at_once=_AT_ONCE
        )
    made = _users_drafter(config.speculative)
    make = _with_salt(made) if _takes_salt(made) else _without_salt(made)
    return Speculation(make, n_tokens, vocab_size, learns=callable(getattr(made, "end", None)))


def _users_drafter(name: str) -> Any:
    """The class named "package.file:Class". Raises ConfigError."""
    made = named_object("speculative", name)
    if not callable(made) or not callable(getattr(made, "draft", None)):
        raise ConfigError(
            f"speculative is {name!r}, which is no class with a method draft; see docs/speculation.md"
        )
    try:
        inspect.signature(made).bind(None, **({"salt": ()} if _takes_salt(made) else {}))
    except TypeError as error:
        message = f"speculative is {name!r}, which cannot be made from a prompt's token ids: {error}"
        raise ConfigError(message) from error
    return made


def _takes_salt(made: Any) -> bool:
    return "salt" in inspect.signature(made).parameters


def _with_salt(made: Any) -> Make:
    return lambda prompt_ids, salt: made(prompt_ids, salt=salt)


def _without_salt(made: Any) -> Make:
    return lambda prompt_ids, _: made(prompt_ids)
