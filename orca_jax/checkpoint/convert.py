"""Converts between safetensors, Orbax and trainers' checkpoints, one parameter or array at a time."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from orca_jax.checkpoint import orbax as orbax_checkpoint
from orca_jax.checkpoint.array_view import put_into
from orca_jax.checkpoint.directory import find_parameters
from orca_jax.checkpoint.expert_view import expert_shapes, written_experts
from orca_jax.checkpoint.head_view import shape_in_file, slices_of_tensor, stored_shapes, written_tensor
from orca_jax.checkpoint.orbax import zarr_library
from orca_jax.checkpoint.rounded_tensors import quantization_section, rounded_tensors
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.checkpoint.shard_reader import Box, Parts
from orca_jax.config import FORMATS, Dtype, Format, Layout, Rounding
from orca_jax.errors import ConfigError, UnsupportedModel
from orca_jax.families.attention_config import Attention
from orca_jax.families.decoders.qwen3_ranker import LOGIT_SCORE
from orca_jax.families.family import Family
from orca_jax.families.hf_config import POOLING_FILE, hf_config_of, read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import HEAD, Parameter, attention_of, parameter_table
from orca_jax.families.quantization_config import rounded_forms
from orca_jax.families.registry import FAMILIES
from orca_jax.families.stored_name import StoredName, head_places, heads_of_tensors
from orca_jax.families.strict_json import shown
from orca_jax.families.trainers.array_form import EXPERTS, LAYERS, axis_sizes
from orca_jax.families.trainers.array_trees import TREE_FILES, has_array_tree
from orca_jax.families.trainers.easydel_config import without_easydel_fields
from orca_jax.families.trainers.layouts import ITEMS, written_names
from orca_jax.families.trainers.orca_json import ORCA_JSON, read_description
from orca_jax.gguf_file import GgufFile, is_gguf, open_gguf
from orca_jax.model_files.locate import check_is_free, find_directory
from orca_jax.model_files.weight_files import INDEX
from orca_jax.request.gguf_tokenizer import gguf_tokenizer, has_tokenizer
from orca_jax.request.tokenizer_config import MORE_TEMPLATES, read_tokenizer_config

MAX_FILE_BYTES = 5_000_000_000
_DTYPES = {"float32": np.dtype("f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("f2")}
# Tokenizer, chat templates and other descriptions of the model, such as how its embeddings are pooled.
_OTHER_FILES = ("*.json", "*.jinja", "*.txt", f"{MORE_TEMPLATES}/*.jinja", POOLING_FILE, LOGIT_SCORE)
_NOT_COPIED = {INDEX, ORCA_JSON, *TREE_FILES, "commit_success.txt"}
_DTYPE_KEYS = ("dtype", "torch_dtype")  # in config.json


def convert_checkpoint(
    source_path: str | Path,
    destination: str | Path,
    *,
    to: Format | None = None,
    dtype: Dtype | None = None,
    quantization: Rounding | None = None,
    names_file: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Format:
    """Convert a checkpoint, and return the format that it was converted to.

    Without `to` a Hugging Face checkpoint becomes Orbax with our names, and any other safetensors. A
    trainer's format has the names, shapes and place in which that trainer looks for the weights of step 0.

    The destination must be empty or not exist; it appears only when it is complete. Without `dtype` each
    parameter keeps its dtype, or is unpacked where the checkpoint is quantized. safetensors get the names and
    layout of their model type, in files of at most `max_file_bytes`. With `quantization` they are
    compressed-tensors, with the matrices of layers rounded as `LLM(quantization=...)` rounds them.
    config.json, the tokenizer and the chat template are copied. `names_file` is read in place of an Orbax
    checkpoint's orca.json. `on_bytes(done, total)` receives the progress in bytes read. The host holds one
    parameter, or one of the trainer's arrays, at a time.

    Raises ConfigError or a CheckpointError.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    if to is not None and to not in FORMATS:
        raise ConfigError(f"the format to convert to is {to!r}; it must be one of {', '.join(FORMATS)}")
    if quantization is not None and to not in (None, "safetensors"):
        raise ConfigError(f"quantization is {quantization!r}, which is written as safetensors, not as {to}")
    directory = find_directory(source_path)
    target = Path(destination).expanduser()
    if names_file is None:
        model, sources = find_parameters(directory, forms={})
    elif has_array_tree(directory):
        model, sources = orbax_checkpoint.find_parameters(directory, forms={}, orca_json=Path(names_file))
    else:
        raise ConfigError(f"{shown(directory)} is no Orbax checkpoint, and so takes no file of names")
    parts = {name: one for name, one in sources.items() if isinstance(one, Parts)}
    assert parts.keys() == sources.keys(), "sources of dense weights are Parts"
    if to is None:
        alone = has_array_tree(directory) or is_gguf(directory) or quantization is not None
        to = "safetensors" if alone else "orbax"
    arrays = None if to in ("safetensors", "orbax") else _TrainersArrays(model, to)
    table = parameter_table(model)
    dtypes = {
        name: table[name].dense_dtype(_DTYPES[dtype]) if dtype else _stored_dtype(parts[name])
        for name in table
    }
    reader = _Reader(parts, table, dtypes, on_bytes)
    try:
        check_is_free(target)
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", dir=target.absolute().parent, ignore_cleanup_errors=True
        ) as work:
            place = Path(work) / target.name
            config = _config_json(directory, model)
            if arrays is not None:
                names, apart = arrays.contents, arrays.axes_apart
                read = partial(arrays.read, reader=reader, dtypes=dtypes)
                step, _, item = ITEMS[arrays.layout].partition("/")
                if arrays.layout in ("levanter", "easydel"):
                    index = arrays.layout == "easydel"
                    zarr_library().write(place / step, names, read, apart=apart, index=index)
                else:
                    orbax_checkpoint.write(
                        place / step, names, read, apart=apart, nested=True, item=item or None
                    )
            elif to == "orbax":
                apart = {name: parameter.counting_axes for name, parameter in table.items()}
                orbax_checkpoint.write(place, table, reader.whole, apart=apart)
            else:
                place.mkdir()
                family = FAMILIES[config["model_type"]]
                tensors = [*_tensors({name: table[name] for name in parts}, model, family, dtypes, reader)]
                if quantization is not None:
                    tensors, config["quantization_config"] = _rounded(tensors, model, family, quantization)
                write_files(place, tensors, max_file_bytes)
            _copy_other_files(directory, place)
            for key in _DTYPE_KEYS:
                if dtype is not None and key in config:
                    config[key] = dtype
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            (place / "config.json").write_text(text, encoding="utf-8")
            place.replace(target)
    except OSError as error:
        raise ConfigError(f"{shown(target)} cannot be written: {error.strerror}") from error
    return to


def _rounded(
    tensors: Sequence[Tensor], model: ModelConfig, family: Family, to: Rounding
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of a checkpoint with its matrices rounded, and its quantization_config.

    Raises ConfigError, or UnsupportedModel for a model whose matrices are not linear layers of their own.
    """
    forms = rounded_forms(model, to)
    stored = {name: family.stored_name(name, family.prefixes[0], model) for name in parameter_table(model)}
    for name in forms:
        if stored[name].transpose or stored[name].by_expert:
            raise UnsupportedModel(
                f"{stored[name].names[0]} is not the matrix of a linear layer, as compressed-tensors needs "
                f"it; LLM(quantization={to!r}) rounds it as it is loaded"
            )
    rounded = {tensor for name in forms for tensor in stored[name].names}
    others = (name for name, one in parameter_table(model).items() if one.use in ("linear", "expert", "head"))
    ignored = {tensor for name in others for tensor in stored[name].names} - rounded
    ignored |= set(stored.get(HEAD, family.stored_name(HEAD, family.prefixes[0], model)).names)
    written: list[Tensor] = []
    for tensor in tensors:
        written += rounded_tensors(tensor, to) if tensor.name in rounded else [tensor]
    modules = (name.removesuffix(".weight") for name in ignored)
    return written, quantization_section(to, modules)


def _config_json(directory: Path, model: ModelConfig) -> dict[str, Any]:
    """The source's config.json, or one made of its orca.json or metadata; without quantisation."""
    of_its_own = has_array_tree(directory) and read_description(directory).path.name == ORCA_JSON
    if of_its_own or is_gguf(directory):
        return hf_config_of(model)
    hf_config = read_hf_config(directory)
    values = json.loads(hf_config.path.read_text(encoding="utf-8"))
    values = without_easydel_fields(values)
    return {name: value for name, value in values.items() if name != "quantization_config"}


def _stored_dtype(parts: Parts) -> np.dtype:
    """The dtype in which a parameter is stored; float32 if its tensors differ."""
    elements = {tensor.element for tensor in parts.tensors}
    return elements.pop() if len(elements) == 1 else _DTYPES["float32"]


class _Reader:
    """Reads parameters, and reports the bytes read."""

    def __init__(
        self,
        parts: dict[str, Parts],
        table: dict[str, Parameter],
        dtypes: dict[str, np.dtype],
        on_bytes: Callable[[int, int], None] | None,
    ) -> None:
        self._parts, self._table, self._dtypes, self._on_bytes = parts, table, dtypes, on_bytes
        self._done = 0
        self._total = sum(
            parts[name].n_bytes(parameter.shape, _all(parameter.shape)) for name, parameter in table.items()
        )

    def whole(self, name: str) -> np.ndarray:
        """Read a whole parameter."""
        shape = self._table[name].shape
        return self._counted(name, shape, _all(shape))

    def row(self, name: str) -> np.ndarray:
        """Read a whole vector as a matrix of one row."""
        return self.whole(name)[None]

    def number(self, name: str, index: int) -> np.ndarray:
        """Read an element of a vector as an array without axes."""
        return self._counted(name, self._table[name].shape, ((index, index + 1),)).reshape(())

    def depthwise(self, name: str) -> np.ndarray:
        """Read a convolution of each channel alone, [C, W], as [C, 1, W]."""
        return self.whole(name)[:, None]

    def rows(self, name: str, first: int, end: int, *, transpose: bool) -> np.ndarray:
        """Read rows of a parameter whose leading axes are merged; `transpose` transposes the result."""
        shape = self._table[name].stacked_shape
        values = self._counted(name, shape, ((first, end), *_all(shape[1:])))
        return values.T if transpose else values

    def experts(self, name: str, wanted: StoredName) -> np.ndarray:
        """Make a checkpoint's tensor of all experts."""
        return written_experts(self.whole(name), wanted)

    def of_experts(self, name: str, index: int, n_arrays: int) -> np.ndarray:
        """Read what one of a trainer's arrays has of all experts: the whole, or gate or up alone."""
        shape = self._table[name].shape
        number, *others = _all(shape)
        box = (number, (index, index + 1), *others[1:]) if n_arrays > 1 else (number, *others)
        return self._counted(name, shape, box)

    def heads(self, name: str, tensor: int, wanted: StoredName, attention: Attention) -> np.ndarray:
        """Make a checkpoint's tensor with heads from a parameter's slices."""
        assert wanted.heads is not None
        places, parameter = head_places(wanted.heads, attention), self._table[name]
        n_heads = heads_of_tensors(wanted.heads, attention)[tensor]
        first, end = slices_of_tensor(places, tensor)
        if parameter.takes_attention:
            whole = self._counted(name, parameter.shape, _all(parameter.shape))
            slices = np.moveaxis(whole.reshape(len(whole), len(places), -1), 0, -1)
            values = written_tensor(slices, 0, places, tensor, n_heads)
            return values if wanted.transpose else values.T
        box = _all(parameter.shape)
        if len(places) > 1:
            box = ((first, end), *box[1:])
        values = self._counted(name, parameter.shape, box)
        slices = values if len(places) > 1 else values[None].reshape(1, -1, *parameter.stacked_shape[1:])
        values = written_tensor(slices, first, places, tensor, n_heads)
        return values.T if wanted.transpose else values

    def _counted(self, name: str, shape: tuple[int, ...], box: Box) -> np.ndarray:
        values = self._parts[name].read(shape, self._dtypes[name], box)
        self._done += self._parts[name].n_bytes(shape, box)
        if self._on_bytes is not None:
            self._on_bytes(self._done, self._total)
        return values


class _TrainersArrays:
    """The arrays of a trainer's checkpoint, and the weights or parts of weights in each."""

    def __init__(self, model: ModelConfig, layout: Layout) -> None:
        self.layout: Layout = layout
        self.contents: dict[str, list[tuple[str, int]]] = {}  # weights, and which of their tensors
        self._model, self._table = model, parameter_table(model)
        self._names = written_names(model, layout)
        for name, stored in self._names.items():
            for i, array in enumerate(stored.names):
                self.contents.setdefault(array, []).append((name, i))

    @property
    def axes_apart(self) -> dict[str, tuple[int, ...]]:
        """The axes of layers and of experts in each array."""
        forms = {array: self._names[name].forms[i] for array, ((name, i), *_) in self.contents.items()}
        return {
            array: tuple(i for i, letter in enumerate(form.letters) if letter in (LAYERS, EXPERTS))
            for array, form in forms.items()
        }

    def read(self, array: str, reader: _Reader, dtypes: dict[str, np.dtype]) -> np.ndarray:
        """Make a whole array from our weights, in the dtype of the first one."""
        contents = self.contents[array]
        first, i = contents[0]
        shape = self._names[first].forms[i].shape(axis_sizes(self._model, first))
        target = np.empty(shape, dtypes[first])
        for name, i in contents:
            stored, parameter = self._names[name], self._table[name]
            if parameter.axes[0] == EXPERTS:
                values = reader.of_experts(name, i, len(stored.names))
            elif stored.heads is None:
                n_rows = parameter.stacked_shape[0] // len(stored.names)
                values = reader.rows(name, i * n_rows, (i + 1) * n_rows, transpose=False)
            else:
                values = reader.heads(name, i, stored, attention_of(self._model, name))
            form = stored.forms[i].fitting(shape, axis_sizes(self._model, name))
            put_into(target, values, form, parameter)
        return target


def _all(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def _tensors(
    table: dict[str, Parameter],
    model: ModelConfig,
    family: Family,
    dtypes: dict[str, np.dtype],
    reader: _Reader,
) -> Iterator[Tensor]:
    """Yield the Hugging Face tensors of all parameters, in the parameters' order."""
    written = set[str]()
    for name, parameter in table.items():
        attention = attention_of(model, name)
        wanted = family.stored_name(name, family.prefixes[0], model)
        if wanted.by_expert:
            (tensor,), (shape,) = wanted.names, expert_shapes(parameter, wanted)
            yield Tensor(tensor, shape, dtypes[name], partial(reader.experts, name, wanted))
            continue
        shapes = stored_shapes(parameter, wanted, attention)
        if not written.isdisjoint(wanted.names):
            continue  # T5's layers share one tensor
        written |= set(wanted.names)
        n_rows = parameter.stacked_shape[0] // len(wanted.names)
        for i, (tensor, shape) in enumerate(zip(wanted.names, shapes, strict=True)):
            if wanted.one_row:
                read = partial(reader.row, name)
            elif not shape:
                read = partial(reader.number, name, i)
            elif wanted.depthwise:
                read = partial(reader.depthwise, name)
            elif wanted.heads is None:
                read = partial(reader.rows, name, i * n_rows, (i + 1) * n_rows, transpose=wanted.transpose)
            else:
                read = partial(reader.heads, name, i, wanted, attention)
            yield Tensor(tensor, shape_in_file(shape, wanted), dtypes[name], read)


def _copy_other_files(directory: Path, place: Path) -> None:
    if is_gguf(directory):
        _write_text_files(open_gguf(directory), place)
        return
    for pattern in _OTHER_FILES:
        for path in sorted(directory.glob(pattern)):
            if path.is_file() and path.name not in _NOT_COPIED:
                copy = place / path.relative_to(directory)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def _write_text_files(file: GgufFile, place: Path) -> None:
    """Write the tokenizer and the chat templates of a GGUF file, if it has them."""
    if not has_tokenizer(file):
        return
    gguf_tokenizer(file).save(str(place / "tokenizer.json"))
    config = read_tokenizer_config(file.path)
    values: dict[str, Any] = {**config.special_tokens}
    if config.chat_template is not None:
        values["chat_template"] = config.chat_template
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (place / "tokenizer_config.json").write_text(text, encoding="utf-8")
