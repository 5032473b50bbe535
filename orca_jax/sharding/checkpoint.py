"""Checkpoints: a Hugging Face directory of GPT-2 or OPT becomes named parameters on the device.

Only JSON and safetensors are opened. All that the files say of themselves and of each other is checked
before the first weight is read; then one parameter at a time goes from the disk to the device, so that the
host holds one parameter more than what is placed.
"""

import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from huggingface_hub import snapshot_download
from jax.typing import DTypeLike

from orca_jax.config import ModelConfig
from orca_jax.errors import (
    BadModelConfig,
    CheckpointError,
    ConfigError,
    CorruptFile,
    NotACheckpoint,
    TensorMismatch,
    UnsafeFile,
)
from orca_jax.model.gpt import parameter_shapes
from orca_jax.sharding.hf_config import HFConfig, read_hf_config
from orca_jax.sharding.safetensors_file import (
    FLOAT_DTYPES,
    StoredTensor,
    read_header,
    read_tensor,
    same_values,
)
from orca_jax.sharding.strict_json import read_object, shown
from orca_jax.sharding.tensor_names import HEAD, PREFIXES, Source, is_buffer, layer_number, source

_MAX_INDEX_BYTES = 100_000_000
_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16))
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_NAME = re.compile(r"[\w][\w.-]*\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on the device: `parameters` are those of `orca_jax.model.gpt.parameter_shapes(config)`."""

    config: ModelConfig
    parameters: dict[str, jax.Array]
    directory: Path


def load_checkpoint(
    path_or_name: str | Path,
    *,
    dtype: DTypeLike,
    vocab_multiple: int = 1,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Read a checkpoint and put its parameters onto the default device.

    `path_or_name` is a directory with config.json and either model.safetensors or
    model.safetensors.index.json and its files (where both are there the single file is read, as transformers
    does), or a name on the Hugging Face hub. `dtype` is float32, bfloat16 or float16; what is stored is
    converted. `vocab_multiple` pads the vocabulary's rows with zeros (ModelConfig). `on_bytes(done, total)`
    is told the progress in bytes of the files.

    Raises a CheckpointError: NotACheckpoint, UnsafeFile, CorruptFile, BadModelConfig, UnsupportedModel or
    TensorMismatch; ConfigError where `dtype` is none of the three.
    """
    target = np.dtype(dtype)
    if target not in _DTYPES:
        raise ConfigError(f"dtype is {target.name}; it must be float32, bfloat16 or float16")
    directory = find_directory(path_or_name)
    hf_config = read_hf_config(directory)
    config = replace(hf_config.model, vocab_multiple=vocab_multiple)
    stored = find_tensors(directory)
    parts = _match(hf_config, config, stored)

    total = sum(tensor.n_bytes for _, tensors in parts.values() for tensor in tensors)
    done = 0
    parameters: dict[str, jax.Array] = {}
    for name, shape in parameter_shapes(config).items():
        transpose, tensors = parts[name]
        parameters[name] = jax.block_until_ready(jax.device_put(_assemble(shape, target, tensors, transpose)))
        done += sum(tensor.n_bytes for tensor in tensors)
        if on_bytes is not None:
            on_bytes(done, total)
    return Checkpoint(config, parameters, directory)


def find_directory(path_or_name: str | Path) -> Path:
    """The directory of that name, or else a download from the hub, of JSON and safetensors alone."""
    path = Path(path_or_name).expanduser()
    try:
        if path.is_dir():
            return path
        is_file = path.exists()
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error}") from error
    if is_file:
        if path.suffix in _PICKLES:
            raise _unsafe(path)
        raise NotACheckpoint(f"{shown(path)} is a file; name the directory that holds config.json")
    name = str(path_or_name)
    if not _HUB_NAME.fullmatch(name):
        raise NotACheckpoint(f"there is no directory {shown(name)}")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub's client raises its own, the network's, and the disk's
        raise NotACheckpoint(
            f"there is no directory {shown(name)}, and the Hugging Face hub gave no model of that name: "
            f"{type(error).__name__}: {shown(str(error))}"
        ) from error


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its name, from one file or from all that the index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if os.path.exists(single):  # which, unlike Path.exists, raises nothing
        return read_header(single)
    if os.path.exists(index):
        return _indexed(directory, index)
    try:
        found = sorted(directory.iterdir())
    except OSError as error:
        raise NotACheckpoint(f"{shown(directory)} cannot be read: {error.strerror}") from error
    pickles = [path for path in found if path.suffix in _PICKLES]
    others = [path for path in found if path.suffix == ".safetensors"]
    if pickles and not others:
        raise _unsafe(pickles[0])
    hint = f"; it has {', '.join(shown(path.name) for path in others[:3])}, but no index" if others else ""
    raise NotACheckpoint(
        f"{shown(directory)} has neither model.safetensors nor model.safetensors.index.json{hint}"
    )


def _unsafe(path: Path) -> UnsafeFile:
    return UnsafeFile(
        f"{shown(path)} is a pickle: reading one can run any code, so only safetensors is read. Where you "
        "trust it, load it with transformers and save it again with save_pretrained, which writes safetensors"
    )


def _indexed(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(
            f"{shown(index)}: weight_map: expected an object of tensor and file names, "
            f"found {shown(weight_map)}"
        )
    for name, file in weight_map.items():
        # A name alone, so that no index can lead out of its directory.
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CorruptFile(
                f"{shown(index)}: tensor '{shown(name)}': expected the name of a .safetensors file in "
                f"the same directory, found {shown(file)}"
            )
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not os.path.exists(directory / file):
            n = sum(value == file for value in weight_map.values())
            raise NotACheckpoint(
                f"{shown(directory / file)} is missing; by {shown(index)} it holds {n} tensors"
            )
        for name, tensor in read_header(directory / file).items():
            if weight_map.get(name) != file:
                raise TensorMismatch(f"{tensor}: {shown(index)} has it in {shown(weight_map.get(name))}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise TensorMismatch(
                f"{shown(directory / file)}: tensor '{shown(name)}' is missing; {shown(index)} has it there"
            )
    return tensors


def _match(
    hf_config: HFConfig, config: ModelConfig, stored: dict[str, StoredTensor]
) -> dict[str, tuple[bool, list[StoredTensor]]]:
    """For each parameter the tensors it is made of, all there and of the right kind, and none left over."""
    if not stored:
        raise TensorMismatch(f"the files beside {shown(hf_config.path)} hold no tensor at all")
    model_type = hf_config.model_type
    prefix = next(
        (
            prefix
            for prefix in PREFIXES[model_type]
            if source("token_embedding", model_type, prefix).names[0] in stored
        ),
        PREFIXES[model_type][0],
    )
    shapes = parameter_shapes(replace(config, vocab_multiple=1))
    parts: dict[str, tuple[bool, list[StoredTensor]]] = {}
    for parameter, shape in shapes.items():
        wanted = source(parameter, model_type, prefix)
        part = (shape[0] // len(wanted.names), *shape[1:])
        parts[parameter] = (wanted.transpose, _of_shape(hf_config, stored, wanted, part))
    used = {tensor.name for _, tensors in parts.values() for tensor in tensors}
    left = [
        tensor
        for name, tensor in stored.items()
        if name not in used and not is_buffer(name, model_type, prefix)
    ]
    for tensor in left:
        embedding = parts["token_embedding"][1][0]
        if tensor.name != HEAD or not config.tie_embeddings:
            raise _left_over(hf_config, tensor, prefix, len(left))
        if tensor.dtype != embedding.dtype or not same_values(tensor, embedding):
            raise BadModelConfig(
                f"two files disagree: {shown(hf_config.path)} says tie_word_embeddings true, {tensor} "
                f"differs from '{shown(embedding.name)}'; say false in the former if the head is meant"
            )
    return parts


def _of_shape(
    hf_config: HFConfig, stored: dict[str, StoredTensor], wanted: Source, shape: tuple[int, ...]
) -> list[StoredTensor]:
    shape = tuple(reversed(shape)) if wanted.transpose else shape
    tensors: list[StoredTensor] = []
    for name in wanted.names:
        if name not in stored:
            files = sorted({shown(tensor.file) for tensor in stored.values()})
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise TensorMismatch(
                f"{files[0]}{more}: tensor {name!r} is missing: expected {list(shape)} "
                f"by {shown(hf_config.path)}, found none"
            )
        tensor = stored[name]
        if tensor.shape != shape:
            raise TensorMismatch(
                f"{tensor}: expected shape {list(shape)} by {shown(hf_config.path)}, "
                f"found {shown(list(tensor.shape))}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise TensorMismatch(
                f"{tensor}: expected dtype {', '.join(FLOAT_DTYPES)}, found {tensor.dtype}; "
                "quantized weights are not supported"
            )
        tensors.append(tensor)
    return tensors


def _left_over(hf_config: HFConfig, tensor: StoredTensor, prefix: str, n: int) -> CheckpointError:
    """A tensor that nothing uses would mean computing another model than the one that was saved."""
    layer = layer_number(tensor.name, hf_config.model_type, prefix)
    if layer is not None and layer >= hf_config.model.n_layers:
        return BadModelConfig(
            f"two files disagree: {shown(hf_config.path)} says {hf_config.model.n_layers} layers, "
            f"{tensor} belongs to layer {layer}, counted from 0"
        )
    more = f" ({n} such tensors)" if n > 1 else ""
    return TensorMismatch(
        f"{tensor}{more}: expected no such tensor by {shown(hf_config.path)}, found {tensor.dtype} "
        f"{shown(list(tensor.shape))}; a model that has it computes something else"
    )


def _assemble(
    shape: tuple[int, ...], dtype: np.dtype, tensors: list[StoredTensor], transpose: bool
) -> np.ndarray:
    """One parameter [shape] on the host, its tensors one above the other; rows beyond them are zero."""
    out = np.empty(shape, dtype)
    row = 0
    for tensor in tensors:
        n_rows = tensor.shape[-1] if transpose else tensor.shape[0]
        read_tensor(tensor, out[row : row + n_rows], transpose=transpose)
        row += n_rows
    out[row:] = 0
    return out
