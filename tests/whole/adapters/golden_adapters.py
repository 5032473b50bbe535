"""Reader of tests/data/adapters: LoRA adapters that PEFT saved, and what PEFT computes with them in float32.

scripts/golden/adapters.py makes them. A model's `golden.npz` holds its prompts as that of golden.py does, and
for each adapter, and for the model itself under the name "":

    NAME/scores  float32 [sum of (length - 1)]  log-probability of each prompt's tokens after the first
    NAME/top_ids int32 [prompts, 5], NAME/top float32 [prompts, 5]  the likeliest first tokens
    NAME/outputs int32 [prompts, 6]  greedy tokens of the merged model, alone
    NAME/gaps  float32 [prompts, 6]  best logit less the second best
    NAME/saved uint8   a drawn adapter's config and shapes, in place of its directory (drawn_adapters.py)

Of a model with an encoder, `scores` [6 a prompt] are those of its greedy tokens, 1 where a token is forced,
and `top` those of the second token.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.device.checkpoint.tiny_checkpoint import write_json, write_tensors
from tests.device.model.golden import DIRECTORY as MODELS
from tests.device.model.golden import MARGIN
from tests.places import DATA
from tests.whole.adapters.drawn_adapters import drawn, unpacked

DIRECTORY = DATA / "adapters"
NAMES = tuple(sorted({path.parents[1].name for path in DIRECTORY.glob("*/*/adapter_config.json")}))
DRAWN = tuple(sorted({path.parent.name for path in DIRECTORY.glob("*/golden.npz")} - {*NAMES}))


class Expected(NamedTuple):
    """PEFT's results for one prompt."""

    prompt: list[int]
    scores: np.ndarray
    top: dict[int, float]
    outputs: list[int]  # those before the first whose choice is within the margin
    encoded: bool = False  # by a model with an encoder


class GoldenAdapters(NamedTuple):
    """One model's adapters, and PEFT's results for each of them; "" is the model itself."""

    model: Path
    directories: dict[str, Path]
    expected: dict[str, list[Expected]]


def load_golden_adapters(name: str, room: Path | None = None) -> GoldenAdapters:
    """The golden files of `name`, of NAMES or of DRAWN, whose adapters are written into `room`."""
    with np.load(DIRECTORY / name / "golden.npz") as file:
        arrays = dict(file)
    lengths = arrays["prompt_lengths"]
    prompts = np.split(arrays["prompt_tokens"], np.cumsum(lengths)[:-1])
    directories = {path.parent.name: path.parent for path in (DIRECTORY / name).glob("*/adapter_config.json")}
    for key in arrays:
        adapter, _, kind = key.partition("/")
        if kind == "saved":
            assert room is not None
            config, shapes = unpacked(arrays[key])
            directories[adapter] = room / adapter
            directories[adapter].mkdir()
            write_json(room / adapter / "adapter_config.json", config)
            tensors = {name: drawn(name, shape, config["r"]) for name, shape in shapes.items()}
            write_tensors(room / adapter / "adapter_model.safetensors", tensors)
    expected: dict[str, list[Expected]] = {}
    for adapter in ("", *sorted(directories)):
        every = arrays[f"{adapter}/scores"]
        encoded = (MODELS / name / "encoder_golden.npz").exists()
        scores = np.split(every, len(lengths) if encoded else np.cumsum(lengths - 1)[:-1])
        expected[adapter] = []
        for i, prompt in enumerate(prompts):
            sure = np.append(arrays[f"{adapter}/gaps"][i] < MARGIN, True).argmax()
            top = dict(
                zip(arrays[f"{adapter}/top_ids"][i].tolist(), arrays[f"{adapter}/top"][i], strict=True)
            )
            outputs = arrays[f"{adapter}/outputs"][i][:sure].tolist()
            expected[adapter].append(Expected(prompt.tolist(), scores[i], top, outputs, encoded))
    return GoldenAdapters(MODELS / name, directories, expected)
