"""The table of weights against numbers worked out by hand, and against docs/checkpoints.md."""

import itertools
import re
from typing import Any

import pytest

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, parameter_table, stage_bytes, stage_parameters
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import parameter_count
from orca_jax.planning.stage_layers import stage_layers
from tests.gpt_config import gpt_config
from tests.places import ROOT

# Elements; and bytes in bfloat16 of each device: of one stage, of two, and of two on two devices each.
PRESET_WEIGHTS: dict[str, tuple[int, list[int], list[int], list[int]]] = {
    "demo": (3_814_912, [7_629_824], [4_469_760, 4_208_640], [2_369_024, 2_107_904]),
    "gpt2": (124_439_808, [248_879_616], [163_822_080, 162_252_288], [82_725_888, 81_156_096]),
    "gpt2-xl": (1_557_611_200, [3_115_222_400], [1_639_657_600, 1_636_387_200], []),
    "gpt3-13b": (
        12_853_626_880,
        [25_707_253_760],
        [13_121_658_880, 13_100_707_840],
        [6_571_929_600, 6_550_978_560],
    ),
    "gpt3-101b": (
        101_210_050_560,
        [202_420_101_120],
        [101_746_114_560, 101_704_212_480],
        [50_896_486_400, 50_854_584_320],
    ),
    "gpt3-175b": (
        174_604_836_864,
        [349_209_673_728],
        [175_248_113_664, 175_197_831_168],
        [87_652_761_600, 87_602_479_104],
    ),
    "gpt3-341b": (
        340_566_743_040,
        [681_133_486_080],
        [341_370_839_040, 341_307_985_920],
        [170_722_406_400, 170_659_553_280],
    ),
}
# Norms before, embedding size (0: no projection), tied, biases: elements; and bytes in float32 of each of two
# devices, of the first two layers' stage and of the last one's.
OPTION_WEIGHTS: dict[tuple[bool, int, bool, bool], tuple[int, list[int]]] = {
    (True, 0, True, True): (8320, [14144, 6432]),
    (True, 0, True, False): (7984, [13568, 6144]),
    (True, 0, False, True): (9136, [14144, 6432]),
    (True, 0, False, False): (8800, [13568, 6144]),
    (True, 8, True, True): (8168, [13824, 6112]),
    (True, 8, True, False): (7832, [13248, 5824]),
    (True, 8, False, True): (8576, [13824, 6112]),
    (True, 8, False, False): (8240, [13248, 5824]),
    (False, 0, True, True): (8288, [14144, 6304]),
    (False, 0, True, False): (7952, [13568, 6016]),
    (False, 0, False, True): (9104, [14144, 6304]),
    (False, 0, False, False): (8768, [13568, 6016]),
    (False, 8, True, True): (8136, [13824, 5984]),
    (False, 8, True, False): (7800, [13248, 5696]),
    (False, 8, False, True): (8544, [13824, 5984]),
    (False, 8, False, False): (8208, [13248, 5696]),
}


def small(norms_before: bool, embedding_size: int, tied: bool, biases: bool) -> ModelConfig:
    return gpt_config(
        vocab_size=51,
        n_positions=48,
        hidden_size=16,
        n_layers=3,
        n_heads=2,
        ffn_size=32,
        norm="pre" if norms_before else "post",
        final_norm=norms_before,
        embedding_size=embedding_size or None,
        tie_embeddings=tied,
        use_bias=biases,
        position_offset=2,
    )


@pytest.mark.parametrize("name", PRESET_WEIGHTS)
def test_the_weights_of_a_preset(name: str) -> None:
    n_elements, *by_split = PRESET_WEIGHTS[name]
    assert parameter_count(PRESETS[name]) == n_elements
    for (n_stages, n_devices), expected in zip(((1, 1), (2, 1), (2, 2)), by_split, strict=True):
        if not expected:
            continue  # 25 heads
        model = PRESETS[name].for_devices(n_devices)
        stages = stage_layers(model.n_layers, n_stages)
        assert [stage_bytes(model, layers, n_devices, 2) for layers in stages] == expected


def test_every_combination_of_options_is_here() -> None:
    assert set(OPTION_WEIGHTS) == {*itertools.product((True, False), (0, 8), (True, False), (True, False))}


@pytest.mark.parametrize("options", OPTION_WEIGHTS)
def test_the_weights_of_every_option(options: Any) -> None:
    n_elements, by_stage = OPTION_WEIGHTS[options]
    model = small(*options)
    assert parameter_count(model) == n_elements
    assert [stage_bytes(model, layers, 2, 4) for layers in stage_layers(3, 2)] == by_stage


@pytest.mark.parametrize("options", OPTION_WEIGHTS)
def test_stages_have_every_weight_once_but_for_a_tied_embedding(options: Any) -> None:
    model = small(*options)
    stages = [stage_parameters(model, layers) for layers in stage_layers(3, 3)]
    table = parameter_table(model)
    assert {name for stage in stages for name in stage} == set(table)
    twice = [name for name in table if sum(name in stage for stage in stages) > 1]
    assert twice == (["token_embedding"] if model.embedding.tied else [])


def test_the_documented_shapes_are_those_of_the_table() -> None:
    model = small(True, 0, False, True)
    sizes = {"V": 51, "P": 48, "H": 16, "F": 32, "3": 3, "`position_offset`": 2}
    documented: dict[str, tuple[int, ...]] = {}
    for names, shapes in re.findall(
        r"^\| (`[^|]*) \| (\[[^|]*) \|$", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE
    ):
        listed = re.findall(r"`([a-z_{}.]+)`", names)
        axes = re.findall(r"\[([^\]]*)\]", shapes)
        stem = ""
        for i, name in enumerate(listed):
            stem = name.rpartition(".")[0] if not name.startswith(".") else stem
            shape = axes[min(i, len(axes) - 1)].split(", ")
            documented[stem + name if name.startswith(".") else name] = tuple(
                sum(sizes[term] for term in axis.split(" + ")) for axis in shape
            )
    shapes = {name: parameter.shape for name, parameter in parameter_table(model).items()}
    assert documented == {in_layers(name)[0]: shape for name, shape in shapes.items()}
