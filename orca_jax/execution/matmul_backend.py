"""Chooses the matrix products of a stage, and the kernels of its recurrent layers; nothing else does.

On a CPU with AVX-512 or AVX2 and a C compiler, float32, bfloat16 and packed weights use products in C
(native/).
Experts use a kernel on Hopper GPUs (pallas/grouped_product.py). XLA computes all other products
(model/layers.py), on other GPUs those of few tokens' experts together (model/mixture_at_once.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from orca_jax.families.packed_form import PackedForm
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.mixture_at_once import mixture_at_once
from orca_jax.model.packed_weight import product_of_codes
from orca_jax.model.recurrence import Heads, RecurrentKernels, RowTable
from orca_jax.native.causal_convolution import native_causal_convolution
from orca_jax.native.compiler import NotBuilt
from orca_jax.native.linear_attention import has_linear_attention_form, native_linear_attention
from orca_jax.native.packed_products import has_packed_form, native_packed, native_packed_grouped
from orca_jax.native.products import (
    DTYPES,
    has_form,
    has_mixture_form,
    linear_target,
    native_grouped,
    native_linear,
    native_mixture,
)
from orca_jax.pallas.grouped_product import grouped_product
from orca_jax.pallas.packed_product import packed_product
from orca_jax.pallas.packed_product import unsupported as packed_product_unsupported
from orca_jax.pallas.work_list.group_tiles import unsupported

Device = Any  # a jax.Device

# Compute capabilities for which Triton kernels have been compiled: A100, Hopper, B200. Without another GPU at
# hand JAX does not compile for it.
TRITON = ("8.0", "9.0", "10.0")


@dataclass(frozen=True, slots=True)
class Products:
    """The chosen products. `description` is shown at startup; it is empty if there is no alternative.

    With `whole`, linear layers compute padding too, so that the order of sums does not depend on the number
    of tokens, and all products are `steady`. `kernel_cores` is the number of cores of a GPU that runs the
    experts' kernel; on a GPU without it, `at_once` computes all experts of few tokens together.
    `packed_cores` is the same number of a GPU that runs the kernel of packed weights; with `float8` XLA's
    products read FP8 codes there.
    """

    native: bool
    description: str = ""
    whole: bool = False
    kernel_cores: int | None = None
    packed_cores: int | None = None
    float8: bool = False
    at_once: bool = False

    def describe_with(self, attention: str) -> str:
        """The startup text about attention and products."""
        return f"{attention}; {self.description}" if self.description else attention

    @property
    def recurrent(self) -> RecurrentKernels:
        """The kernels of recurrent layers."""
        return RecurrentKernels(_linear_attention, _convolution) if self.native else RecurrentKernels()

    def bind(self, n_tokens: jax.Array | None) -> Matmul:
        """The products of an iteration whose first `n_tokens` [1] int32 are real; None if all are."""
        if not self.native:
            chosen = matmul
            if self.kernel_cores is not None:
                chosen = replace(matmul, grouped=partial(_grouped_on_gpu, n_cores=self.kernel_cores))
            elif self.at_once:
                chosen = replace(matmul, mixture=mixture_at_once)
            if self.packed_cores is not None:
                chosen = replace(
                    chosen, packed=partial(_packed_on_gpu, n_cores=self.packed_cores, float8=self.float8)
                )
            return chosen if n_tokens is None else replace(chosen, n_tokens=n_tokens)

        def product(x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None) -> jax.Array:
            if not has_form(x, weight):
                return matmul(x, weight)
            return native_linear(x, weight, None if self.whole else n_tokens, steady=self.whole)

        def grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
            if not has_form(x, weight):
                return matmul.grouped(x, weight, sizes)
            return native_grouped(x, weight, sizes, steady=self.whole)

        def mixture(
            x: jax.Array, weights: jax.Array, experts: jax.Array, up: jax.Array, down: jax.Array
        ) -> jax.Array | None:
            if not has_mixture_form(x, up, down):
                return None
            return native_mixture(x, weights, experts, up, down, steady=self.whole)

        packed, by_group = partial(_packed, steady=self.whole), partial(_packed_grouped, steady=self.whole)
        return Matmul(product, grouped, mixture, packed, by_group, n_tokens)


def _linear_attention(x: Heads, state: jax.Array, table: RowTable) -> tuple[jax.Array, jax.Array] | None:
    return native_linear_attention(*x, state, *table) if has_linear_attention_form(x.q) else None


def _convolution(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: jax.Array, table: RowTable
) -> tuple[jax.Array, jax.Array]:
    return native_causal_convolution(x, weight, bias, state, *table)


def _packed(
    x: jax.Array,
    form: PackedForm,
    planes: Mapping[str, jax.Array],
    n_tokens: jax.Array | None,
    *,
    steady: bool,
) -> jax.Array | None:
    n_out = math.prod(planes["codes"].shape[:-1])
    if not has_packed_form(x, form, n_out):
        return None
    return native_packed(x, form, planes, n_tokens, steady=steady)


def _packed_grouped(
    x: jax.Array, form: PackedForm, planes: Mapping[str, jax.Array], sizes: jax.Array, *, steady: bool
) -> jax.Array | None:
    n_out = math.prod(planes["codes"].shape[1:-1])
    if not has_packed_form(x, form, n_out):
        return None
    return native_packed_grouped(x, form, planes, sizes, steady=steady)


def _grouped_on_gpu(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, n_cores: int) -> jax.Array:
    _, n_out, n_in = weight.shape
    if unsupported(n_out, n_in, x.dtype.name, weight.dtype.name):
        return matmul.grouped(x, weight, sizes)
    return grouped_product(x, weight, sizes, n_cores=n_cores)


def _packed_on_gpu(
    x: jax.Array,
    form: PackedForm,
    planes: Mapping[str, jax.Array],
    n_tokens: jax.Array | None,
    *,
    n_cores: int,
    float8: bool,
) -> jax.Array | None:
    """XLA's own product where it reads packed codes, or the kernel for few tokens."""
    y = product_of_codes(x, form, planes) if form.code != "fp8" or float8 else None
    if y is None and packed_product_unsupported(x, form) is None:
        y = packed_product(x, form, planes, n_cores=n_cores)
    return y


def choose_products(device: Device, dtype: Any, *, deterministic: bool = False) -> Products:
    """Choose the products for weights of `dtype` on a device."""
    if device.platform != "cpu":
        capability = str(getattr(device, "compute_capability", None))
        n_cores = getattr(device, "core_count", 2)
        packed_cores = n_cores if capability in TRITON else None
        if capability == "9.0":
            return Products(native=False, kernel_cores=n_cores, packed_cores=packed_cores, float8=True)
        at_once = device.platform == "gpu"
        return Products(native=False, at_once=at_once, packed_cores=packed_cores, float8=capability == "10.0")
    name = np.dtype(dtype).name
    if name not in DTYPES:
        allowed = " and ".join(DTYPES)
        return Products(False, f"XLA's products: the native ones are for {allowed}, and weights are {name}")
    try:
        linear_target(name, name, steady=deterministic)
    except NotBuilt as error:
        return Products(False, f"XLA's products: {error}")
    return Products(True, "native products", whole=deterministic)
