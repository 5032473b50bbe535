"""The sizes of an engine, shared by its master, its workers and the wire format between them."""

from dataclasses import dataclass

from orca_jax.config import check_whole
from orca_jax.errors import ConfigError
from orca_jax.iteration.buckets import engine_buckets

# The maximum of each size: what ServingConfig and ModelConfig allow.
_LIMITS = {
    "block_size": 1 << 10,
    "max_blocks": 1 << 21,
    "max_rows": 1 << 12,
    "max_tokens": 1 << 20,
    "n_rows": 1 << 22,
    "n_blocks": 1 << 31,
    "vocab_size": 1 << 22,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """The sizes of an engine. Raises ConfigError if one is out of range.

    An iteration has up to `max_rows` rows (requests) and `max_tokens` tokens. Up to `n_rows` requests are
    admitted at a time. The K/V cache has `n_blocks` blocks of `block_size` tokens, and one request uses up to
    `max_blocks` of them. `deterministic` and `coarse_buckets` select the buckets, as in ServingConfig.
    """

    block_size: int
    max_blocks: int
    max_rows: int
    max_tokens: int
    n_rows: int
    n_blocks: int
    vocab_size: int
    deterministic: bool = False
    coarse_buckets: bool = False

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            check_whole(name, getattr(self, name), 1, limit)
        for name in ("deterministic", "coarse_buckets"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    @property
    def n_slots(self) -> int:
        """The K/V cache's capacity in tokens."""
        return self.n_blocks * self.block_size

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.max_blocks * self.block_size

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sizes, in tokens, that iterations are padded to; ascending."""
        return engine_buckets(
            self.max_tokens, self.max_rows, deterministic=self.deterministic, coarse=self.coarse_buckets
        )
