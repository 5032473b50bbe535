"""`--follow` on runs that a trainer saves without Orbax.

A file of its own, since the engine of test_trainers_layouts.py forbids to compile, to all in its process.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.service.follower import CheckpointFollower
from tests.device.checkpoint.test_trainers import DIRECTORY, golden_of


@pytest.mark.parametrize(
    "name, step, last",
    [
        ("levanter-llama", "step-3", "metadata.json"),
        pytest.param("easydel-qwen2-step", "run-3", "checkpoint_metadata.json", marks=pytest.mark.long),
    ],
)
def test_steps_without_orbax_are_followed(name: str, step: str, last: str, tmp_path: Path):
    """A step is loaded once its last file is there."""
    golden, events = golden_of(name), list[str]()
    shutil.copy(DIRECTORY / name / "config.json", tmp_path)
    sizes: dict[str, Any] = {"max_batch_size": 4, "n_slots": 256, "max_batch_tokens": 64}
    with LLM(tmp_path, load_format="dummy", dtype="float32", **sizes) as llm:
        follower = CheckpointFollower(tmp_path, llm.controls, on_event=events.append)
        shutil.copytree(DIRECTORY / name / step, tmp_path / step)
        (tmp_path / step / last).rename(tmp_path / "later")
        assert not follower.look()
        assert "step 3 is left out until its files change" in events[-1]
        (tmp_path / "later").rename(tmp_path / step / last)
        assert follower.look() and llm.weights_version == 3
        sampling = SamplingParams(max_tokens=golden.tokens.shape[1], temperature=0, ignore_eos=True)
        results = llm.generate(golden.prompts.tolist(), sampling)
        assert [result.token_ids for result in results] == golden.tokens.tolist()
