"""Finds a Hugging Face directory's tensors, in one or several files, and matches them to our parameters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orca_jax.checkpoint.expert_view import expert_shapes, source_of_experts
from orca_jax.checkpoint.head_view import HeadView, shape_in_file, stored_shapes
from orca_jax.checkpoint.packed_safetensors import PackedMatrix, planes, stored_form
from orca_jax.checkpoint.safetensors_reader import (
    BYTES,
    FLOAT_DTYPES,
    WHOLE_NUMBERS,
    StoredTensor,
    read_header,
    same_values,
)
from orca_jax.checkpoint.shard_reader import ComputedArray, Parts, Source
from orca_jax.errors import (
    BadModelConfig,
    CheckpointError,
    TensorMismatch,
)
from orca_jax.families.hf_config import HFConfig
from orca_jax.families.parameters import (
    ENCODER,
    HEAD,
    TOKEN_EMBEDDING,
    Parameter,
    attention_of,
    layers_with,
    parameter_table,
)
from orca_jax.families.stored_name import StoredName
from orca_jax.families.strict_json import shown
from orca_jax.families.weight_form import Dense
from orca_jax.model_files.weight_files import find_weight_files


def find_tensors(
    directory: Path, may_be_unlisted: Callable[[str], bool] = lambda _: False
) -> dict[str, StoredTensor]:
    """Find all tensors of the checkpoint by name, in the single file or in all files of the index.

    An unlisted tensor of a file is left out if it `may_be_unlisted` by its name, such as rotary frequencies
    that an old trainer saved. Any other raises TensorMismatch.
    """
    files = find_weight_files(directory)
    if files.index is None:
        return read_header(files.paths[0])
    index, file_of = shown(files.index), files.file_of
    tensors: dict[str, StoredTensor] = {}
    for path in files.paths:
        for name, tensor in read_header(path).items():
            if name not in file_of and may_be_unlisted(name):
                continue
            if file_of.get(name) != path.name:
                raise TensorMismatch(f"{tensor}: {index} puts it in {shown(file_of.get(name))}")
            tensors[name] = tensor
    for name, file in file_of.items():
        if name not in tensors:
            raise TensorMismatch(
                f"{shown(directory / file)}: tensor '{shown(name)}' is missing; {index} puts it there"
            )
    return tensors


def match(hf_config: HFConfig, stored: dict[str, StoredTensor]) -> dict[str, Source]:
    """Match tensors to parameters; all must be present with the right shape and dtype, and none left over.

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
    used = set[str]()
    parts: dict[str, Source] = {}
    for name, parameter in parameter_table(hf_config.model).items():
        wanted = family.stored_name(name, prefix, hf_config.model, stored)
        if name in family.computed and wanted.names[0] not in stored:
            parts[name] = Parts((ComputedArray(name, family.computed[name](hf_config.model)),))
            continue
        attention = attention_of(hf_config.model, name)
        if wanted.by_expert:
            shapes, dtypes = expert_shapes(parameter, wanted), (BYTES,) if wanted.mxfp4 else (*FLOAT_DTYPES,)
            of_experts = _of_shapes(hf_config, stored, wanted, shapes, dtypes)
            used |= {tensor.name for tensor in of_experts}
            parts[name] = source_of_experts(of_experts, parameter, wanted)
            continue
        shapes = stored_shapes(parameter, wanted, attention)
        tensors = [
            _tensor(hf_config, stored, replace(wanted, names=(tensor,)), shape, parameter)
            for tensor, shape in zip(wanted.names, shapes, strict=True)
        ]
        for tensor in tensors:
            used |= tensor.names if isinstance(tensor, PackedMatrix) else {tensor.name}
        if not isinstance(parameter.form, Dense) and parameter.form == stored_form(tensors, parameter):
            parts[name] = planes(tensors, parameter, wanted, attention)
            continue
        matrices = [tensor.dense() if isinstance(tensor, PackedMatrix) else tensor for tensor in tensors]
        transpose = wanted.transpose and isinstance(tensors[0], StoredTensor)
        if wanted.heads is None:
            parts[name] = Parts(tuple(matrices), transpose)
        else:
            as_stored = replace(wanted, transpose=transpose)
            parts[name] = Parts((HeadView.of(matrices, parameter, as_stored, attention),))
    left = [
        tensor
        for name, tensor in stored.items()
        if name not in used
        and not family.is_buffer(name, prefix)
        and not family.is_of_other_part(name)
        and not family.is_further(name, prefix, stored, hf_config.model.n_layers)
    ]
    # A head may share the embedding of the model that it drafts for.
    embedding = stored.get(family.stored_name(TOKEN_EMBEDDING, prefix, hf_config.model, stored).names[0])
    for tensor in left:
        if embedding is None:
            raise _left_over(hf_config, tensor, prefix, len(left))
        if family.is_copy(tensor.name, prefix):
            if not same_values(tensor, embedding):
                raise TensorMismatch(
                    f"{tensor} differs from '{shown(embedding.name)}', but must be a copy of it"
                )
            continue
        if tensor.name == head and hf_config.model.only_pools and not hf_config.model.is_bidirectional:
            continue  # which nothing reads
        if tensor.name != head or not hf_config.model.embedding.tied:
            raise _left_over(hf_config, tensor, prefix, len(left))
        if not same_values(tensor, embedding):
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
        expected = shape_in_file(shape, wanted)
        if tensor.shape != expected:
            raise TensorMismatch(
                f"{tensor}: expected shape {list(expected)} according to {shown(hf_config.path)}, "
                f"found {shown(list(tensor.shape))}"
            )
        if tensor.dtype not in dtypes:
            hint = "; quantized weights are not supported" if tensor.dtype not in FLOAT_DTYPES else ""
            raise TensorMismatch(f"{tensor}: expected dtype {', '.join(dtypes)}, found {tensor.dtype}{hint}")
        matrix = shape or (1,)  # a scalar is read as a vector
        tensors.append(tensor if tensor.shape == matrix else replace(tensor, shape=matrix))
    return tensors


def _tensor(
    hf_config: HFConfig,
    stored: dict[str, StoredTensor],
    wanted: StoredName,
    shape: tuple[int, ...],
    parameter: Parameter,
) -> StoredTensor | PackedMatrix:
    """The tensor, or the tensors of the quantized matrix, of this shape. Raises TensorMismatch.

    Methods that do not list the layers that they left alone, such as routers, have float tensors for them.
    """
    (name,) = wanted.names
    module, _, leaf = name.rpartition(".")
    quantization = hf_config.quantization
    if quantization is not None and leaf == "weight" and len(shape) == 2:
        how = quantization.of(module)
        is_float = name in stored and stored[name].dtype in FLOAT_DTYPES
        if how is not None and not is_float:
            n_out, n_in = shape[::-1] if wanted.transpose else shape
            return PackedMatrix.find(module, how, (n_out, n_in), stored, quantization.scales)
        if how is not None and not isinstance(parameter.form, Dense):
            raise TensorMismatch(
                f"{stored[name]} is not quantized, but quantization_config says that {shown(module)} is"
            )
    dtypes = WHOLE_NUMBERS if wanted.whole_numbers else (*FLOAT_DTYPES,)
    return _of_shapes(hf_config, stored, wanted, [shape], dtypes)[0]


def _left_over(hf_config: HFConfig, tensor: StoredTensor, prefix: str, n: int) -> CheckpointError:
    """The error for an unused tensor: without it another model than the saved one would be computed."""
    weight, layer = hf_config.family.layer_of(tensor.name, prefix) or ("", -1)
    n_layers = len(layers_with(hf_config.model, weight))
    if layer >= n_layers:
        of = "encoder " if weight.startswith(ENCODER) else "decoder " if hf_config.model.encoder else ""
        return BadModelConfig(
            f"two files disagree: {shown(hf_config.path)} has {n_layers} {of}layers, but "
            f"{tensor} belongs to layer {layer}, counted from 0"
        )
    more = f" ({n} such tensors)" if n > 1 else ""
    return TensorMismatch(
        f"{tensor}{more}: expected no such tensor according to {shown(hf_config.path)}, found {tensor.dtype} "
        f"{shown(list(tensor.shape))}; a model with this tensor computes something else"
    )
