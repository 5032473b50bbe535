"""Rounds matrices as `--quantization` does, and writes them as compressed-tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from orca_jax.checkpoint.safetensors_writer import Tensor
from orca_jax.config import Rounding
from orca_jax.families.packed_form import PackedForm
from orca_jax.families.quantization_config import ROUNDED
from orca_jax.model.weight import kind_of

_FORMATS: Mapping[Rounding, str] = {
    "int4": "pack-quantized",
    "int8": "pack-quantized",
    "fp8": "float-quantized",
}
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def quantization_section(to: Rounding, ignored: Iterable[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose linear layers but the `ignored` ones are rounded."""
    form = ROUNDED[to]
    weights = {
        "num_bits": form.bits,
        "type": "float" if form.code == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if form.block is None else "group",
        "group_size": form.block,
        "dynamic": False,
        "scale_dtype": f"torch.{form.scale}",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": _FORMATS[to],
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": _FORMATS[to],
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
    }


def rounded_tensors(tensor: Tensor, to: Rounding) -> list[Tensor]:
    """The tensors of a rounded matrix in place of its `tensor` [out, in], which is read once."""
    form, (n_out, n_in) = ROUNDED[to], tensor.shape
    module = tensor.name.removesuffix(".weight")
    planes = _Planes(tensor, form)
    n_scales = 1 if form.block is None else n_in // form.block

    def made(leaf: str, shape: tuple[int, ...], dtype: Any, read: Callable[[], np.ndarray]) -> Tensor:
        return replace(tensor, name=f"{module}.{leaf}", shape=shape, dtype=np.dtype(dtype), read=read)

    scales = made(
        "weight_scale", (n_out, n_scales), form.scale, lambda: planes.take("scales").reshape(n_out, n_scales)
    )
    if form.code == "fp8":
        codes = made("weight", (n_out, n_in), _FP8, lambda: planes.take("codes").view(_FP8))
        return [codes, scales]
    n_words = -(-n_in * form.bits // 32)
    codes = made("weight_packed", (n_out, n_words), np.int32, lambda: _words(form, planes.take("codes")))
    shape = made("weight_shape", (2,), np.int64, lambda: np.array([n_out, n_in], np.int64))
    return [codes, scales, shape]


class _Planes:
    """The planes of a matrix, made when the first is taken; each is taken once."""

    def __init__(self, tensor: Tensor, form: PackedForm) -> None:
        self._tensor, self._form = tensor, form
        self._planes: dict[str, np.ndarray] = {}

    def take(self, name: str) -> np.ndarray:
        if not self._planes:
            arrays = _encoding(self._form)(jnp.asarray(np.ascontiguousarray(self._tensor.read())))
            self._planes = {plane: np.asarray(array) for plane, array in arrays.items()}
        return self._planes.pop(name)


@cache
def _encoding(form: PackedForm) -> Callable[[jax.Array], Mapping[str, jax.Array]]:
    kind = kind_of(form)
    return jax.jit(lambda dense: kind.encoded(form, dense).arrays)


def _words(form: PackedForm, codes: np.ndarray) -> np.ndarray:
    """A plane of codes as 32-bit words along each row, the first code in the lowest bits."""
    if form.code == "nibbles":
        runs = codes.reshape(len(codes), -1, 16)
        plain = np.stack([runs & 15, runs >> 4], axis=2).reshape(len(codes), -1)
        return np.ascontiguousarray(plain[:, ::2] | plain[:, 1::2] << 4).view(np.int32)
    n_bytes = codes.shape[1]
    padded = np.zeros((len(codes), -(-n_bytes // 4) * 4), np.uint8)
    padded[:, :n_bytes] = codes.view(np.uint8) ^ 128
    return padded.view(np.int32)
