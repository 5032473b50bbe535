"""Which product a stage's linear layers and head run: chosen here and nowhere else.

In C (native/) for float32 on a CPU with AVX-512 and a compiler; else XLA's.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from orca_jax.model.layers import Matmul, matmul
from orca_jax.native.compiler import NotBuilt
from orca_jax.native.linear import has_form, linear_target, native_linear

Device = Any  # a jax.Device


@dataclass(frozen=True, slots=True)
class MatmulChoice:
    """A product, and what to say of it at start-up: nothing where there is no other."""

    matmul: Matmul
    said: str = ""

    def beside(self, attention: str) -> str:
        """What is said of both."""
        return f"{attention}; {self.said}" if self.said else attention


def choose_matmul(device: Device, dtype: Any) -> MatmulChoice:
    """The product for weights of `dtype` on a device."""
    if device.platform != "cpu":
        return MatmulChoice(matmul)
    name = np.dtype(dtype).name
    if name != "float32":
        return MatmulChoice(matmul, f"XLA's products: the native ones are for float32, and weights are {name}")
    try:
        linear_target()
    except NotBuilt as error:
        return MatmulChoice(matmul, f"XLA's products: {error}")
    return MatmulChoice(_native, "native products")


def _native(x: jax.Array, weight: jax.Array) -> jax.Array:
    return native_linear(x, weight) if has_form(x, weight) else matmul(x, weight)
