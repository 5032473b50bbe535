"""The Python of the documents runs as it stands, on the demo model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from examples.own_model import GatedModel
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.model_files.found_model import DEMO_MODEL
from tests.documents import Block, blocks

# By document and first line.
NOT_RUN = {
    (
        "docs/parallelism.md",
        'LLM("path/to/checkpoint", pipeline_parallel=2, tensor_parallel=8)',
    ): "16 devices",
    ("docs/encoder-decoder.md", "from orca_jax import LLM, SamplingParams"): "needs the weights of a T5",
    ("docs/adapters.md", "from orca_jax import LLM"): "needs adapters; tests/whole/adapters",
    (
        "docs/training.md",
        "FunctionModel(embed=embed, layer=layer, unembed=unembed, outside=weights, layers=layers, **sizes)",
    ): "a form to fill in; tests/whole/commands/test_own_model.py has a whole one",
    (
        "docs/training.md",
        "llm.update_weights(state.params)  # MaxText's, for example: nested, layers scanned or not, "
        "still on its mesh",
    ): "needs trainers' packages; tests/whole/training/test_trainers_layouts.py has their layouts",
    (
        "docs/experts.md",
        "(result,) = llm.generate([prompt], SamplingParams(max_tokens=64, return_routed_experts=True))",
    ): "needs a mixture of experts; tests/device/engine/test_routed_experts.py",
    ("docs/rollouts.md", "from functools import partial"): "needs Tunix; tests/whole/rollout runs it",
    (
        "docs/tutorials/write-a-policy.md",
        "from shortest_first import ShortestFirst",
    ): "test_policy_tutorial.py",
    (
        "docs/tutorials/write-a-policy.md",
        "from orca_jax.config import SchedulingConfig, ServingConfig",
    ): "test_policy_tutorial.py",
}
# Run elsewhere: against a server.
OF_CLIENTS = ("from openai import OpenAI", "from anthropic import Anthropic")
CLIENTS = "docs/clients.md"  # tests/clients


def key(block: Block) -> tuple[str, str]:
    return block.document, block.first


PYTHON = [block for block in blocks("python") if block.first not in OF_CLIENTS and block.document != CLIENTS]
RUN = [block for block in PYTHON if key(block) not in NOT_RUN]


def test_what_is_not_run_is_there() -> None:
    assert not set(NOT_RUN) - {key(block) for block in PYTHON}


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Any]]:
    """Names that the text around the blocks introduces."""
    with LLM(max_batch_size=4) as llm:
        weights = load_checkpoint(DEMO_MODEL, dtype=jnp.float32).parameters
        yield {
            "LLM": LLM,
            "SamplingParams": SamplingParams,
            "llm": llm,
            "prompts": ["In the beginning", "And he said"],
            "weights": weights,
            "MyModel": GatedModel,
        }


@pytest.mark.parametrize("block", RUN, ids=str)
def test_it_runs(
    block: Block, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), dict(given))
