"""Trainers' checkpoints of mixtures of experts: read, written, and handed over, against arrays by hand."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from orca_jax.checkpoint import array_view
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import Layout
from orca_jax.errors import BadModelConfig, TensorMismatch, UnsupportedModel
from orca_jax.families.hf_config import read_config
from orca_jax.families.parameters import in_layers
from orca_jax.families.trainers.layouts import ITEMS, written_names
from orca_jax.launch.new_weights import check_arrays
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.partition import StagePart
from tests.device.checkpoint.stacked_by_hand import Arrays, maxtext, save, tunix
from tests.device.checkpoint.test_trainers import arrays_of
from tests.device.model.golden import DIRECTORY

MIXTRAL, QWEN, GPT_OSS = "mixtral-grouped", "qwen3-moe-renormalised", "gpt-oss-yarn"
V2, V3 = "deepseek-v2-greedy-no-query-rank", "deepseek-v3-groups-yarn-dense-first"
CASES: list[tuple[str, Layout]] = [
    *((name, "maxtext") for name in (MIXTRAL, QWEN, GPT_OSS, V2, V3)),
    *((name, "maxtext-scanned") for name in (MIXTRAL, QWEN, V2, V3)),
    (QWEN, "tunix"),
]
FLOAT = np.dtype("f4")
EXPERTS = "layers.1.experts."
ARRAY_OF_EXPERTS = re.compile(r"\.(wi_[01]|wo)(_bias)?$|\.mlp\.(gate|up|down)_proj\.value$")


def by_hand(name: str, layout: Layout) -> Arrays:
    tensors = load_file(DIRECTORY / name / "model.safetensors")
    config = json.loads((DIRECTORY / name / "config.json").read_text())
    return (
        tunix(tensors, config) if layout == "tunix" else maxtext(tensors, config, scanned="scanned" in layout)
    )


def checkpoint(directory: Path, name: str, layout: Layout) -> Path:
    save(directory / ITEMS[layout], by_hand(name, layout))
    shutil.copy(DIRECTORY / name / "config.json", directory)
    return directory


def assert_equal(found: Any, expected: Any, name: str, where: str) -> None:
    """Check that arrays are equal to the bit, but for Mixtral's queries, which are multiplied."""
    rounded = name == MIXTRAL and ("qkv" in where or "query" in where or "q_proj" in where)
    np.testing.assert_allclose(found, expected, rtol=3e-7 if rounded else 0, atol=0, err_msg=where)


@pytest.mark.matrix(
    but=[
        "mixtral-grouped-maxtext",
        "gpt-oss-yarn-maxtext",
        "deepseek-v3-groups-yarn-dense-first-maxtext-scanned",
        "qwen3-moe-renormalised-tunix",
    ]
)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_trainers_arrays_become_the_same_weights(name: str, layout: Layout, tmp_path: Path) -> None:
    """The weights of the Hugging Face checkpoint, from disk and as a trainer hands them over."""
    expected = load_checkpoint(DIRECTORY / name, dtype=FLOAT)
    loaded = load_checkpoint(checkpoint(tmp_path, name, layout), dtype=FLOAT)
    assert loaded.config == expected.config and loaded.parameters.keys() == expected.parameters.keys()
    for ours, values in expected.parameters.items():
        assert_equal(loaded.parameters[ours], values, name, ours)
    ends = ("params.params.", ".value")
    given = {
        theirs.removeprefix(ends[0]).removesuffix(ends[1]): values
        for theirs, values in by_hand(name, layout).items()
    }
    for arrays in (given, jax.device_put(given)):
        made = check_arrays(arrays, expected.config, FLOAT, cast=False, layout=layout)
        assert made.keys() == expected.parameters.keys()
        for ours, values in expected.parameters.items():
            assert_equal(made[ours](), values, name, ours)


@pytest.mark.matrix(
    but=[
        "mixtral-grouped-maxtext",
        "gpt-oss-yarn-maxtext",
        "deepseek-v3-groups-yarn-dense-first-maxtext-scanned",
        "qwen3-moe-renormalised-tunix",
    ]
)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_written_and_back(name: str, layout: Layout, tmp_path: Path) -> None:
    expected = by_hand(name, layout)
    assert convert_checkpoint(DIRECTORY / name, tmp_path / "trainer", to=layout) == layout
    step, item = ITEMS[layout].split("/")
    about = json.loads((tmp_path / "trainer" / step / "_CHECKPOINT_METADATA").read_text())
    # Trainers read these two.
    assert about["item_handlers"].keys() == {item} and about["commit_timestamp_nsecs"]
    found = arrays_of(tmp_path / "trainer" / ITEMS[layout])
    assert found.keys() == expected.keys()
    for theirs, values in expected.items():
        assert found[theirs].shape == values.shape, theirs
        assert_equal(found[theirs], values, name, theirs)
    convert_checkpoint(tmp_path / "trainer", tmp_path / "back")
    original = load_file(DIRECTORY / name / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == original.keys()
    for theirs, values in original.items():
        assert_equal(back[theirs], values, name, theirs)


def test_gpt_oss_scans_pairs_of_layers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="gpt-oss in groups of 2, and this model has 3; use maxtext"):
        convert_checkpoint(DIRECTORY / GPT_OSS, tmp_path / "odd", to="maxtext-scanned")
    config = json.loads((DIRECTORY / GPT_OSS / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = written_names(read_config(tmp_path), "maxtext-scanned")
    up = names["layers.3.experts.up.weight"]
    place = "params.params.decoder.layers.layers_1.GptOssMlp."
    assert up.names == (f"{place}wi_0", f"{place}wi_1")
    assert [(form.axes, form.layer, form.n_layers) for form in up.forms] == [("X L H F | L X H F", 1, 2)] * 2


@pytest.mark.parametrize(
    ("name", "layout", "n_devices", "n_experts", "size"),
    [
        (MIXTRAL, "maxtext-scanned", 2, 4, 20),  # of 8 experts of 20 elements
        (MIXTRAL, "maxtext", 5, 8, 4),
        (QWEN, "tunix", 4, 4, 14),  # of 16 experts of 14
        (GPT_OSS, "maxtext", 2, 7, 11),  # of 7 experts of 22
    ],
)
def test_each_device_gets_its_experts_or_its_part_of_each(
    name: str,
    layout: Layout,
    n_devices: int,
    n_experts: int,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage reads its own layers' experts, each element once."""
    directory = checkpoint(tmp_path, name, layout)
    reads: list[tuple[str, Any]] = []
    real = array_view.read_box

    def noted(store: Any, index: Any, where: str) -> np.ndarray:
        reads.append((where.split("'")[1], index))
        return real(store, index, where)

    monkeypatch.setattr(array_view, "read_box", noted)
    whole = load_checkpoint(DIRECTORY / name, dtype=FLOAT)
    group = DeviceGroup(tuple(jax.devices()[:n_devices]))
    part = StagePart(range(whole.config.n_layers), group, first=True, last=True)
    placement = {
        ours: place for ours, place in part.placement(whole.config).items() if ours.startswith(EXPERTS)
    }
    (given,) = load_checkpoint(directory, dtype=FLOAT, placements=[placement]).stages
    up = given[f"{EXPERTS}up.weight"]
    assert {shard.data.shape for shard in up.addressable_shards} == {(n_experts, 2, size, up.shape[-1])}
    for ours, values in given.items():
        np.testing.assert_array_equal(values, whole.parameters[ours], ours)
    counted = {theirs: np.zeros(values.shape, int) for theirs, values in by_hand(name, layout).items()}
    for theirs, index in reads:
        counted[theirs][index] += 1
    for theirs, n in counted.items():
        if ARRAY_OF_EXPERTS.search(theirs) is None:
            assert not n.any(), theirs
        elif layout == "maxtext-scanned":
            assert (n[:, 1] == 1).all() and not n[:, 0].any(), theirs
        else:
            assert (n == (".1." in theirs or "_1." in theirs)).all(), theirs


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("qwen2-moe-shared", "maxtext", "this one has a gate of the shared expert"),
        ("olmoe-grouped", "maxtext", "a qk-norm over all heads"),
        ("qwen3-moe-dense-among-sparse-biases", "tunix", "a layer without experts after one with some"),
        ("qwen3-moe-window-yarn", "maxtext-scanned", "another way from scores"),
        ("deepseek-v2-groups-yarn-dense-first", "maxtext", "another way from scores"),
        ("deepseek-v3-biases-yarn-factor", "maxtext", "biases of queries, keys and values"),
        (MIXTRAL, "tunix", "tunix is known for one mixture of experts alone, Qwen 3 MoE"),
        (MIXTRAL, "gemma", "gemma has no model with"),
    ],
)
def test_models_that_the_trainer_lacks_are_refused(
    name: str, layout: Layout, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        convert_checkpoint(DIRECTORY / name, tmp_path / "out", to=layout)
    assert not (tmp_path / "out").exists()


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    arrays = by_hand(MIXTRAL, "maxtext")
    name = "params.params.decoder.layers_1.MoeBlock_0.wi_1"
    for i, (wrong, words) in enumerate(
        (
            (arrays[name][1:], r"expected shape \[8, 24, 20\] \(X H F\).*found \[7, 24, 20\]"),
            (arrays[name].swapaxes(1, 2), r"expected shape \[8, 24, 20\].*found \[8, 20, 24\]"),
            (None, "wi_1' is missing"),
        )
    ):
        directory = tmp_path / str(i)
        changed = {**arrays, name: wrong}
        save(directory / "0/items", {each: values for each, values in changed.items() if values is not None})
        shutil.copy(DIRECTORY / MIXTRAL / "config.json", directory)
        with pytest.raises(TensorMismatch, match=words):
            load_checkpoint(directory, dtype=FLOAT)
    directory = checkpoint(tmp_path / "v3", V3, "maxtext")
    (directory / "orca.json").write_text('{"rotary": "halves"}')
    with pytest.raises(UnsupportedModel, match="rope_interleave"):
        load_checkpoint(directory, dtype=FLOAT)


def test_another_checkpoint_of_stacked_experts(tmp_path: Path) -> None:
    """A checkpoint described by a user: gate and up in one array, layers first."""
    expected = load_checkpoint(DIRECTORY / MIXTRAL, dtype=FLOAT)
    own = {name: np.asarray(values) for name, values in expected.parameters.items()}
    up, down, router = (
        np.stack([own.pop(f"layers.{i}.{name}") for i in range(2)])
        for name in ("experts.up.weight", "experts.down.weight", "router.weight")
    )
    tree = own | {"up": up.transpose(0, 2, 4, 1, 3), "down": down * 2, "router": router.swapaxes(0, 2)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", tree)
    shutil.copy(DIRECTORY / MIXTRAL / "config.json", tmp_path)
    names: dict[str, Any] = {in_layers(name)[0]: in_layers(name)[0] for name in own}
    names |= {
        "layers.{i}.router.weight": {"name": "router", "axes": "H X L"},
        "layers.{i}.experts.up.weight": {
            "name": [{"name": "up", "part": 0}, {"name": "up", "part": 1}], "axes": "L 2 H X F",
        },
        "layers.{i}.experts.down.weight": {"name": "down", "axes": "L X H F", "multiply": 0.5},
    }  # fmt: skip
    (tmp_path / "orca.json").write_text(json.dumps({"checkpoint": "0", "names": names}))
    loaded = load_checkpoint(tmp_path, dtype=FLOAT)
    for name, values in expected.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], values, name)
    for wrong in ({"axes": "L H F"}, {"axes": "L XH F"}, {"axes": "L X H F", "permute_rope": True}):
        names["layers.{i}.experts.down.weight"] = {"name": "down"} | wrong
        (tmp_path / "orca.json").write_text(json.dumps({"checkpoint": "0", "names": names}))
        with pytest.raises(BadModelConfig, match="an axis X alone for experts, and no permute_rope"):
            load_checkpoint(tmp_path, dtype=FLOAT)
