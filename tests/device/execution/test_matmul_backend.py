"""The choice of the experts' products on GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.execution import matmul_backend
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.model.layers import matmul
from orca_jax.model.mixture_at_once import mixture_at_once
from orca_jax.pallas.grouped_product_reference import grouped_product_reference


def gpu(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability, core_count=114)


def test_only_hopper_gpus_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def kernel(x: jnp.ndarray, weight: jnp.ndarray, sizes: jnp.ndarray, *, n_cores: int) -> jnp.ndarray:
        asked.append((*weight.shape, n_cores))
        return grouped_product_reference(x, weight, sizes)

    monkeypatch.setattr(matmul_backend, "grouped_product", kernel)
    x = jnp.ones((5, 64), jnp.bfloat16)
    weight, sizes = jnp.ones((3, 128, 64), jnp.bfloat16), jnp.array([2, 0, 3], jnp.int32)
    tokens = jnp.array([5], jnp.int32)
    bound = choose_products(gpu("9.0"), jnp.bfloat16).bind(tokens)
    assert (bound.grouped(x, weight, sizes) == 64).all()
    assert asked == [(3, 128, 64, 114)]
    assert bound.linear is matmul.linear and bound.n_tokens is tokens
    for capability in ("8.0", "8.9", "10.0"):
        other = choose_products(gpu(capability), jnp.bfloat16).bind(tokens)
        assert replace(other, packed=None) == replace(matmul, mixture=mixture_at_once, n_tokens=tokens)
    assert choose_products(SimpleNamespace(platform="tpu"), jnp.bfloat16).bind(None) is matmul


def test_sizes_that_the_kernel_lacks_run_without_it() -> None:
    bound = choose_products(gpu("9.0"), jnp.bfloat16).bind(None)
    rng = np.random.default_rng(1)
    for dtype, n_out in (("bfloat16", 72), ("float32", 128)):
        x, weight = (jnp.asarray(rng.standard_normal(n), dtype) for n in ((6, 64), (3, n_out, 64)))
        sizes = jnp.array([1, 0, 4], jnp.int32)
        found, wanted = bound.grouped(x, weight, sizes), grouped_product_reference(x, weight, sizes)
        error = np.asarray(found, np.float32) - np.asarray(wanted, np.float32)
        assert np.abs(error).max() < (0.2 if dtype == "bfloat16" else 1e-4)


def test_logits_are_not_rounded_to_the_weights_dtype() -> None:
    """Two tokens whose logits differ by less than a step of bfloat16 are told apart."""
    x = jnp.array([[1.0, 2**-9]], jnp.bfloat16)
    weight = jnp.array([[1.0, 0.0], [1.0, 1.0]], jnp.bfloat16)
    for n_rows in (1, 80):  # in each of the two orders of operands
        logits = matmul.in_float32(jnp.tile(x, (n_rows, 1)), weight)
        assert logits.dtype == jnp.float32
        assert logits.tolist() == [[1.0, 1 + 2**-9]] * n_rows
        assert matmul(jnp.tile(x, (n_rows, 1)), weight)[0].tolist() == [1.0, 1.0]
    own = replace(matmul, linear=lambda x, weight, n_tokens: matmul(x, weight))
    assert (
        own.in_float32(x, weight).tolist() == [[1.0, 1.0]] and own.in_float32(x, weight).dtype == jnp.float32
    )
