"""Reads LoRA adapters as Hugging Face's PEFT saves them, in the order of the engine's weights.

A directory has adapter_config.json and adapter_model.safetensors, and neither is trusted. A tensor's name is
the path of a module in transformers' model, such as base_model.model.model.layers.0.self_attn.q_proj.
lora_A.weight: the family's table of weights says which weight, or which part of one, the module is. Whatever
the adapter would compute otherwise, such as DoRA, is refused by name.
"""

import math
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orca_jax.checkpoint.head_view import stored_shapes
from orca_jax.checkpoint.safetensors_reader import FLOAT_DTYPES, StoredTensor, read_header
from orca_jax.errors import BadAdapter, UnsafeFile
from orca_jax.families.adapters import StackShapes, adaptable, part_sizes, stack_shapes
from orca_jax.families.attention_config import Attention
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import FLAT_HEADS, Parameter
from orca_jax.families.stored_name import StoredName, head_places, size_of_heads
from orca_jax.families.strict_json import read_object, shown

CONFIG, WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MAX_CONFIG_BYTES = 1_000_000
_PEFT = "base_model.model."
# The text part of a model of text and pictures, which transformers has called by each of these.
_TEXT_PARTS = ("model.language_model.", "language_model.model.", "language_model.")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# Fields that say how an adapter was trained, or that its tensors' names and shapes say again.
_UNREAD = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    }
)
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
        "init_lora_weights",
    }
)
# These start from the base's own factors, and leave the base without them.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PLAIN_PATTERN = re.compile(r"\^?(?:[\w.-]|\\\.)+\$?")
_LARGEST_RANK = 4096


class Low(NamedTuple):
    """The change of a part of a weight: b [*out, r] times a [r, *in], in the engine's order."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in host memory: the change of each part of a weight by the weight's name, None without one.

    The scale is in `b`. `rank` is the greatest of its ranks.
    """

    changes: Mapping[str, Sequence[Low | None]]
    rank: int

    @property
    def n_bytes(self) -> int:
        return sum(low.a.nbytes + low.b.nbytes for parts in self.changes.values() for low in parts if low)

    def stacked(
        self, config: ModelConfig, rank: int, dtype: np.dtype
    ) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
        """The arrays `a` and `b` for the stacks of a padded `rank`, by the weight's name."""
        table = adaptable(config)
        return {
            name: _padded(parts, stack_shapes(table[name], rank), rank, dtype)
            for name, parts in self.changes.items()
        }


class AdapterConfig(NamedTuple):
    """The part of adapter_config.json that the result depends on."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    root_scale: bool  # rsLoRA: the scale is alpha / sqrt(r)

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *(_whole(self.path, "rank_pattern", rank) for rank in self.ranks.values())])

    def rank_of(self, module: str) -> int:
        """The rank of a module. Raises BadAdapter."""
        key = _matching(self.ranks, module)
        return self.rank if key is None else _whole(self.path, "rank_pattern", self.ranks[key])

    def scale_of(self, module: str) -> float:
        """The factor of B A. Raises BadAdapter."""
        key, rank = _matching(self.alphas, module), self.rank_of(module)
        alpha = self.alpha if key is None else _number(self.path, "alpha_pattern", self.alphas[key])
        return alpha / (math.sqrt(rank) if self.root_scale else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises BadAdapter, NotACheckpoint or CorruptFile, each of which names it."""
    path = directory / CONFIG
    values = read_object(path, _MAX_CONFIG_BYTES)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise BadAdapter(f"{shown(path)}: peft_type: expected 'LORA', found {shown(kind)}")
    others = [name for name, value in values.items() if name not in _UNREAD | _READ and value]
    if values.get("bias", "none") != "none":
        others.append("bias")
    if others:
        found = ", ".join(f"{shown(name)} {shown(values[name])}" for name in others)
        raise BadAdapter(
            f"{shown(path)}: {found}: not supported; a LoRA adapter of linear layers is (docs/adapters.md). "
            "Merge it into its model with PEFT's merge_and_unload"
        )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        raise BadAdapter(
            f"{shown(path)}: init_lora_weights {shown(start)} changes the model's own weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion, or merge it"
        )
    patterns = [values.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    for name, pattern in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
        if not isinstance(pattern, dict):
            raise BadAdapter(f"{shown(path)}: {name}: expected an object, found {shown(pattern)}")
        for key in pattern:
            if _PLAIN_PATTERN.fullmatch(key) is None:
                raise BadAdapter(
                    f"{shown(path)}: {name}: {shown(key)}: expected the end of a module's name, perhaps "
                    "between ^ and $; other regular expressions are not read"
                )
    return AdapterConfig(
        path,
        _whole(path, "r", values.get("r", 8)),
        _number(path, "lora_alpha", values.get("lora_alpha", 8)),
        patterns[0],
        patterns[1],
        bool(values.get("use_rslora")),
    )


def read_adapter(
    directory: Path, family: Family, config: ModelConfig, dtype: np.dtype, *, most_rank: int
) -> LoadedAdapter:
    """Read an adapter of a model of this family and `config`, as the devices hold it, in `dtype`.

    Raises BadAdapter, NotACheckpoint, UnsafeFile or CorruptFile; each names the file, and nothing is read of
    tensors that do not fit.
    """
    own = read_adapter_config(directory)
    if own.largest_rank > most_rank:
        raise BadAdapter(
            f"{shown(own.path)}: the rank is {own.largest_rank}, and the engine has room for {most_rank}; "
            f"start it with --max-lora-rank {own.largest_rank}"
        )
    path = directory / WEIGHTS
    if not os.path.exists(path) and os.path.exists(directory / _PICKLE):
        raise UnsafeFile(
            f"{shown(directory / _PICKLE)} is a pickle, and reading one can run code; save the adapter as "
            f"{WEIGHTS}, PEFT's default"
        )
    targets = _targets(family, config)
    tensors = dict[tuple[str, str], StoredTensor]()
    for name, tensor in read_header(path).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise BadAdapter(f"{tensor}: expected lora_A and lora_B of linear layers, found no such name")
        tensors[match["module"], match["side"]] = tensor
    found = dict[str, dict[int, Low]]()
    for module in dict.fromkeys(module for module, _ in tensors):
        a, b = tensors.get((module, "A")), tensors.get((module, "B"))
        one = a or b
        if a is None or b is None:
            raise BadAdapter(f"{one}: its module has only one of lora_A and lora_B")
        short = _without_prefix(module, family)
        target = targets.get(short)
        if target is None:
            raise BadAdapter(
                f"{one}: the model has no linear layer {shown(short)} that an adapter can change here"
            )
        name = module.removeprefix(_PEFT)
        pair = _pair(a, b, target, own.rank_of(name), own.scale_of(name), config.attention, dtype)
        found.setdefault(target.name, {}).update(pair)
    n_parts = {name: len(part_sizes(one)) for name, one in adaptable(config).items() if name in found}
    changes = {name: [parts.get(i) for i in range(n_parts[name])] for name, parts in found.items()}
    rank = max((low.a.shape[0] for parts in found.values() for low in parts.values()), default=0)
    return LoadedAdapter(changes, rank)


class _Target(NamedTuple):
    """The place of a module here: tensor number `tensor` of the weight `name`, stored as `stored` says."""

    name: str
    parameter: Parameter
    stored: StoredName
    tensor: int


def _targets(family: Family, config: ModelConfig) -> dict[str, _Target]:
    """The modules that adapters may change, by their names without a prefix."""
    targets = dict[str, _Target]()
    for name, parameter in adaptable(config).items():
        stored = family.stored_name(name, "", config)
        # Rows of several tensors in one part are in no order that a part could have.
        if stored.by_expert or (len(stored.names) > 1 and len(part_sizes(parameter)) != len(stored.names)):
            continue
        for i, tensor in enumerate(stored.names):
            if tensor.endswith(".weight"):
                targets[tensor.removesuffix(".weight")] = _Target(name, parameter, stored, i)
    return targets


def _without_prefix(module: str, family: Family) -> str:
    module = module.removeprefix(_PEFT)
    for prefix in sorted({*family.prefixes, *_TEXT_PARTS}, key=len, reverse=True):
        if prefix and module.startswith(prefix):
            return module.removeprefix(prefix)
    return module


def _pair(
    a: StoredTensor,
    b: StoredTensor,
    target: _Target,
    rank: int,
    scale: float,
    attention: Attention,
    dtype: np.dtype,
) -> dict[int, Low]:
    """The changes of the parts that the tensor has. Raises BadAdapter or CorruptFile."""
    parameter, stored = target.parameter, target.stored
    shapes = stored_shapes(parameter, replace(stored, transpose=False), attention)
    n_out, n_in = shapes[target.tensor]
    into, out = parameter.shape[-parameter.n_in :], parameter.shape[: -parameter.n_in]
    down = _read(a, (rank, n_in)).astype(np.float32)
    up = _read(b, (n_out, rank)).astype(np.float32) * np.float32(scale)
    sizes, first = part_sizes(parameter), 0
    if stored.heads is None:
        down = down.reshape(rank, *into)
        if len(stored.names) > 1:  # each tensor is one part
            return {target.tensor: _low(down, up.reshape(sizes[target.tensor], *out[1:], rank), a, b, dtype)}
        up = up.reshape(*out, rank)
        parts = dict[int, Low]()
        for i, size in enumerate(sizes):
            parts[i] = _low(down, up[first : first + size], a, b, dtype)
            first += size
        return parts
    places, size_of_head = head_places(stored.heads, attention), size_of_heads(parameter, attention)
    if parameter.takes_attention:
        if parameter.axes[-1] != FLAT_HEADS:
            order = np.array([[place.head for place in heads] for heads in places])
            down = down.reshape(rank, -1, size_of_head)[:, order]
        return {0: _low(down.reshape(rank, *into), up.reshape(*out, rank), a, b, dtype)}
    by_head, parts = up.reshape(-1, size_of_head, rank), dict[int, Low]()
    for i, size in enumerate(sizes):
        slices = places[first : first + size]
        first += size
        if slices[0][0].tensor == target.tensor:
            order = np.array([[place.head for place in heads] for heads in slices])
            rows = by_head[order].reshape(size, *out[1:], rank)
            parts[i] = _low(down.reshape(rank, *into), rows, a, b, dtype)
    return parts


def _low(down: np.ndarray, up: np.ndarray, a: StoredTensor, b: StoredTensor, dtype: np.dtype) -> Low:
    """The pair in the engine's dtype. Raises BadAdapter unless all its numbers are finite there."""
    for array, tensor in ((down, a), (up, b)):
        if not np.isfinite(array).all():
            raise BadAdapter(f"{tensor}: it holds NaN or infinite numbers")
    with np.errstate(over="ignore"):
        low = Low(down.astype(dtype), np.ascontiguousarray(up.astype(dtype)))
    if not (np.isfinite(low.a).all() and np.isfinite(low.b).all()):
        raise BadAdapter(f"{b}: it holds numbers too large for {dtype.name}")
    return low


def _read(tensor: StoredTensor, shape: tuple[int, int]) -> np.ndarray:
    if tensor.shape != shape:
        raise BadAdapter(f"{tensor}: expected the shape {list(shape)}, found {list(tensor.shape)}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise BadAdapter(f"{tensor}: expected the dtype {', '.join(FLOAT_DTYPES)}, found {tensor.dtype}")
    values = np.empty(shape, tensor.element)
    for row, piece in tensor.pieces(((0, shape[0]), (0, shape[1]))):
        values[row : row + len(piece)] = piece
    return values


def _padded(
    parts: Sequence[Low | None], shapes: StackShapes, rank: int, dtype: np.dtype
) -> tuple[np.ndarray, list[np.ndarray]]:
    a, b = np.zeros(shapes.a, dtype), [np.zeros(shape, dtype) for shape in shapes.b]
    for i, low in enumerate(parts):
        if low is not None:
            n = len(low.a)
            a[i * rank : i * rank + n] = low.a
            b[i][..., :n] = low.b
    return a, b


def _matching(pattern: Mapping[str, Any], module: str) -> str | None:
    """The first key of a pattern that a module's name ends with, as PEFT matches them."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), None)


def _whole(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_RANK:
        raise BadAdapter(f"{shown(path)}: {name}: expected 1 to {_LARGEST_RANK}, found {shown(value)}")
    return value


def _number(path: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise BadAdapter(f"{shown(path)}: {name}: expected a number, found {shown(value)}")
    return float(value)
