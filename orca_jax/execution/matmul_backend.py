"""Chooses the matrix product for a stage's linear layers, experts and head; nothing else does.

On a CPU with AVX-512 or AVX2 and a C compiler, float32 and bfloat16 weights use the product in C (native/).
Everything else uses XLA's.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from orca_jax.model.layers import Matmul, matmul
from orca_jax.native.compiler import NotBuilt
from orca_jax.native.grouped import native_grouped
from orca_jax.native.linear import DTYPES, has_form, linear_target, native_linear

Device = Any  # a jax.Device


@dataclass(frozen=True, slots=True)
class Products:
    """The native product or XLA's; `description` is shown at startup, empty if there is no alternative.

    `whole`: padding is computed too, because the number of tokens decides in which order sums are made. Of
    experts it is not: their products are then `steady`.
    """

    native: bool
    description: str = ""
    whole: bool = False

    def describe_with(self, attention: str) -> str:
        """The startup text for attention and for the products."""
        return f"{attention}; {self.description}" if self.description else attention

    def bind(self, n_tokens: jax.Array | None) -> Matmul:
        """The product for an iteration of which the first `n_tokens` [1] int32 are real; None: all are."""
        if not self.native:
            return matmul if n_tokens is None else replace(matmul, n_tokens=n_tokens)

        def product(x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None) -> jax.Array:
            if not has_form(x, weight):
                return matmul(x, weight)
            return native_linear(x, weight, None if self.whole else n_tokens)

        def grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
            if not has_form(x, weight):
                return matmul.grouped(x, weight, sizes)
            return native_grouped(x, weight, sizes, steady=self.whole)

        return Matmul(product, grouped, n_tokens)


def choose_products(device: Device, dtype: Any, *, deterministic: bool = False) -> Products:
    """The product for weights of `dtype` on a device; `deterministic`: padding is computed too."""
    if device.platform != "cpu":
        return Products(native=False)
    name = np.dtype(dtype).name
    if name not in DTYPES:
        allowed = " and ".join(DTYPES)
        return Products(False, f"XLA's products: the native ones are for {allowed}, and weights are {name}")
    try:
        linear_target(name, name)
    except NotBuilt as error:
        return Products(False, f"XLA's products: {error}")
    return Products(True, "native products", whole=deterministic)
