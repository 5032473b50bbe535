"""Reads `quantization_config`: how a checkpoint stores the matrix of each linear layer, by the layer's name.

Read are compressed-tensors (what llm-compressor saves), GPTQ, AWQ, and FP8 with scales for tensors or blocks.
Whatever could change a number is read or refused: a hint that only made the file is left.

A *module* is a linear layer's name in the checkpoint, as `model.layers.0.self_attn.q_proj`; its tensors add
`.weight`, `.qweight` and so on (checkpoint/packed_safetensors.py).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from orca_jax.config import Rounding
from orca_jax.errors import BadModelConfig, ConfigError, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import PackedForm, Scale, fp8, joined, w4, w8, w8a8
from orca_jax.families.parameters import HEAD, TOKEN_EMBEDDING, Parameter, packable_weights
from orca_jax.families.strict_json import shown
from orca_jax.families.weight_form import DENSE, WeightForm

Layout = Literal["words", "int8", "fp8", "gptq", "awq"]
Inputs = Literal["", "int8", "fp8", "fp8 static"]

_MOST_GROUP = 1 << 20
_MANY = 128  # scales for at least this number of inputs may be float32 at little cost
_LINEAR = ("Linear", "LinearBase")  # names of the class of linear layers


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMatrix:
    """The storage of a linear layer's matrix [out, in] in a checkpoint.

    `group` inputs share a scale, None: all of them; `rows` outputs do, None: all of them. With `zeros` each
    scale has a code that means 0. With `ordered` input i belongs to group g_idx[i] (GPTQ's act-order).

    words    `weight_packed`, several codes in a 32-bit word along a row (compressed-tensors)
    int8     `weight` in int8
    fp8      `weight` in float8_e4m3fn
    gptq     `qweight` [in / n, out], and `qzeros`, which with `less_one` hold the zeros less 1 (version 1)
    awq      `qweight` [in, out / n] in GEMM's order

    `inputs` says how activations are rounded before the product: int8 and fp8 with a scale for each token,
    fp8 static with the scale `input_scale`. `scales` is the dtype of scales, where the config says it.
    `scale_names` are possible names of the tensor of scales.
    """

    layout: Layout
    bits: int
    group: int | None
    rows: int | None = 1
    zeros: bool = False
    ordered: bool = False
    less_one: bool = False
    inputs: Inputs = ""
    scales: Scale | None = None
    scale_names: tuple[str, ...] = ("weight_scale",)

    def form(self, n_in: int, scales: Scale) -> WeightForm:
        """The form in which devices hold the matrix; dense where its inputs are not whole blocks.

        `scales` is the dtype of scales where there are many.
        """
        group = None if self.group is None or self.group >= n_in else self.group
        many = group is not None and group < _MANY
        scale: Scale = (self.scales or scales) if many and self.layout != "fp8" else "float32"
        if self.layout == "fp8":
            form = replace(fp8(group, scale=scale), float_inputs=_FLOAT_INPUTS[self.inputs])
        elif self.bits == 4:
            form = w4(group, zeros=self.zeros, scale=scale)
        elif self.inputs == "int8":
            form = w8a8(scale)
        else:
            form = w8(group, zeros=self.zeros, scale=scale)
        return DENSE if n_in % form.multiple else replace(form, ordered=self.ordered)


_FLOAT_INPUTS: Mapping[Inputs, Literal["", "token", "static"]] = {
    "": "",
    "fp8": "token",
    "fp8 static": "static",
}

Rule = Callable[[str], bool]  # whether a module is one that the rule is about


@dataclass(frozen=True, slots=True)
class Quantization:
    """The linear layers that are quantized: the first of `rules` that fits a module says how, if at all.

    `layers_alone`: modules outside of layers, such as the head, are not quantized. `scales` is the dtype in
    which scales are expected to be.
    """

    method: str
    rules: tuple[tuple[Rule, StoredMatrix | None], ...]
    layers_alone: bool = False
    scales: Scale = "float32"

    def of(self, module: str) -> StoredMatrix | None:
        """The storage of this module's matrix; None where it is not quantized."""
        if self.layers_alone and re.search(r"\.\d+\.", module) is None:
            return None
        return next((how for fits, how in self.rules if fits(module)), None)


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """Read the quantization of a config.json; None where it has none, or one that no reader here knows.

    Raises BadModelConfig or UnsupportedModel.
    """
    if not fields.raw("quantization_config"):
        return None
    section = fields.section("quantization_config")
    assert section is not None
    method = section.raw("quant_method")
    readers: Mapping[Any, Callable[[ConfigFields], Quantization]] = {
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
    }
    reader = readers.get(method) if isinstance(method, str) else None
    if reader is None:
        return None
    found = reader(section)
    if method != "compressed-tensors":
        return replace(found, scales="float32" if method == "fp8" else "float16")
    dtype = fields.raw("dtype") or fields.raw("torch_dtype")
    return replace(found, scales=dtype) if dtype in ("float16", "bfloat16") else found


def form_of_weight(forms: Sequence[WeightForm], parameter: Parameter) -> WeightForm:
    """The form of a weight that is made of matrices in these forms; dense where no form can have them all."""
    is_expert = parameter.axes[0] == "X"
    if any(isinstance(form, PackedForm) and form.ordered for form in forms) and is_expert:
        return DENSE  # each expert has an order of its own
    if len({*forms}) == 1:
        return forms[0]
    return DENSE if is_expert or parameter.shape[0] < len(forms) else joined(forms)


def quantized_forms(model: ModelConfig, family: Family, quantization: Quantization) -> dict[str, WeightForm]:
    """The forms of the model's weights, by name, as its checkpoint has them; dense ones are left out."""
    found: dict[str, WeightForm] = {}
    for name, parameter in packable_weights(model).items():
        stored = family.stored_name(name, family.prefixes[0], model)
        if stored.by_expert or name == TOKEN_EMBEDDING or (name == HEAD and model.embedding.tied):
            continue
        n_in = math.prod(parameter.shape[-parameter.n_in :])
        # All experts are as the first, which is checked when their tensors are found.
        tensors = stored.names[
            : len(stored.names) // parameter.shape[0] if parameter.axes[0] == "X" else None
        ]
        every = [quantization.of(tensor.removesuffix(".weight")) for tensor in tensors]
        forms = [DENSE if how is None else how.form(n_in, quantization.scales) for how in every]
        form = form_of_weight(forms, parameter)
        if form != DENSE:
            found[name] = form
    return found


def rounded_forms(model: ModelConfig, to: Rounding) -> dict[str, WeightForm]:
    """The forms in which `--quantization` holds a model that is not quantized: all matrices of the layers.

    Embedding and head stay dense, as in published quantized checkpoints. Raises ConfigError for a model that
    is quantized already, or has experts in MXFP4, and for a matrix whose inputs are not whole groups.
    """
    if model.weight_forms or model.has_packed_experts:
        raise ConfigError(
            f"quantization is {to!r}, but the checkpoint's weights are quantized already; leave it out, "
            "and they are used as they are"
        )
    form = ROUNDED[to]
    found: dict[str, WeightForm] = {}
    for name, parameter in packable_weights(model).items():
        if parameter.use in ("embedding", "head"):
            continue
        n_in = math.prod(parameter.shape[-parameter.n_in :])
        if n_in % form.multiple:
            raise ConfigError(
                f"quantization is {to!r}, which needs multiples of {form.multiple} inputs, but {name} has "
                f"{n_in}; use int8 or fp8"
            )
        found[name] = form
    return found


# The forms of `--quantization`.
ROUNDED: Mapping[Rounding, PackedForm] = {
    "int8": w8(None, scale="float32"),
    "int4": w4(32, scale="float16"),
    "fp8": fp8(None, scale="float32"),
}


# compressed-tensors


_FORMATS: Mapping[str, tuple[Layout, ...]] = {
    "pack-quantized": ("words",),
    "int-quantized": ("int8",),
    "float-quantized": ("fp8",),
    "naive-quantized": ("int8", "fp8"),
}


def _compressed_tensors(section: ConfigFields) -> Quantization:
    if section.text("quantization_status", "compressed") != "compressed":
        raise _refused(section, "quantization_status", "compressed")
    for name, what in (
        ("kv_cache_scheme", "scales of keys and values"),
        ("sparsity_config", "sparse weights"),
        ("transform_config", "weights behind a transform"),
        ("moe_sparsity_config", "removed experts"),
    ):
        value = section.raw(name)
        if value and not _says_dense(value):
            raise UnsupportedModel(
                f"{shown(section.path)}: {section.full_name(name)} is set: {what} are not supported"
            )
    ignored = section.texts("ignore") or ()
    names = frozenset(ignored)
    patterns_to_ignore = [_matches(section, "ignore", each) for each in ignored if each.startswith("re:")]
    groups = section.section("config_groups")
    if groups is None or not groups.names():
        raise BadModelConfig(
            f"{shown(section.path)}: {section.full_name('config_groups')}: expected at least one group"
        )
    exact: list[tuple[Rule, StoredMatrix | None]] = [
        (fits, None) for fits in (names.__contains__, *patterns_to_ignore)
    ]
    patterns: list[tuple[str, Rule, StoredMatrix]] = []
    classes: list[tuple[Rule, StoredMatrix | None]] = []
    default = section.text("format", "")
    for name in groups.names():
        group = groups.section(name)
        if group is None:
            raise BadModelConfig(
                f"{shown(section.path)}: {groups.full_name(name)}: expected an object, found none"
            )
        how = _group(group, default)
        for target in group.texts("targets") or ():
            fits = _matches(group, "targets", target)
            if target in _LINEAR:
                classes.append((lambda _: True, how))
            elif target.startswith("re:"):
                patterns.append((target, fits, how))
            else:
                exact.append((fits, how))
    named = sorted(patterns, key=lambda each: each[0])
    rules = (*exact, *((fits, how) for _, fits, how in named), *classes)
    section.refuse_others(
        ("global_compression_ratio", "version", "observer", "run_compressed", "quant_method")
    )
    return Quantization("compressed-tensors", rules)


def _says_dense(value: Any) -> bool:
    """Whether a section, such as {"format": "dense"}, says that nothing was done."""
    return isinstance(value, dict) and (value.get("format") == "dense" or not any(value.values()))


def _group(group: ConfigFields, default: str) -> StoredMatrix:
    stored_as = group.text("format", default)
    if stored_as not in _FORMATS:
        raise UnsupportedModel(
            f"{shown(group.path)}: {group.full_name('format')}: expected one of {', '.join(_FORMATS)}, "
            f"found '{shown(stored_as)}'"
        )
    if group.raw("output_activations"):
        raise UnsupportedModel(
            f"{shown(group.path)}: {group.full_name('output_activations')} is set: rounded results are not "
            "supported"
        )
    weights = group.section("weights")
    if weights is None:
        raise UnsupportedModel(
            f"{shown(group.path)}: {group.full_name('weights')}: expected an object, found none"
        )
    how = _weights(weights, _FORMATS[stored_as])
    inputs = _inputs(group.section("input_activations"), how)
    group.refuse_others(("targets",))
    return replace(how, inputs=inputs)


def _weights(weights: ConfigFields, layouts: tuple[Layout, ...]) -> StoredMatrix:
    kind = weights.choice("type", {"int": "int", "float": "float"}, "int")
    bits = weights.whole("num_bits", default=8)
    layout: Layout | None = next((each for each in layouts if (each == "fp8") is (kind == "float")), None)
    if layout is None or bits not in {"words": (4, 8), "int8": (4, 8), "fp8": (8,)}[layout]:
        raise UnsupportedModel(
            f"{shown(weights.path)}: {weights.full_name('num_bits')}: expected integers of 4 or 8 bits, or "
            f"float-quantized floats of 8, found {kind} of {bits}"
        )
    symmetric = weights.flag("symmetric", True)
    if layout == "fp8" and not symmetric:
        raise _refused(weights, "symmetric", "true")
    if weights.flag("dynamic", False):
        raise _refused(weights, "dynamic", "false")
    size = weights.whole_or_null("group_size", None)
    strategy = weights.text("strategy", "tensor" if size is None else "channel" if size < 0 else "group")
    group, rows = _extent(weights, strategy, size)
    if layout == "words" and rows != 1 and not symmetric:
        raise _refused(weights, "symmetric", "true")  # its zeros are packed along the outputs
    order = weights.raw("actorder")
    if order not in (None, False, "group", "dynamic", "weight", "static"):
        raise _refused(weights, "actorder", "group, weight or null")
    scales = _SCALES.get(weights.text("scale_dtype", ""))
    weights.refuse_others(("zp_dtype", "observer", "observer_kwargs"))
    # Eight bits hold what int-quantized says are four.
    return StoredMatrix(
        layout=layout,
        bits=bits if layout == "words" else 8,
        group=group,
        rows=rows,
        zeros=not symmetric,
        ordered=order in ("group", "dynamic"),
        scales=scales,
    )


_SCALES: Mapping[str, Scale] = {f"torch.{name}": name for name in ("float16", "bfloat16", "float32")}


def _extent(fields: ConfigFields, strategy: str, size: int | None) -> tuple[int | None, int | None]:
    """The inputs and the outputs that share a scale; None: all of them."""
    blocks = fields.raw("block_structure")
    if isinstance(blocks, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", blocks):
        blocks = [int(n) for n in blocks.split("x")]
    match strategy:
        case "tensor":
            return None, None
        case "channel":
            return None, 1
        case "group" if size is not None and 0 < size <= _MOST_GROUP:
            return size, 1
        case "block" if isinstance(blocks, list) and len(blocks) == 2 and all(_is_size(n) for n in blocks):
            return blocks[1], blocks[0]
        case _:
            raise UnsupportedModel(
                f"{shown(fields.path)}: {fields.full_name('strategy')}: expected tensor, channel, group with "
                f"a group_size, or block with a block_structure, found {shown(strategy)}"
            )


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 < n <= _MOST_GROUP


def _inputs(section: ConfigFields | None, how: StoredMatrix) -> Inputs:
    """The rounding of activations. Raises UnsupportedModel for a rounding that is not computed."""
    if section is None:
        return ""
    kind, bits = section.text("type", "int"), section.whole("num_bits", default=8)
    symmetric, dynamic = section.flag("symmetric", True), section.raw("dynamic")
    strategy = section.text("strategy", "token" if dynamic else "tensor")
    size = section.whole_or_null("group_size", None)
    for name in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder", "block_structure"):
        section.raw(name)
    section.refuse_others(())
    found = (kind, bits, symmetric, bool(dynamic), strategy)
    by_row = how.group is None and not how.zeros
    if found == ("int", 8, True, True, "token") and how.layout == "int8" and by_row:
        return "int8"
    if found == ("float", 8, True, True, "token") and how.layout == "fp8":
        return "fp8"
    if found == ("float", 8, True, False, "tensor") and how.layout == "fp8":
        return "fp8 static"
    if found == ("float", 8, True, True, "group") and how.layout == "fp8" and size == how.group:
        return ""  # rounded by groups of a row, to the weights' own precision: not rounded at all is closer
    signed = "symmetric" if symmetric else "asymmetric"
    when = "dynamic" if dynamic else "static"
    raise UnsupportedModel(
        f"{shown(section.path)}: {section.full_name()}: activations of {kind}{bits}, {signed}, {when} by "
        f"{shown(strategy)}, are not supported with these weights; supported are int8 dynamic by token with "
        "int8 weights by channel, and fp8 dynamic by token or static by tensor with fp8 weights"
    )


# GPTQ and AWQ


_GPTQ_HARMLESS = (
    *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta"),
    *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size", "pad_token_id"),
    *("use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
    *(
        "cache_block_outputs",
        "max_input_length",
        "exllama_config",
        "use_exllama",
        "disable_exllama",
        "backend",
    ),
    *(
        "mse",
        "parallel_packing",
        "method",
        "version",
        "v2",
        "act_group_aware",
        "quantizer",
        "offload_to_disk",
    ),
)


def _gptq(section: ConfigFields) -> Quantization:
    version = section.text("checkpoint_format", section.text("format", "gptq"))
    section.raw("format")
    if version not in ("gptq", "gptq_v2"):
        raise _refused(section, "checkpoint_format", "gptq or gptq_v2")
    if section.flag("is_marlin_format", False):
        raise _refused(section, "is_marlin_format", "false")
    if section.text("pack_dtype", "int32") != "int32":
        raise _refused(section, "pack_dtype", "int32")
    how = _gptq_matrix(section, StoredMatrix(layout="gptq", bits=0, group=None, less_one=version == "gptq"))
    rules: list[tuple[Rule, StoredMatrix | None]] = []
    dynamic = section.section("dynamic")
    for pattern in dynamic.names() if dynamic is not None else ():
        assert dynamic is not None
        fits = _pattern(section, "dynamic", pattern.removeprefix("+:").removeprefix("-:"))
        if pattern.startswith("-:"):
            rules.append((fits, None))
            continue
        changed = dynamic.section(pattern)
        rules.append((fits, how if changed is None else _gptq_matrix(changed, how)))
        if changed is not None:
            changed.refuse_others(("damp_percent", "mse"))
    blocks = section.raw("modules_in_block_to_quantize")
    if blocks:
        names = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
        if not all(isinstance(name, str) for name in names):
            raise _refused(section, "modules_in_block_to_quantize", "lists of names")
        rules.append((lambda module: not any(module.endswith(f".{name}") for name in names), None))
    for name in section.texts("modules_to_not_convert") or ():
        rules.append((lambda module, name=name: name in module, None))
    rules.append((lambda _: True, how))
    has_head = section.flag("lm_head", False)
    section.refuse_others(_GPTQ_HARMLESS)
    return Quantization("gptq", tuple(rules), layers_alone=not has_head)


def _gptq_matrix(section: ConfigFields, default: StoredMatrix) -> StoredMatrix:
    bits = section.whole("bits", default=default.bits)
    if bits not in (4, 8):
        raise _refused(section, "bits", "4 or 8")
    group = _group_size(section, default.group or -1)
    return replace(
        default,
        bits=bits,
        group=group,
        zeros=not section.flag("sym", not default.zeros),
        ordered=section.flag("desc_act", default.ordered),
        scale_names=("scales",),
    )


def _awq(section: ConfigFields) -> Quantization:
    if section.text("version", "gemm").lower() != "gemm":
        raise _refused(section, "version", "gemm")
    if section.whole("bits", "w_bit", 4) != 4:
        raise _refused(section, "bits", "4")
    if not section.flag("zero_point", True):
        raise _refused(section, "zero_point", "true")
    group = _group_size(section, 128)
    how = StoredMatrix(layout="awq", bits=4, group=group, zeros=True, scale_names=("scales",))
    kept = section.texts("modules_to_not_convert") or ()
    rules = (*(((lambda module, name=name: name in module), None) for name in kept), (lambda _: True, how))
    section.refuse_others(
        (
            "quant_method",
            "backend",
            "do_fuse",
            "fuse_max_seq_len",
            "modules_to_fuse",
            "exllama_config",
            "q_group_size",
        )
    )
    return Quantization("awq", rules, layers_alone=True)


def _group_size(section: ConfigFields, default: int) -> int | None:
    size = section.whole("group_size", default=default)
    if size != -1 and not 0 < size <= _MOST_GROUP:
        raise _refused(section, "group_size", "-1 or at least 1")
    return None if size == -1 else size


# FP8 of transformers, of vLLM and of DeepSeek


def _fp8(section: ConfigFields) -> Quantization:
    section.choice("fmt", dict.fromkeys(("e4m3", "float8_e4m3fn")), "e4m3")
    scheme = section.choice("activation_scheme", {"dynamic": "", "static": "fp8 static"}, "dynamic")
    section.choice("scale_fmt", {"float": None, "ue8m0": None}, "float")
    blocks = section.numbers("weight_block_size")
    if blocks and not (len(blocks) == 2 and all(_is_size(n) for n in blocks)):
        raise _refused(section, "weight_block_size", "two whole numbers, such as [128, 128]")
    if blocks and scheme:
        raise _refused(section, "activation_scheme", "dynamic, with weight_block_size")
    group, rows = (int(blocks[1]), int(blocks[0])) if blocks else (None, None)
    dynamic: Inputs = "" if blocks else "fp8"
    how = StoredMatrix(
        layout="fp8",
        bits=8,
        group=group,
        rows=rows,
        inputs="fp8 static" if scheme else dynamic,
        scale_names=("weight_scale_inv", "weight_scale"),
    )
    kept = (*(section.texts("modules_to_not_convert") or ()), *(section.texts("ignored_layers") or ()))
    rules = (*((_is_or_holds(name), None) for name in kept), (lambda _: True, how))
    section.refuse_others(("quant_method", "dequantize"))
    return Quantization("fp8", rules, layers_alone=True)


def _is_or_holds(name: str) -> Rule:
    """A rule for a module of this name, or inside a module of this name."""
    return lambda module: f".{name}." in f".{module}."


# Patterns


def _matches(section: ConfigFields, field: str, target: str) -> Rule:
    """The rule of a target: a name, or a pattern that begins with "re:"."""
    if target.startswith("re:"):
        return _pattern(section, field, target.removeprefix("re:"))
    return lambda module: module == target


_MOST_STEPS = 1_000_000
_NAME = 60  # characters of a usual name


def _pattern(section: ConfigFields, field: str, pattern: str) -> Rule:
    """A rule by a regular expression at the beginning of a module's name.

    Raises BadModelConfig for a pattern that is none, UnsupportedModel for one that could search long.
    """
    where = f"{shown(section.path)}: {section.full_name(field)}: {shown(pattern)}"
    if _steps(pattern) > _MOST_STEPS:
        raise UnsupportedModel(f"{where} is too complex for a pattern: it has too many repeats and choices")
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadModelConfig(f"{where} is no regular expression: {error}") from error
    return lambda module: compiled.match(module) is not None


def _steps(pattern: str) -> float:
    """A bound of the ways in which a pattern can be tried on a name; infinite where groups are repeated."""
    plain = re.sub(r"\\[^1-9]", "x", pattern)  # an escaped character is one character
    plain = re.sub(r"\[\^?\]?[^]]*\]", "x", plain)  # so is a class
    if len(plain) > _MOST_STEPS or re.search(r"\)[*+{]|\\[1-9]|\(\?P=", plain):
        return math.inf
    n_repeats, n_optional = len(re.findall(r"[*+{]", plain)), len(re.findall(r"(?<![(*+?}])\?", plain))
    if n_repeats > 9 or n_optional > 20:
        return math.inf
    choices = 1
    for group in re.split(r"[()]", plain):
        choices *= group.count("|") + 1
    return _NAME**n_repeats / math.factorial(n_repeats) * 2**n_optional * choices


def _refused(fields: ConfigFields, name: str, expected: str) -> UnsupportedModel:
    found = shown(fields.raw(name))
    return UnsupportedModel(
        f"{shown(fields.path)}: {fields.full_name(name)}: expected {expected}, found {found}"
    )
