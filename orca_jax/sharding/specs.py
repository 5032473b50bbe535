"""Which dimensions of parameters and caches are split over a stage's devices (ORCA 4.1, Figure 6).

QKV and up projections are split by columns, that is by heads and by feed-forward units, out and down
projections by the same as their rows, embedding and head by vocabulary. So a layer needs two sums over the
devices, after `out` and after `down`, and nothing else.
"""

from jax.sharding import PartitionSpec

from orca_jax.sharding.device_group import TENSOR

SPLIT = {"vocab", "heads", "ffn"}  # the others are whole on every device

_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "token_embedding": ("vocab", "embed"),
    "position_embedding": ("position", "hidden"),
    "project_in": ("hidden", "embed"),
    "project_out": ("embed", "hidden"),
    "qkv.weight": ("qkv", "heads", "hidden"),  # heads: all heads' columns, N * D
    "qkv.bias": ("qkv", "heads"),
    "out.weight": ("hidden", "heads"),
    "out.bias": ("hidden",),
    "up.weight": ("ffn", "hidden"),
    "up.bias": ("ffn",),
    "down.weight": ("hidden", "ffn"),
    "down.bias": ("hidden",),
    "head.weight": ("vocab", "embed"),
}
_CACHE = ("block", "heads", "slot", "head_size")


def _spec(dimensions: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(TENSOR if dimension in SPLIT else None for dimension in dimensions))


CACHE_SPEC = _spec(_CACHE)  # keys or values of a layer, [n_blocks, K, B, D]


def dimensions(parameter: str) -> tuple[str, ...]:
    """The names of the dimensions of a parameter, a name of `model.gpt.parameter_shapes`."""
    if parameter.endswith(("norm.scale", "norm.bias")):
        return ("hidden",)
    return _DIMENSIONS[".".join(parameter.split(".")[-2:])]


def spec(parameter: str) -> PartitionSpec:
    """How a parameter is split."""
    return _spec(dimensions(parameter))
