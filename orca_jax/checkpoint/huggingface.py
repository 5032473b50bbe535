"""Finds a Hugging Face directory's tensors, in one or several files, and matches them to our parameters."""

import os.path
import re
from dataclasses import replace
from pathlib import Path

from orca_jax.checkpoint.expert_view import expert_shapes, parts_of_experts
from orca_jax.checkpoint.head_view import HeadView, stored_shapes
from orca_jax.checkpoint.safetensors_reader import (
    BYTES,
    FLOAT_DTYPES,
    FP8,
    StoredTensor,
    read_header,
    same_values,
)
from orca_jax.checkpoint.shard_reader import BLOCK, BlockScaled, ComputedArray, Parts, Stored
from orca_jax.errors import (
    BadModelConfig,
    CheckpointError,
    CorruptFile,
    NotACheckpoint,
    TensorMismatch,
    UnsafeFile,
)
from orca_jax.families.hf_config import HFConfig
from orca_jax.families.parameters import ENCODER, HEAD, TOKEN_EMBEDDING, layers_with, parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import read_object, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_SCALES = "_scale_inv"  # after the name of a matrix in FP8
_MAX_INDEX_BYTES = 100_000_000
_FILE_NAME = re.compile(r"[\w][\w.-]*\.safetensors", re.ASCII)


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint by name, from the single file or from all files in the index."""
    single, index = directory / SINGLE, directory / INDEX
    if os.path.exists(single):  # unlike Path.exists, never raises
        return read_header(single)
    if os.path.exists(index):
        return _indexed(directory, index)
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise NotACheckpoint(f"{shown(directory)} cannot be read: {error.strerror}") from error
    pickles = [path for path in paths if path.suffix in PICKLES]
    others = [path for path in paths if path.suffix == ".safetensors"]
    if pickles and not others:
        raise refuse_pickle(pickles[0])
    hint = f"; it has {', '.join(shown(path.name) for path in others[:3])}, but no index" if others else ""
    raise NotACheckpoint(
        f"{shown(directory)} has neither model.safetensors nor model.safetensors.index.json{hint}"
    )


def refuse_pickle(path: Path) -> UnsafeFile:
    """The error for a pickle, which says what to do instead."""
    return UnsafeFile(
        f"{shown(path)} is a pickle: loading it can run any code, so only safetensors files are read. If you "
        "trust it, load it with transformers and save it with save_pretrained, which writes safetensors"
    )


def _indexed(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(
            f"{shown(index)}: weight_map: expected an object of tensor and file names, "
            f"found {shown(weight_map)}"
        )
    for name, file in weight_map.items():
        # Only a file name, so that no index can point outside its directory.
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
                f"{shown(directory / file)} is missing; according to {shown(index)} it holds {n} tensors"
            )
        for name, tensor in read_header(directory / file).items():
            if weight_map.get(name) != file:
                raise TensorMismatch(f"{tensor}: {shown(index)} puts it in {shown(weight_map.get(name))}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise TensorMismatch(
                f"{shown(directory / file)}: tensor '{shown(name)}' is missing; {shown(index)} puts it there"
            )
    return tensors


def match(hf_config: HFConfig, stored: dict[str, StoredTensor]) -> dict[str, Parts]:
    """The tensors of each parameter; all must be present with the right shape and dtype, and none left over.

    Raises TensorMismatch or BadModelConfig.
    """
    if not stored:
        raise TensorMismatch(f"the safetensors files next to {shown(hf_config.path)} hold no tensors")
    family = hf_config.family
    prefix = next(
        (
            prefix
            for prefix in family.prefixes
            if family.stored_name(TOKEN_EMBEDDING, prefix, hf_config.model, stored).names[0] in stored
        ),
        family.prefixes[0],
    )
    (head,) = family.stored_name(HEAD, prefix, hf_config.model, stored).names
    found: dict[str, list[StoredTensor]] = {}
    parts: dict[str, Parts] = {}
    for name, parameter in parameter_table(hf_config.model).items():
        wanted = family.stored_name(name, prefix, hf_config.model, stored)
        if name in family.computed and wanted.names[0] not in stored:
            parts[name] = Parts((ComputedArray(name, family.computed[name](hf_config.model)),))
            continue
        attention = hf_config.model.attention
        if wanted.by_expert:
            shapes, dtypes = expert_shapes(parameter, wanted), (BYTES,) if wanted.mxfp4 else (*FLOAT_DTYPES,)
            found[name] = _of_shapes(hf_config, stored, wanted, shapes, dtypes)
            parts[name] = parts_of_experts(found[name], parameter, wanted)
            continue
        shapes = stored_shapes(parameter, wanted, attention)
        dtypes = (*FLOAT_DTYPES, *((FP8,) if "fp8" in family.quantized and len(shapes[0]) == 2 else ()))
        found[name] = _of_shapes(hf_config, stored, wanted, shapes, dtypes)
        matrices = [_unpacked(tensor, stored) for tensor in found[name]]
        if wanted.heads is None:
            parts[name] = Parts(tuple(matrices), wanted.transpose)
        else:
            parts[name] = Parts((HeadView.of(matrices, parameter, wanted, attention),))
    used = {tensor.name for tensors in found.values() for tensor in tensors}
    used |= {tensor.name + _SCALES for tensors in found.values() for tensor in tensors if tensor.dtype == FP8}
    left = [
        tensor
        for name, tensor in stored.items()
        if name not in used
        and not family.is_buffer(name, prefix)
        and not family.is_further(name, prefix, stored, hf_config.model.n_layers)
    ]
    for tensor in left:
        embedding = found[TOKEN_EMBEDDING][0]
        if family.is_copy(tensor.name, prefix):
            if not same_values(tensor, embedding):
                raise TensorMismatch(
                    f"{tensor} differs from '{shown(embedding.name)}', of which it is a copy"
                )
            continue
        if tensor.name != head or not hf_config.model.embedding.tied:
            raise _left_over(hf_config, tensor, prefix, len(left))
        if tensor.dtype != embedding.dtype or not same_values(tensor, embedding):
            raise BadModelConfig(
                f"two files disagree: {shown(hf_config.path)} sets tie_word_embeddings to true, but {tensor} "
                f"differs from '{shown(embedding.name)}'; set it to false to use the separate head"
            )
    return parts


def _of_shapes(
    hf_config: HFConfig,
    stored: dict[str, StoredTensor],
    wanted: StoredName,
    shapes: list[tuple[int, ...]],
    dtypes: tuple[str, ...] = tuple(FLOAT_DTYPES),
) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    for name, shape in zip(wanted.names, shapes, strict=True):
        if name not in stored:
            files = sorted({shown(tensor.file) for tensor in stored.values()})
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise TensorMismatch(
                f"{files[0]}{more}: tensor {name!r} is missing: expected {list(shape)} "
                f"according to {shown(hf_config.path)}, found none"
            )
        tensor = stored[name]
        matrix = shape
        if wanted.one_row:
            shape = (1, *shape)
        if tensor.shape != shape:
            raise TensorMismatch(
                f"{tensor}: expected shape {list(shape)} according to {shown(hf_config.path)}, "
                f"found {shown(list(tensor.shape))}"
            )
        if tensor.dtype not in dtypes:
            hint = "; quantized weights are not supported" if tensor.dtype not in FLOAT_DTYPES else ""
            raise TensorMismatch(f"{tensor}: expected dtype {', '.join(dtypes)}, found {tensor.dtype}{hint}")
        tensors.append(tensor if shape == matrix else replace(tensor, shape=matrix))
    return tensors


def _unpacked(tensor: StoredTensor, stored: dict[str, StoredTensor]) -> Stored:
    """A matrix in FP8 with the scales of its blocks; any other tensor as it is. Raises TensorMismatch."""
    if tensor.dtype != FP8:
        return tensor
    name, shape = tensor.name + _SCALES, tuple(-(-n // BLOCK) for n in tensor.shape)
    scales = stored.get(name)
    if scales is None or (scales.dtype, scales.shape) != ("F32", shape):
        found = "none" if scales is None else f"{scales.dtype} {shown(list(scales.shape))}"
        raise TensorMismatch(
            f"{tensor}: FP8 in blocks of {BLOCK} by {BLOCK}: expected '{shown(name)}' of dtype F32 and shape "
            f"{list(shape)}, found {found}"
        )
    return BlockScaled(tensor, scales)


def _left_over(hf_config: HFConfig, tensor: StoredTensor, prefix: str, n: int) -> CheckpointError:
    """The error for an unused tensor: ignoring it would compute another model than the saved one."""
    weight, layer = hf_config.family.layer_of(tensor.name, prefix) or ("", -1)
    n_layers = len(layers_with(hf_config.model, weight))
    if layer >= n_layers:
        of = (
            ""
            if hf_config.model.encoder is None
            else "encoder "
            if weight.startswith(ENCODER)
            else "decoder "
        )
        return BadModelConfig(
            f"two files disagree: {shown(hf_config.path)} has {n_layers} {of}layers, but "
            f"{tensor} belongs to layer {layer}, counted from 0"
        )
    more = f" ({n} such tensors)" if n > 1 else ""
    return TensorMismatch(
        f"{tensor}{more}: expected no such tensor according to {shown(hf_config.path)}, found {tensor.dtype} "
        f"{shown(list(tensor.shape))}; a model with this tensor computes something else"
    )
