"""Which product the linear layers and the head of a stage run: chosen here and nowhere else.

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
class Products:
    """The native ones or XLA's, and what to say of them at start-up: nothing where there are no others.

    `whole`: padding is computed as well, since by how many tokens there are sums are made in one order or
    another.
    """

    native: bool
    said: str = ""
    whole: bool = False

    def beside(self, attention: str) -> str:
        """What is said of attention and of these."""
        return f"{attention}; {self.said}" if self.said else attention

    def bind(self, n_tokens: jax.Array | None) -> Matmul:
        """The product of an iteration whose first `n_tokens` [1] int32 alone are real; None: all are."""
        if not self.native:
            return matmul
        n_computed = None if self.whole else n_tokens

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:
            return native_linear(x, weight, n_computed) if has_form(x, weight) else matmul(x, weight)

        return product


def choose_products(device: Device, dtype: Any, *, deterministic: bool = False) -> Products:
    """The products for weights of `dtype` on a device; `deterministic`: what a bucket has is all computed."""
    if device.platform != "cpu":
        return Products(native=False)
    name = np.dtype(dtype).name
    if name != "float32":
        return Products(False, f"XLA's products: the native ones are for float32, and weights are {name}")
    try:
        linear_target()
    except NotBuilt as error:
        return Products(False, f"XLA's products: {error}")
    return Products(True, "native products", whole=deterministic)
