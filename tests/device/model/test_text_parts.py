"""The text part of a model of text and images gives transformers' greedy tokens for texts."""

import json
from pathlib import Path

import pytest

from orca_jax import LLM, SamplingParams

TEXT_PARTS = sorted((Path(__file__).parents[2] / "data" / "text_parts").glob("*/golden.json"))


# The dense Qwen 3.5 has the tensors of the mixture's, but for the experts; test_golden.py has the other two.
FURTHER = {"qwen3-5", "gemma4", "llama4"}


@pytest.mark.matrix(but=[path.parent.name for path in TEXT_PARTS if path.parent.name not in FURTHER])
@pytest.mark.parametrize("path", TEXT_PARTS, ids=lambda path: path.parent.name)
def test_greedy_tokens_are_those_of_transformers(path: Path) -> None:
    rows = json.loads(path.read_text())["rows"]
    n_output = len(rows[0]["token_ids"])
    params = SamplingParams(max_tokens=n_output, temperature=0.0, ignore_eos=True)
    # Deterministic: programs of two sizes alone have to be compiled.
    with LLM(path.parent, max_batch_size=4, n_slots=512, max_batch_tokens=128, deterministic=True) as llm:
        results = llm.generate([row["prompt"] for row in rows], params)
    assert [list(result.token_ids) for result in results] == [row["token_ids"] for row in rows]
