"""Blocks that travel: for each kind of cache, a block comes back from the host's memory bit for bit."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from orca_jax.errors import ConfigError
from orca_jax.execution.host_blocks import HostBlocks
from orca_jax.execution.prefault import Prefault
from orca_jax.model.kv_cache import LayerCache
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.specs import CACHE_SPEC

N_BLOCKS, N_PLACES = 90, 80  # more than one call copies
CPU_BF16 = np.dtype(np.uint16)

# Of each layer: heads, block size, head size, dtypes of keys and values, and whether they have scales.
KINDS: dict[str, list[tuple[int, int, int, Any, bool, bool]]] = {
    "float32": [(2, 4, 3, np.float32, True, False)] * 2,
    "bfloat16": [(2, 4, 3, ml_dtypes.bfloat16, True, False), (2, 4, 3, CPU_BF16, True, False)],
    "eight bits": [(2, 4, 3, np.int8, True, True), (2, 4, 3, np.uint8, True, True)],
    "latent": [(2, 4, 5, np.float32, False, False)] * 3,
    "different heads": [(2, 4, 3, np.float32, True, False), (4, 4, 6, np.float32, True, False)],
}


def made(kind: str, seed: int, group: DeviceGroup) -> list[LayerCache]:
    """Caches of random bits that are numbers."""
    rng = np.random.default_rng(seed)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.device_put(rng.integers(0, 100, shape).astype(dtype), group.place(CACHE_SPEC))

    caches: list[LayerCache] = []
    for n_heads, block_size, head_size, dtype, values, scales in KINDS[kind]:
        shape = (N_BLOCKS, n_heads, block_size, head_size)
        scale = [array(shape[:3], np.float32) for _ in range(2 * scales)]
        caches.append(LayerCache(array(shape, dtype), array(shape, dtype) if values else None, *scale))
    return caches


def numbers(caches: list[LayerCache]) -> list[Any]:
    return [np.asarray(array).copy() for array in jax.tree.leaves(caches)]


def pairs(first: Any, second: Any) -> np.ndarray[Any, Any]:
    return np.stack([first, second], axis=1).astype(np.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_devices", [1, 2])
def test_blocks_come_back_bit_for_bit_and_no_other_changes(kind: str, n_devices: int) -> None:
    group = DeviceGroup(tuple(jax.devices()[:n_devices]))
    caches = made(kind, 1, group)
    host = HostBlocks(N_PLACES, N_BLOCKS, caches, group)
    host.renew()
    rng = np.random.default_rng(2)
    blocks, places = rng.permutation(N_BLOCKS)[:75], rng.permutation(N_PLACES)[:75]
    before = numbers(caches)
    host.copy_out(caches, pairs(blocks, places))
    host.copy_out(caches, pairs(blocks[:3], places[:3]))
    others = made(kind, 3, group)
    expected = numbers(others)
    # Into other blocks than they came from: place by place, in another order.
    order = rng.permutation(75)[:73]
    into = rng.permutation(N_BLOCKS)[:73]
    for array, source in zip(expected, before, strict=True):
        array[into] = source[blocks[order]]
    found = host.copy_in(others, pairs(places[order], into))
    for array, wanted, cache in zip(numbers(found), expected, jax.tree.leaves(caches), strict=True):
        assert array.dtype == wanted.dtype and array.tobytes() == wanted.tobytes()
        assert cache.sharding == group.place(CACHE_SPEC)


def test_the_bytes_of_a_block_are_those_of_all_layers_arrays() -> None:
    group = DeviceGroup((jax.devices()[0],))
    eight = HostBlocks(N_PLACES, N_BLOCKS, made("eight bits", 0, group), group)
    assert eight.block_bytes == 2 * 2 * (2 * 4 * 3 + 4 * 2 * 4)
    assert eight.buckets == (1, 8, 32, 64)
    like: Any = jax.ShapeDtypeStruct((9, 8, 16, 4096), np.float32)  # 2 MiB a block
    large = [LayerCache(like, like)] * 2
    assert HostBlocks(N_PLACES, 9, large, group).buckets == (1, 2), "few of 8 MiB in flight"


def test_memory_that_the_system_does_not_give_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    group = DeviceGroup((jax.devices()[0],))
    host = HostBlocks(N_PLACES, N_BLOCKS, made("latent", 0, group), group)

    def refused(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refused)
    with pytest.raises(ConfigError, match=r"kv_host_bytes asks for 38400 bytes .* lower it"):
        host.renew()


def test_the_memory_of_places_is_taken_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = list[int]()
    monkeypatch.setattr(Prefault, "reach", lambda _, index: reached.append(index))
    group = DeviceGroup((jax.devices()[0],))
    caches = made("float32", 0, group)
    host = HostBlocks(N_PLACES, N_BLOCKS, caches, group)
    host.renew()
    host.views(5)
    host.put(7, memoryview(bytes(host.block_bytes)))
    host.copy_out(caches, pairs([1, 2, 3], [4, 30, 9]))
    assert reached == [0, 5, 7, 30]
    host.release()
