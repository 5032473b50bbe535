"""The adapters of an engine in this process: which stay in memory, and a trainer's arrays as an adapter."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.errors import BadAdapter, CheckpointError, ConfigError
from orca_jax.families.hf_config import read_hf_config
from orca_jax.launch.local_adapters import LocalAdapters
from tests.device.model.golden import DIRECTORY as MODELS
from tests.places import DATA

MODEL = read_hf_config(MODELS / "llama-grouped")
SOURCE = DATA / "adapters" / "llama-grouped"
QKV, DOWN = "layers.0.qkv.weight", "layers.1.down.weight"


def adapters(host_bytes: int = 1 << 30) -> LocalAdapters:
    return LocalAdapters(
        (),
        MODEL.family,
        MODEL.model,
        jnp.dtype("float32"),
        stored=MODEL.model,
        max_rank=40,
        host_bytes=host_bytes,
    )


def trained(rank: int = 3) -> dict[str, np.ndarray]:
    """Arrays of `qkv` [5, 20, 48], with three slices of queries, keys and values, and `down` [48, 80]."""
    chance = np.random.default_rng(7)
    shapes = {f"{QKV}.lora_b": (5, 20, rank), f"{QKV}.lora_a": (rank, 48)}
    shapes |= {f"{DOWN}.lora_b": (48, rank), f"{DOWN}.lora_a": (rank, 80)}
    return {name: chance.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_trainers_arrays_are_laid_out_by_parts() -> None:
    store, arrays = adapters(), trained()
    adapter = store.update("new", arrays, scale=0.5)
    assert store.adapters == {"new": adapter}
    loaded = store.loaded(adapter)
    assert loaded.rank == 3
    whole = 0.5 * np.einsum("gkr,rh->gkh", arrays[f"{QKV}.lora_b"], arrays[f"{QKV}.lora_a"])
    parts = [np.einsum("gkr,rh->gkh", low.b, low.a) for low in loaded.changes[QKV] if low is not None]
    assert [len(part) for part in parts] == [3, 1, 1]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
    (down,) = loaded.changes[DOWN]
    assert down is not None
    expected = 0.5 * arrays[f"{DOWN}.lora_b"] @ arrays[f"{DOWN}.lora_a"]
    np.testing.assert_allclose(down.b @ down.a, expected, atol=1e-5)
    assert store.update("new", arrays, scale=1.0).version > adapter.version
    assert store.loaded(adapter) is loaded, "requests that have it may need it again"


def test_arrays_that_are_no_adapter_are_refused() -> None:
    store, arrays = adapters(), trained()
    infinite, wide = np.full((3, 80), np.nan, np.float32), np.ones((3, 81), np.float32)
    for wrong, kind, complaint in (
        ({DOWN: arrays[f"{DOWN}.lora_b"]}, ConfigError, "are called NAME.lora_a and NAME.lora_b"),
        (trained(41), BadAdapter, "the rank is 41, and the engine has room for 40"),
        (arrays | {f"{DOWN}.lora_a": infinite}, BadAdapter, "NaN or infinite"),
        (arrays | {f"{DOWN}.lora_a": wide}, CheckpointError, "is not the weight's shape"),
    ):
        with pytest.raises(kind, match=complaint):
            store.update("new", wrong, scale=1.0)
    assert not store.adapters


def test_what_is_too_much_for_the_memory_is_read_again(tmp_path: Path) -> None:
    directory = tmp_path / "all"
    shutil.copytree(SOURCE / "all", directory)
    store = adapters()
    n_bytes = store.loaded(store.add("a", str(directory))).n_bytes
    n_bytes += store.loaded(store.add("b", str(SOURCE / "root"))).n_bytes
    store = adapters(host_bytes=n_bytes)
    first = store.add("first", str(directory))
    arrays = store.update("arrays", trained(), scale=1.0)
    shutil.rmtree(directory)
    assert store.loaded(first).rank == 4  # from memory
    second = store.add("second", str(SOURCE / "root"))  # is too much with the others
    with pytest.raises(CheckpointError, match="adapter_config"):
        store.loaded(first)
    assert store.loaded(second).rank == 33
    assert store.loaded(arrays).rank == 3, "what has no files stays"
