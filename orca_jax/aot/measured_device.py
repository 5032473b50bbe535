"""Measures a device's memory bandwidth and matrix rate, in the same run that uses them."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from orca_jax.planning.cost_model import Device


def seconds(run: Callable[[], object], *, repeat: int) -> list[float]:
    """Seconds of each of `repeat` calls of `run`, waiting for the result, after one warm-up call."""
    jax.block_until_ready(run())
    times: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


def measure_device(dtype: jnp.dtype, *, repeat: int = 10) -> Device:
    """The best bandwidth and matrix rate of the default device in `dtype`.

    Bandwidth is measured by summing an array larger than every cache, the matrix rate by a product of a
    prefill's shape. Each is the best of `repeat` runs, because disturbances only make a run slower.
    """
    small = jax.default_backend() == "cpu"
    return Device(
        bandwidth=_bandwidth(dtype, (512 << 20) if small else (4 << 30), repeat),
        matrix_rate=_matrix_rate(dtype, (1024, 3072, 768) if small else (8192, 8192, 8192), repeat),
    )


def _bandwidth(dtype: jnp.dtype, n_bytes: int, repeat: int) -> float:
    """Bytes per second."""
    array = jax.random.uniform(jax.random.key(1), (n_bytes // dtype.itemsize,), dtype)
    total = jax.jit(lambda a: jnp.sum(a, dtype=jnp.float32))
    return n_bytes / min(seconds(lambda: total(array), repeat=repeat))


def _matrix_rate(dtype: jnp.dtype, shape: tuple[int, int, int], repeat: int) -> float:
    """Operations per second of [m, k] by [k, n]."""
    m, n, k = shape
    key = jax.random.key(0)
    a, b = jax.random.normal(key, (m, k), dtype), jax.random.normal(key, (k, n), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * m * n * k / min(seconds(lambda: product(a, b), repeat=repeat))
