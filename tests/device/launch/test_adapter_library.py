"""The adapters of an engine: which stay in memory, and a trainer's arrays as an adapter."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.control.adapter_call import AdapterPiece
from orca_jax.errors import BadAdapter, BadFrame, CheckpointError, ConfigError
from orca_jax.families.hf_config import HFConfig, read_hf_config
from orca_jax.families.trainers.array_form import axis_sizes
from orca_jax.families.trainers.layouts import held_names
from orca_jax.launch.adapter_library import AdapterLibrary
from orca_jax.launch.new_weights import check_adapters
from orca_jax.launch.placed_adapters import from_pieces, sent_to
from orca_jax.planning.stage_layers import stage_layers
from tests.device.checkpoint.tiny_checkpoint import write_json
from tests.device.model.golden import DIRECTORY as MODELS
from tests.places import DATA

MODEL = read_hf_config(MODELS / "llama-grouped")
SOURCE = DATA / "adapters" / "llama-grouped"
STAGES = stage_layers(MODEL.model.n_layers, 2)
QKV, DOWN = "layers.0.qkv.weight", "layers.1.down.weight"


def adapters(host_bytes: int = 1 << 30, found: HFConfig = MODEL) -> AdapterLibrary:
    return AdapterLibrary(
        lambda adapter, loaded: lambda slot: None,
        found.family,
        found.model,
        jnp.dtype("float32"),
        stored=found.model,
        max_rank=40,
        extras=(),
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


def test_changed_files_are_not_read_under_the_same_content(tmp_path: Path) -> None:
    """The prefix cache may have keys and values of the weights that the files held before."""
    directory = tmp_path / "all"
    shutil.copytree(SOURCE / "all", directory)
    store = adapters(host_bytes=0)
    first, other = store.add("first", str(directory)), store.add("other", str(SOURCE / "root"))
    assert store.loaded(first).rank == 4 and store.loaded(other).rank == 33, "read again"
    assert store.add("same", str(directory)).content == first.content != other.content
    shutil.copytree(SOURCE / "root", directory, dirs_exist_ok=True)
    with pytest.raises(BadAdapter, match="holds other weights than when 'first' was loaded; load it again"):
        store.loaded(first)
    assert store.loaded(store.add("first", str(directory), replace=True)).rank == 33


class OneStage:
    """The parts of a Worker that take an adapter: the second of two stages."""

    def __init__(self) -> None:
        self.shape = SimpleNamespace(adapter_rank=33, adapter_extras=())
        self.stage = SimpleNamespace(part=SimpleNamespace(layers=STAGES[1]))

    def placed_adapter(self, arrays: Any) -> Any:
        return arrays


def test_an_adapter_in_pieces_is_the_same_again() -> None:
    store, sent = adapters(), list[tuple[int, list[list[AdapterPiece]]]]()
    sender: Any = SimpleNamespace(
        send=lambda version, stages: sent.append((version, [[*stage()] for stage in stages]))
    )
    workers: Any = SimpleNamespace(n_stages=2, put_adapter=lambda version, slot: sent.append((version, [])))
    adapter = store.add("a", str(SOURCE / "patterns"))
    loaded, dtype = store.loaded(adapter), np.dtype(np.float32)
    sent_to(workers, sender, MODEL.model)(adapter, loaded)(3)
    (version, (first, second)), put = sent
    assert version == adapter.version and put == (version, [])
    of_stages = [{n for n in loaded.changes if int(n.split(".")[1]) in layers} for layers in STAGES]
    assert first and second and [{one.weight for one in each} for each in (first, second)] == of_stages
    stage: Any = OneStage()
    arrays: Any = from_pieces(MODEL.model, dtype)(stage, iter(second))
    whole = loaded.stacked(MODEL.model, 48, dtype)
    assert arrays.keys() == of_stages[1]
    for name, (a, b) in arrays.items():
        np.testing.assert_array_equal(a, whole[name][0])
        for part, expected in zip(b, whole[name][1], strict=True):
            np.testing.assert_array_equal(part, expected)
    piece = second[0]
    for wrong, complaint in (
        (first[0], "this stage has no such part"),
        (piece._replace(part=9), "of rank .* came for part 9"),
        (piece._replace(rank=34), "room for rank 33 alone"),
        (piece._replace(a=piece.a[:-1]), "bytes of an adapter came"),
        (piece._replace(b=piece.b + b"1234"), "bytes of an adapter came"),
    ):
        with pytest.raises(BadFrame, match=complaint):
            from_pieces(MODEL.model, dtype)(stage, iter([wrong]))


def test_tunix_adapters_are_low_products_of_our_parts() -> None:
    """The products are the changes that would be merged, part by part; None where nothing is adapted."""
    attention, chance = MODEL.model.attention, np.random.default_rng(5)
    heads, keys = ((n, attention.head_size) for n in (attention.n_heads, attention.n_kv_heads))
    names = held_names(MODEL.model, "tunix")
    (q, _, v), (o,), (_, up) = (
        names[name].names for name in (QKV, "layers.0.out.weight", "layers.1.up.weight")
    )
    shapes = {q: ((48, 3), (3, *heads)), v: ((48, 2), (2, *keys))}
    shapes |= {o: ((*heads, 3), (3, 48)), up: ((48, 4), (4, 80))}
    arrays = {
        f"{name}_lora_{side}": chance.standard_normal(shape).astype(np.float32)
        for name, pair in shapes.items()
        for side, shape in zip("ab", pair, strict=True)
    }
    store = adapters()
    loaded = store.loaded(store.update("new", arrays, scale=0.5))
    assert loaded.rank == 4
    pairs = check_adapters(arrays, MODEL.model)
    assert pairs is not None and pairs.keys() == loaded.changes.keys()
    for name, pair in pairs.items():
        whole, parts = 0.5 * np.asarray(pair.change(pair.arrays)), loaded.changes[name]
        sizes = np.cumsum([0, *(1 if len(parts) > 1 else len(whole) for _ in parts)])
        if name == QKV:
            sizes = np.cumsum([0, len(whole) - 2, 1, 1])
        for i, low in enumerate(parts):
            part = whole[sizes[i] : sizes[i + 1]]
            made = np.zeros_like(part) if low is None else np.tensordot(low.b, low.a, 1)
            np.testing.assert_allclose(made, part, atol=1e-5, err_msg=f"{name} {i}")
    assert [low is None for low in loaded.changes[QKV]] == [False, True, False]
    assert [low is None for low in loaded.changes["layers.1.up.weight"]] == [True, False]


@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_one_array_of_tunix_has_several_of_our_parts(n_kv_heads: int, tmp_path: Path) -> None:
    """Gemma's keys and values, or with as many of them also its queries, are one array with one adapter."""
    config = json.loads((MODELS / "gemma2-caps" / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"num_key_value_heads": n_kv_heads})
    found, chance = read_hf_config(tmp_path), np.random.default_rng(5)
    held, arrays = held_names(found.model, "tunix")[QKV], dict[str, np.ndarray]()
    sizes = axis_sizes(found.model, QKV)
    for tensor, form in zip(held.names, held.forms, strict=True):
        assert form.letters[-2:] == ("H", "D")
        *first, into, size = form.shape(sizes)
        arrays[f"{tensor}_lora_a"] = chance.standard_normal((into, 3)).astype(np.float32)
        arrays[f"{tensor}_lora_b"] = chance.standard_normal((3, *first, size)).astype(np.float32)
    assert len(arrays) < 2 * len(held.names)
    store = adapters(found=found)
    loaded = store.loaded(store.update("new", arrays, scale=0.5))
    pairs = check_adapters(arrays, found.model)
    assert pairs is not None
    whole = 0.5 * np.asarray(pairs[QKV].change(pairs[QKV].arrays))
    parts = [np.tensordot(low.b, low.a, 1) for low in loaded.changes[QKV] if low is not None]
    assert len(parts) == 3
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
