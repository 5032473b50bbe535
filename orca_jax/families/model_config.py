"""The shape of a model: a frozen dataclass, checked when it is made."""

from dataclasses import dataclass
from typing import Literal, get_args

from orca_jax.config import check_whole
from orca_jax.errors import ConfigError

Activation = Literal["gelu_tanh", "gelu", "relu"]
NormPlacement = Literal["pre", "post"]

# Nobody has trained a model beyond these; a config that claims more is a mistake or an attack.
_LIMITS = {
    "vocab_size": 1 << 22,
    "n_positions": 1 << 21,
    "hidden_size": 1 << 17,
    "embedding_size": 1 << 17,
    "ffn_size": 1 << 20,
    "n_layers": 1024,
    "n_heads": 1024,
    "vocab_multiple": 1 << 16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a GPT: all that the mathematics needs to know, and nothing of where it came from.

    Sizes are counts of elements; `n_positions` is the longest sequence in tokens, input and output
    together. `position_offset` is added to a position before the table is read (OPT: 2).
    `embedding_size` differs from `hidden_size` only where a projection stands between them
    (OPT-350m). `vocab_multiple` pads the embedding table to a multiple, for hardware or for sharding;
    padded ids are never sampled.
    """

    vocab_size: int
    n_positions: int
    hidden_size: int
    n_layers: int
    n_heads: int
    ffn_size: int
    activation: Activation = "gelu_tanh"
    norm: NormPlacement = "pre"
    final_norm: bool = True
    layer_norm_eps: float = 1e-5
    use_bias: bool = True
    tie_embeddings: bool = True
    position_offset: int = 0
    embedding_size: int = 0  # 0: the hidden size
    vocab_multiple: int = 1
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.embedding_size == 0:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        for name, high in _LIMITS.items():
            check_whole(name, getattr(self, name), 1, high)
        check_whole("position_offset", self.position_offset, 0, 1024)
        if self.hidden_size % self.n_heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of n_heads {self.n_heads}")
        for name, value, allowed in (
            ("activation", self.activation, get_args(Activation)),
            ("norm", self.norm, get_args(NormPlacement)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        if not 0.0 < self.layer_norm_eps < 1.0:
            raise ConfigError(f"layer_norm_eps is {self.layer_norm_eps!r}; it must be between 0 and 1")
        for token_id in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            check_whole("a special token id", token_id, 0, self.vocab_size - 1)

    @property
    def head_size(self) -> int:
        """D: elements of one head."""
        return self.hidden_size // self.n_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
