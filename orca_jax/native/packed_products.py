"""The matrix products of packed weights on a CPU, as custom calls written in C (packed_product.h)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from orca_jax.families.packed_form import PackedForm
from orca_jax.native.custom_call import target
from orca_jax.native.operations import BITS, PACKED_MOST, PACKED_RUN, PACKED_WIDTH, packed_sizes

# The order of packed_product.h's `planes_of`.
_PLANES = ("codes", "high", "scales", "super_scales", "super_mins", "mins", "zeros")


def has_packed_form(x: jax.Array, form: PackedForm, n_out: int) -> bool:
    """Whether native_packed can multiply x [T, in] by a weight [n_out, in] of this form."""
    if x.dtype.name not in BITS:
        return False
    whole = form.superblock or PACKED_RUN
    blocks = form.block is None or form.block % PACKED_RUN == 0 or form.superblock is not None
    most = PACKED_MOST if form.integer_inputs else x.shape[1]
    return x.shape[1] % whole == 0 and 0 < x.shape[1] <= most and blocks and n_out >= PACKED_WIDTH


def native_packed(
    x: jax.Array,
    form: PackedForm,
    planes: Mapping[str, jax.Array],
    n_tokens: jax.Array | None = None,
    *,
    steady: bool = False,
) -> jax.Array:
    """x [T, in] times a packed weight [*out, in] whose planes are those of `form`: [T, out] in x's dtype.

    x is float32 or bfloat16, its inputs in the order of the planes'. With FP8 codes it is taken as it is, or
    rounded to bfloat16 where the processor multiplies that. With others it is rounded to int8, with a scale
    for each 32 inputs of a token, or for the whole token if the form has `integer_inputs`. Sums are float32.
    Only the first `n_tokens` [1] int32 rows, by default all, are computed; the others are zero. A token's
    result depends on nothing else in the batch; with FP8 codes it may depend on whether it is alone, unless
    `steady`. An FP8 code of NaN counts as 480. Raises NotBuilt without a C compiler, or without
    AVX-512 or AVX2.
    """
    n_out = planes["codes"].size // planes["codes"].shape[-1]
    if n_tokens is None:
        n_tokens = jnp.full(1, x.shape[0], jnp.int32)
    assert n_tokens.shape == (1,) and n_tokens.dtype == jnp.int32
    return _call("packed_linear", x, form, planes, (n_out,), n_tokens, steady)


def native_packed_grouped(
    x: jax.Array,
    form: PackedForm,
    planes: Mapping[str, jax.Array],
    sizes: jax.Array,
    *,
    steady: bool = False,
) -> jax.Array:
    """Consecutive groups of rows of x [N, in], each times its own weight of [X, *out, in]: [N, out].

    Group i has sizes[i] rows, [X] int32; rows after the last group give zeros. A row's result is that of
    native_packed for its group's weight.
    """
    codes = planes["codes"]
    n_experts, n_out = len(codes), codes.size // (len(codes) * codes.shape[-1])
    assert sizes.shape == (n_experts,) and sizes.dtype == jnp.int32
    return _call("packed_grouped", x, form, planes, (n_experts, n_out), sizes, steady)


def _call(
    operation: str,
    x: jax.Array,
    form: PackedForm,
    planes: Mapping[str, jax.Array],
    rows: tuple[int, ...],
    counts: jax.Array,
    steady: bool,
) -> jax.Array:
    assert has_packed_form(x, form, rows[-1])
    # A scale for a whole row has no axis of inputs; here it gets one.
    flat = [planes[name].reshape(*rows, -1) for name in _PLANES if name in planes]
    y = jax.ShapeDtypeStruct((x.shape[0], rows[-1]), x.dtype)
    name = target(operation, **packed_sizes(form, x.dtype.name, steady))
    return jax.ffi.ffi_call(name, y)(x, *flat, counts)
