"""Writes safetensors files one tensor at a time, after a header with all sizes."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from orca_jax.checkpoint.safetensors_reader import FLOAT_DTYPES, PACKED_DTYPES
from orca_jax.model_files.weight_files import INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in (FLOAT_DTYPES | PACKED_DTYPES).items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write; `read` is called just before, and returns elements of this `shape` and `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        """The size of its elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_files(directory: Path, tensors: Sequence[Tensor], max_bytes: int) -> None:
    """Write model.safetensors, or several files with at most `max_bytes` of tensors each and their index.

    A larger tensor gets its own file. Raises OSError.
    """
    files = [*_files(tensors, max_bytes)]
    if len(files) == 1:
        _write(directory / SINGLE, files[0])
        return
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        _write(directory / name, file)
        weight_map |= {tensor.name: name for tensor in file}
    metadata = {"total_size": sum(tensor.n_bytes for tensor in tensors)}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    file: list[Tensor] = []
    for tensor in tensors:
        if file and sum(other.n_bytes for other in file) + tensor.n_bytes > max_bytes:
            yield file
            file = []
        file.append(tensor)
    yield file


def _write(path: Path, tensors: Sequence[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            values = np.asarray(tensor.read(), order="C")
            assert (values.shape, values.dtype) == (tensor.shape, tensor.dtype), tensor.name
            file.write(values.reshape(-1).view(np.uint8).data)
