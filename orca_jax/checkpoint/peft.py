"""Reads LoRA adapters as Hugging Face's PEFT saves them, in the order of the engine's weights.

A directory has adapter_config.json and adapter_model.safetensors, and neither is trusted. A tensor's name is
the path of a module in transformers' model, such as base_model.model.model.layers.0.self_attn.q_proj.
lora_A.weight: the family's table of weights says which weight, or which part of one, the module is. Whatever
the adapter would compute otherwise, such as DoRA, is refused by name.

Experts have adapters in two ways: each expert's linear layers by their names (mlp.experts.3.up_proj), or,
with target_parameters, one pair for the matrices of all experts, which transformers 5 keeps in one parameter.
"""

import hashlib
import math
import os.path
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orca_jax.checkpoint.head_view import stored_shapes
from orca_jax.checkpoint.safetensors_reader import FLOAT_DTYPES, StoredTensor, read_header
from orca_jax.config import LORA_EXTRAS, LoraExtra
from orca_jax.errors import BadAdapter, UnsafeFile
from orca_jax.families.adapters import adaptable, extra_of, is_by_expert, part_sizes, stack_shapes
from orca_jax.families.attention_config import Attention
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import (
    FLAT_HEADS,
    HEAD,
    TOKEN_EMBEDDING,
    Parameter,
    attention_of,
    share_rows,
)
from orca_jax.families.stored_name import StoredName, head_places, size_of_heads
from orca_jax.families.strict_json import read_object, shown

CONFIG, WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MAX_CONFIG_BYTES = 1_000_000
_PEFT = "base_model.model."
# The text part of a model of text and pictures, which transformers has called by each of these.
_TEXT_PARTS = ("model.language_model.", "language_model.model.", "language_model.")
_TENSOR = re.compile(
    r"(?P<module>.+)\.lora_((?P<side>[AB])(\.default)?\.weight|(?P<of_table>embedding_[AB])(\.default)?)"
)
# All experts of a layer, whose two parameters PEFT wraps one after the other.
_EXPERTS = re.compile(r"layers\.(?P<layer>\d{1,9})\.(\w+\.)*experts(\.base_layer)*")
_BASE, _BASE_BIAS = ".base_layer.weight", ".base_layer.bias"
# Fields that say how an adapter was trained, or that its tensors' names and shapes say again.
_UNREAD = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters"),
        "task_type",
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
_PLAIN_PATTERN = re.compile(r"\^?(?:\.\*\\\.)?(?:[\w.-]|\\\.)+\$?")
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(\..*)?")
# The first version of PEFT whose A has the inputs' side of all experts, whatever the parameter's order.
_SIDES_SINCE = (0, 19)
# What transformers calls the matrices of all experts.
_UP, _DOWN = ("gate_up_proj", "up_proj"), ("down_proj",)
_LARGEST_RANK = 4096


class Low(NamedTuple):
    """The change of a part of a weight: b [*out, r] times a [r, *in], in the engine's order.

    Experts have one each: b [X, *out, r] and a [X, r, in].
    """

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        return self.b.shape[-1]


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

    def digest(self) -> str:
        """A text that differs wherever an array does."""
        found = hashlib.sha256()
        for name, parts in sorted(self.changes.items()):
            for i, low in enumerate(parts):
                for array in () if low is None else low:
                    found.update(f"{name} {i} {array.dtype} {array.shape} ".encode())
                    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return found.hexdigest()

    def stacked(
        self, config: ModelConfig, rank: int, dtype: np.dtype
    ) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
        """The arrays `a` and `b` for the stacks of a padded `rank`, by the weight's name."""
        table = adaptable(config, extras=LORA_EXTRAS)
        return {name: _padded(parts, table[name], rank, dtype) for name, parts in self.changes.items()}


class AdapterConfig(NamedTuple):
    """The part of adapter_config.json that the result depends on."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    root_scale: bool  # rsLoRA: the scale is alpha / sqrt(r)
    a_has_inputs: bool  # also of experts in one parameter

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *(_whole(self.path, "rank_pattern", rank) for rank in self.ranks.values())])

    def rank_of(self, *names: str) -> int:
        """The rank of a module, or parameter, that may have any of these names. Raises BadAdapter."""
        key = _matching(self.ranks, names)
        return self.rank if key is None else _whole(self.path, "rank_pattern", self.ranks[key])

    def scale_of(self, *names: str) -> float:
        """The factor of B A. Raises BadAdapter."""
        key, rank = _matching(self.alphas, names), self.rank_of(*names)
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
                    "between ^ and $ or after .*\\.; other regular expressions are not read"
                )
    return AdapterConfig(
        path,
        _whole(path, "r", values.get("r", 8)),
        _number(path, "lora_alpha", values.get("lora_alpha", 8)),
        patterns[0],
        patterns[1],
        bool(values.get("use_rslora")),
        _is_since(values.get("peft_version"), _SIDES_SINCE),
    )


def extras_in(directory: Path, family: Family, config: ModelConfig) -> set[LoraExtra]:
    """The parts changed beside linear layers, by their tensors' names. Raises as `read_adapter` does."""
    targets, found = _targets(family, config), set[LoraExtra]()
    for name in read_header(_weights_of(directory)):
        match = _TENSOR.fullmatch(name)
        if match is not None:
            module = _without_prefix(match["module"], family)
            extra = "experts" if _EXPERTS.fullmatch(module) else None
            if (target := targets.get(module)) is not None:
                extra = extra_of(target.name, target.parameter)
            found |= set() if extra is None else {extra}
    return found


def read_adapter(
    directory: Path,
    family: Family,
    config: ModelConfig,
    dtype: np.dtype,
    *,
    most_rank: int,
    extras: Collection[str] = (),
) -> LoadedAdapter:
    """Read an adapter of a model of this family and `config`, as the devices hold it, in `dtype`.

    `most_rank` and `extras` say what there is room for. Raises BadAdapter, NotACheckpoint, UnsafeFile or
    CorruptFile; each names the file, and nothing is read of tensors that do not fit.
    """
    own = read_adapter_config(directory)
    if own.largest_rank > most_rank:
        raise BadAdapter(
            f"{shown(own.path)}: the rank is {own.largest_rank}, and the engine has room for {most_rank}; "
            f"start it with --max-lora-rank {own.largest_rank}"
        )
    table = adaptable(config, extras=LORA_EXTRAS)
    targets = _targets(family, config)
    tensors = dict[tuple[str, str], StoredTensor]()
    for name, tensor in read_header(_weights_of(directory)).items():
        match = _TENSOR.fullmatch(name)
        if match is not None:
            tensors[match["module"], match["side"] or match["of_table"]] = tensor
        elif not _is_copy_of_base(name, tensor, targets, family, config):
            raise BadAdapter(f"{tensor}: expected lora_A and lora_B of linear layers, found no such name")
    reader = _Reader(own, config, family, dtype)
    for module in dict.fromkeys(module for module, _ in tensors):
        short = _without_prefix(module, family)
        target, is_of_all = targets.get(short), _EXPERTS.fullmatch(short)
        sides = ("embedding_A", "embedding_B") if (module, "embedding_A") in tensors else ("A", "B")
        a, b = (tensors.get((module, side)) for side in sides)
        one = next(tensor for (other, _), tensor in tensors.items() if other == module)
        if a is None or b is None:
            raise BadAdapter(f"{one}: its module has only one of lora_A and lora_B")
        if is_of_all is None and (
            target is None or (sides == ("A", "B")) == (target.name == TOKEN_EMBEDDING)
        ):
            raise BadAdapter(
                f"{one}: the model has no linear layer {shown(short)} that an adapter can change here"
            )
        extra = "experts" if target is None else extra_of(target.name, target.parameter)
        if extra is not None and extra not in extras:
            raise BadAdapter(
                f"{one}: it changes {_EXTRA_WORDS[extra]}, for which the engine has no room; start it with "
                f"--lora-extras {','.join([*extras, extra])}"
            )
        name = module.removeprefix(_PEFT)
        if is_of_all is not None:
            reader.take_experts(a, b, name, int(is_of_all["layer"]), table)
        else:
            assert target is not None
            reader.take(a, b, name, target)
    return reader.loaded(table)


_EXTRA_WORDS: Mapping[LoraExtra, str] = {
    "embedding": "the token embedding",
    "head": "the head",
    "experts": "experts",
}


def _weights_of(directory: Path) -> Path:
    """The file of an adapter's tensors. Raises UnsafeFile for a pickle."""
    path = directory / WEIGHTS
    if not os.path.exists(path) and os.path.exists(directory / _PICKLE):
        raise UnsafeFile(
            f"{shown(directory / _PICKLE)} is a pickle, and reading one can run code; save the adapter as "
            f"{WEIGHTS}, PEFT's default"
        )
    return path


class _Target(NamedTuple):
    """The place of a module here: tensor number `tensor` of the weight `name`, stored as `stored` says."""

    name: str
    parameter: Parameter
    stored: StoredName
    tensor: int


def _targets(family: Family, config: ModelConfig) -> dict[str, _Target]:
    """The modules that adapters may change, by their names without a prefix."""
    targets = dict[str, _Target]()
    for name, parameter in adaptable(config, extras=LORA_EXTRAS).items():
        if name == HEAD and HEAD not in family.weights:  # always tied
            continue
        stored = family.stored_name(name, "", config)
        n_parts = len(part_sizes(parameter)) * (parameter.shape[0] if is_by_expert(parameter) else 1)
        # Rows of several tensors in one part are in no order that a part could have.
        if stored.by_expert or (len(stored.names) > 1 and n_parts != len(stored.names)):
            continue
        for i, tensor in enumerate(stored.names):
            for each in (tensor, *(tensor.replace(*alias) for alias in family.aliases.items())):
                if each.endswith(".weight"):
                    targets[each.removesuffix(".weight")] = _Target(name, parameter, stored, i)
    return targets


def _is_copy_of_base(
    name: str,
    tensor: StoredTensor,
    targets: Mapping[str, _Target],
    family: Family,
    config: ModelConfig,
) -> bool:
    """Whether a tensor is the base's embedding or head, or the head's bias, which PEFT saves too."""
    end = next((end for end in (_BASE, _BASE_BIAS) if name.endswith(end)), None)
    target = None if end is None else targets.get(_without_prefix(name.removesuffix(end), family))
    if target is None or extra_of(target.name, target.parameter) not in ("embedding", "head"):
        return False
    shape = (config.vocab_size, config.embedding.size) if end == _BASE else (config.vocab_size,)
    if tensor.shape != shape:
        raise BadAdapter(
            f"{tensor}: the adapter's model has an embedding or head of the shape {list(tensor.shape)}, and "
            f"this one {list(shape)}; merge an adapter of a resized vocabulary into its model"
        )
    return True


class _Reader:
    """Collects the changes of an adapter's modules."""

    def __init__(self, own: AdapterConfig, config: ModelConfig, family: Family, dtype: np.dtype) -> None:
        self._own, self._config, self._family, self._dtype = own, config, family, dtype
        self._found = dict[str, dict[int, Low]]()
        # By weight, part and expert.
        self._of_expert = dict[str, dict[int, dict[int, Low]]]()

    def take(self, a: StoredTensor, b: StoredTensor, module: str, target: _Target) -> None:
        """Take the pair of a module. Raises BadAdapter or CorruptFile."""
        rank, scale = self._own.rank_of(module), self._own.scale_of(module)
        parameter = target.parameter
        extra = extra_of(target.name, parameter)
        if extra == "experts":
            expert, part = divmod(target.tensor, len(part_sizes(parameter)))
            n_out, n_in = part_sizes(parameter)[part] * math.prod(parameter.shape[2:-1]), parameter.shape[-1]
            down, up = _read(a, (rank, n_in)), _read(b, (n_out, rank)).astype(np.float32)
            low = _low(down, up * np.float32(scale), a, b, self._dtype)
            self._of_expert.setdefault(target.name, {}).setdefault(part, {})[expert] = low
        elif extra is not None:
            pair = self._of_vocabulary(a, b, rank, scale, parameter, is_head=extra == "head")
            self._found[target.name] = {0: pair}
        else:
            attention, rows = attention_of(self._config, target.name), share_rows(self._config, target.name)
            pair = _pair(a, b, target, rank, scale, attention, rows, self._dtype)
            self._found.setdefault(target.name, {}).update(pair)

    def _of_vocabulary(
        self,
        a: StoredTensor,
        b: StoredTensor,
        rank: int,
        scale: float,
        parameter: Parameter,
        *,
        is_head: bool,
    ) -> Low:
        """The change of the head or of the embedding, whose vocabulary is padded."""
        n_rows, width = self._config.vocab_size, self._config.embedding.size
        n_out, n_in = (n_rows, width) if is_head else (width, n_rows)
        down, up = _read(a, (rank, n_in)), _read(b, (n_out, rank)).astype(np.float32) * np.float32(scale)
        more_out, more_in = (whole - n for whole, n in zip(parameter.shape, (n_out, n_in), strict=True))
        down, up = np.pad(down, ((0, 0), (0, more_in))), np.pad(up, ((0, more_out), (0, 0)))
        return _low(down, up, a, b, self._dtype)

    def take_experts(
        self,
        a: StoredTensor,
        b: StoredTensor,
        module: str,
        layer: int,
        table: Mapping[str, Parameter],
    ) -> None:
        """Take the pair of a parameter of all experts of a layer. Raises BadAdapter or CorruptFile.

        PEFT stores A [X r, n] and B [m, r X], where n are the inputs; in older versions m are those of some
        models. The sizes say which, and which of the two parameters it is, unless several have the same.
        """
        module = module.replace(".base_layer", "")
        kinds, sizes = list[tuple[str, tuple[str, ...], bool]](), (a.shape[-1], b.shape[0])
        for kind, names in (("up", _UP), ("down", _DOWN)):
            parameter = table.get(f"layers.{layer}.experts.{kind}.weight")
            if parameter is not None:
                both = parameter.shape[-1], math.prod(parameter.shape[1:-1])
                sides = [turned for turned in (False, True) if sizes == both[:: -1 if turned else 1]]
                kinds += [(kind, names, turned) for turned in sides]
        if len(kinds) > 1 and self._own.a_has_inputs:
            kinds = [each for each in kinds if not each[2]]
        if len(kinds) > 1:
            raise BadAdapter(
                f"{a}: several matrices of the experts have these sizes, and the file does not say which it "
                "is; save the adapter with PEFT 0.19 or later, or merge it into its model"
            )
        for kind, names, turned in kinds:
            name = f"layers.{layer}.experts.{kind}.weight"
            parameter = table[name]
            number, n_out = parameter.shape[0], math.prod(parameter.shape[1:-1])
            if name in self._found:
                raise BadAdapter(f"{a}: another pair of the file changes {name} too")
            paths = [f"{module}.{each}" for each in names]
            rank, scale = self._own.rank_of(*paths), self._own.scale_of(*paths)
            down = _read(a, (number * rank, sizes[0])).astype(np.float32)
            up = _read(b, (sizes[1], rank * number)).astype(np.float32) * np.float32(scale)
            down, up = down.reshape(number, rank, -1), up.reshape(-1, rank, number).transpose(2, 1, 0)
            if turned:  # up to here both are [X, r, n], and either may be the inputs' side
                down, up = up, down
            up = up.swapaxes(1, 2)  # [X, out, r]
            stored = self._family.alternatives.get("layers.{i}.experts.up.weight")
            stored = stored or self._family.weights["layers.{i}.experts.up.weight"]
            if kind == "up" and stored.alternating:
                up = up.reshape(number, n_out // 2, 2, rank).swapaxes(1, 2)
            up = up.reshape(*parameter.shape[:-1], rank)
            n_parts = len(part_sizes(parameter))
            pieces = np.split(up, n_parts, axis=1)
            self._found[name] = {i: _low(down, piece, a, b, self._dtype) for i, piece in enumerate(pieces)}
            return
        raise BadAdapter(
            f"{a}: expected the sizes of a matrix of the experts of layer {layer}, found {a.shape[-1]} and "
            f"{b.shape[0]}"
        )

    def loaded(self, table: Mapping[str, Parameter]) -> LoadedAdapter:
        """All changes that were taken."""
        for name, parts in self._of_expert.items():
            parameter = table[name]
            for part, lows in parts.items():
                rank = max(low.rank for low in lows.values())
                shapes = stack_shapes(parameter, rank)
                a = np.zeros((parameter.shape[0], rank, parameter.shape[-1]), self._dtype)
                b = np.zeros(shapes.b[part], self._dtype)
                for expert, low in lows.items():
                    a[expert, : low.rank] = low.a
                    b[expert, ..., : low.rank] = low.b.reshape(*b.shape[1:-1], low.rank)
                self._found.setdefault(name, {})[part] = Low(a, b)
        changes = {
            name: [parts.get(i) for i in range(len(part_sizes(table[name])))]
            for name, parts in self._found.items()
        }
        ranks = [low.rank for parts in self._found.values() for low in parts.values()]
        return LoadedAdapter(changes, max(ranks, default=0))


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
    rows: tuple[int, ...] | None,
    dtype: np.dtype,
) -> dict[int, Low]:
    """The changes of the parts that the tensor has, with its `rows` in this order.

    Raises BadAdapter or CorruptFile.
    """
    parameter, stored = target.parameter, target.stored
    shapes = stored_shapes(parameter, replace(stored, transpose=False), attention)
    n_out, n_in = shapes[target.tensor]
    n_out = n_out if rows is None else max(rows) + 1
    into, out = parameter.shape[-parameter.n_in :], parameter.shape[: -parameter.n_in]
    down = _read(a, (rank, n_in)).astype(np.float32)
    up = _read(b, (n_out, rank)).astype(np.float32) * np.float32(scale)
    sizes, first = part_sizes(parameter), 0
    if stored.heads is None:
        down = down.reshape(rank, *into)
        if len(stored.names) > 1:  # each tensor is one part
            return {target.tensor: _low(down, up.reshape(sizes[target.tensor], *out[1:], rank), a, b, dtype)}
        up = (up if rows is None else up[np.array(rows)]).reshape(*out, rank)
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
            of_heads = by_head[order].reshape(size, *out[1:], rank)
            parts[i] = _low(down.reshape(rank, *into), of_heads, a, b, dtype)
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
    parts: Sequence[Low | None], parameter: Parameter, rank: int, dtype: np.dtype
) -> tuple[np.ndarray, list[np.ndarray]]:
    shapes, experts = stack_shapes(parameter, rank), (slice(None),) * is_by_expert(parameter)
    a, b = np.zeros(shapes.a, dtype), [np.zeros(shape, dtype) for shape in shapes.b]
    for i, low in enumerate(parts):
        if low is not None:
            a[*experts, i * rank : i * rank + low.rank] = low.a
            b[i][..., : low.rank] = low.b
    return a, b


def _matching(pattern: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first key of a pattern that one of these names ends with, as PEFT matches them."""
    return next((key for key in pattern if any(re.match(rf"(.*\.)?({key})$", name) for name in names)), None)


def _is_since(version: object, first: tuple[int, int]) -> bool:
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return found is not None and (int(found[1]), int(found[2])) >= first


def _whole(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_RANK:
        raise BadAdapter(f"{shown(path)}: {name}: expected 1 to {_LARGEST_RANK}, found {shown(value)}")
    return value


def _number(path: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise BadAdapter(f"{shown(path)}: {name}: expected a number, found {shown(value)}")
    return float(value)
