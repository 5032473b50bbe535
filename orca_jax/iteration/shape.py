"""The sizes of an engine, shared by its master, its workers and the wire between them, and its buckets.

Buckets are the total-token sizes that programs are compiled for. An iteration is padded to the next one.
Padding is less than 8 tokens below 64, and less than a quarter of the real tokens above. Coarse buckets are
about half as many. They are for GPUs, where each bucket is slow to compile because XLA autotunes its matrix
products, and padding costs little, because a small iteration takes as long as reading the weights anyway.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.checks import check_whole
from orca_jax.config import LORA_EXTRAS, LoraExtra, ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.request.routed_experts import Routing

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
_MOST_ADAPTERS, _LARGEST_RANK = 1 << 12, 1 << 12
_LARGEST_EMBEDDING = 1 << 20
_MOST_EXPERTS = 1 << 16

_ADAPTED: dict[LoraExtra, str] = {extra: f"adapted_{extra}" for extra in LORA_EXTRAS}

_STEP = 8  # between buckets, below 64
_COARSE = (8, 16, 32)  # the first coarse buckets after 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """The sizes of an engine. Raises ConfigError if one is out of range.

    An iteration has up to `max_rows` rows (requests) and `max_tokens` tokens. Up to `n_rows` requests are
    admitted at a time. The K/V cache has `n_blocks` blocks of `block_size` tokens, and one request uses up to
    `max_blocks` of them, and with an encoder up to `max_encoder_blocks` more for its input. `deterministic`
    and `coarse_buckets` select the buckets, as in ServingConfig. An embedding has `embedding_size` numbers; 0
    if the engine makes none. In each of `sparse_layers` layers a token chooses `top_k` of `n_experts`
    experts; all three are 0 if no layer has experts, or if layers choose different numbers of them. With
    `states` each admitted request also has a state of fixed size, which recurrent layers keep at its row,
    the prefix cache has `n_snapshots` more of them, and `n_draft_states` are for those after drafted tokens,
    where a request has up to `max_drafts` in an iteration. `n_host_blocks` blocks of keys and values fit in
    the host's memory, and `n_host_states` states. With `drafts` outputs are drafted.
    Devices have room for `max_adapters` LoRA adapters of a rank up to `adapter_rank`; both are 0 without.
    They may change the token embedding, the head or experts where one of the last three is set.
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
    max_encoder_blocks: int = 0
    embedding_size: int = 0
    sparse_layers: int = 0
    top_k: int = 0
    n_experts: int = 0
    states: bool = False
    n_snapshots: int = 0
    n_draft_states: int = 0
    max_drafts: int = 0
    drafts: bool = False
    max_adapters: int = 0
    adapter_rank: int = 0
    adapted_embedding: bool = False
    adapted_head: bool = False
    adapted_experts: bool = False
    n_host_blocks: int = 0
    n_host_states: int = 0

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            check_whole(name, getattr(self, name), 1, limit)
        check_whole("max_encoder_blocks", self.max_encoder_blocks, 0, _LIMITS["max_blocks"])
        check_whole("embedding_size", self.embedding_size, 0, _LARGEST_EMBEDDING)
        check_whole("max_adapters", self.max_adapters, 0, _MOST_ADAPTERS)
        check_whole("adapter_rank", self.adapter_rank, 0, _LARGEST_RANK)
        for name in ("sparse_layers", "top_k", "n_experts"):
            check_whole(name, getattr(self, name), 0, _MOST_EXPERTS)
        check_whole("n_snapshots", self.n_snapshots, 0, _LIMITS["n_rows"] if self.states else 0)
        for name in ("n_draft_states", "max_drafts"):
            check_whole(name, getattr(self, name), 0, _LIMITS["n_rows"] if self.states and self.drafts else 0)
        check_whole("n_host_blocks", self.n_host_blocks, 0, _LIMITS["n_blocks"])
        check_whole("n_host_states", self.n_host_states, 0, _LIMITS["n_blocks"] if self.n_snapshots else 0)
        for name in ("deterministic", "coarse_buckets", "states", "drafts", *_ADAPTED.values()):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    @property
    def adapter_extras(self) -> tuple[LoraExtra, ...]:
        """The parts that adapters may change beside linear layers."""
        return tuple(extra for extra, name in _ADAPTED.items() if getattr(self, name))

    @property
    def routing(self) -> Routing:
        """The form in which a token's chosen experts are returned."""
        return Routing(self.sparse_layers, self.top_k, self.n_experts)

    @property
    def n_states(self) -> int:
        """The states that recurrent layers keep: one for each row, the snapshots, then those of drafts."""
        return self.n_rows + self.n_snapshots + self.n_draft_states

    @property
    def n_slots(self) -> int:
        """The K/V cache's capacity in tokens."""
        return self.n_blocks * self.block_size

    @property
    def longest(self) -> int:
        """The tokens of the longest possible request."""
        return self.max_blocks * self.block_size

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sizes, in tokens, that iterations are padded to; ascending."""
        return engine_buckets(
            self.max_tokens, self.max_rows, deterministic=self.deterministic, coarse=self.coarse_buckets
        )

    @property
    def encoder_buckets(self) -> tuple[int, ...]:
        """The token counts that the encoder's part of an iteration is padded to; none without an encoder.

        They are coarse, because an input is encoded only once, and each bucket is compiled twice.
        """
        if not self.max_encoder_blocks:
            return ()
        if self.deterministic:
            return (self.max_tokens,)
        return bucket_sizes(self.max_tokens, coarse=True)[1:] or (1,)


def bucket_sizes(max_tokens: int, *, coarse: bool = False) -> tuple[int, ...]:
    """Ascending sizes that hold 1 to `max_tokens` tokens; the last is `max_tokens` itself.

    The first is 1, because the most common iteration of a lightly loaded server is the decode of one request.
    With `coarse`, the next are 8, 16 and 32, then powers of two and 1.5 times powers of two: 16 sizes up to
    2,048. Above 32 tokens the padding is then on average 18 % and at most 50 % of the real tokens.
    """
    assert max_tokens >= 1
    size_after = _coarse_size_after if coarse else _size_after
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(min(size_after(sizes[-1]), max_tokens))
    return tuple(sizes)


def engine_buckets(
    max_tokens: int, max_rows: int, *, deterministic: bool = False, coarse: bool = False
) -> tuple[int, ...]:
    """The buckets of an engine whose iterations have up to `max_tokens` tokens and `max_rows` requests.

    A `deterministic` engine has one per phase: decode, then prefill.
    """
    if deterministic:
        return tuple(sorted({max_rows, max_tokens}))
    return bucket_sizes(max_tokens, coarse=coarse)


def serving_buckets(serving: ServingConfig) -> tuple[int, ...]:
    """The buckets of an engine with this configuration."""
    return engine_buckets(
        serving.max_batch_tokens,
        serving.max_batch_size,
        deterministic=serving.deterministic,
        coarse=serving.coarse_buckets,
    )


def _coarse_size_after(size: int) -> int:
    for first in _COARSE:
        if size < first:
            return first
    half = 1 << (size.bit_length() - 2)  # half of the largest power of two up to `size`
    return size // half * half + half


def _size_after(size: int) -> int:
    """Steps of 8 below 64, then four sizes per power of two. Powers of two, the usual settings, are sizes."""
    step = _STEP if size < 64 else (1 << (size.bit_length() - 1)) // 4
    return size // step * step + step


def bucket_for(n_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `n_tokens`."""
    assert 1 <= n_tokens <= sizes[-1], f"{n_tokens} tokens, buckets up to {sizes[-1]}"
    return sizes[bisect_left(sizes, n_tokens)]
