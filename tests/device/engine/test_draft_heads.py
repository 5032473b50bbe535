"""Heads that draft from the served model's hidden states: the published formula, and the same tokens."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, TensorMismatch
from orca_jax.families.next_token import next_token_head
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint
from tests.device.engine.observed_heads import (  # noqa: F401  (fixtures)
    PREFIX,
    SIZES,
    assert_drawn_policies_change_no_result,
    assert_drawn_results_are_the_same,
    assert_same_results,
    dense,
    free_drafts,
    hopeful,
    recorded,
    texts,
)
from tests.device.model.golden import DIRECTORY

pytestmark = pytest.mark.usefixtures("free_drafts")

DEEPSEEK, GLM = "deepseek-v3-groups-yarn-dense-first", "glm4-moe-norms-biases"


def config_of(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / name / "config.json").read_text())


def with_next_layer(name: str, seed: int = 3) -> Tensors:
    """The golden checkpoint with a random layer after the last, under the published names."""
    tensors, rng = load_file(DIRECTORY / name / "model.safetensors"), np.random.default_rng(seed)
    n, hidden = config_of(name)["num_hidden_layers"], config_of(name)["hidden_size"]

    def random(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    last, here = f"model.layers.{n - 1}.", f"model.layers.{n}."
    layer = {name: random(value.shape) for name, value in tensors.items() if name.startswith(last)}
    layer = {here + name.removeprefix(last): value for name, value in layer.items()}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{here}{norm}.weight"] = 1 + random((hidden,))
    layer[f"{here}eh_proj.weight"] = random((hidden, 2 * hidden))
    layer[f"{here}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    layer[f"{here}shared_head.head.weight"] = tensors.get(
        "lm_head.weight", tensors["model.embed_tokens.weight"]
    )
    return tensors | layer


def written(directory: Path, name: str, tensors: Tensors) -> Path:
    return write_checkpoint(directory, config_of(name), tensors)


@pytest.mark.parametrize("name", [DEEPSEEK, pytest.param(GLM, marks=pytest.mark.matrix)])
@pytest.mark.usefixtures("hopeful")
def test_logits_of_the_published_formula(tmp_path: Path, name: str) -> None:
    """DeepSeek-V3, equations 21 to 23; after the first draft the head reads its own output.

    Tokens that it has drafted and that were right are computed again from the served model's states.
    """
    directory = written(tmp_path, name, with_next_layer(name))
    served = load_checkpoint(directory, dtype=jnp.float32)
    head = load_checkpoint(directory, dtype=jnp.float32, read=next_token_head)
    assert head.config.n_layers == 1
    with LLM(directory, speculative="mtp", speculative_tokens=3, **SIZES) as llm:
        rounds = recorded(llm)
        whole = texts(llm, forced=11)
    of_served, of_head = dense(served.config, served.parameters), dense(head.config, head.parameters)
    for text in whole:
        mine = text.rounds(rounds)
        _, (*_, states) = of_served(text.token_ids)
        expected, _ = of_head(text.token_ids[1:], states[:-1])
        for token_ids, logits in mine:
            np.testing.assert_allclose(logits[0], expected[len(token_ids) - 2], atol=1e-4, rtol=1e-4)
        for token_ids, logits in mine:
            known, before = token_ids[1:], states[: len(token_ids) - 1]
            for first, found in pairwise(logits):
                _, (*_, outputs, _) = of_head(known, before)
                known, before = [*known, text.drafted(first)], np.concatenate([before, outputs[-1:]])
                expected, _ = of_head(known, before)
                np.testing.assert_allclose(found, expected[-1], atol=1e-4, rtol=1e-4)


SPLIT: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2},
]


@pytest.mark.matrix(but=["n_slots"])
@pytest.mark.parametrize(
    "options",
    [{}, {"n_slots": 160}, {"prefix_caching": False}, *SPLIT],
    ids=["all", "n_slots", "not-shared", "parts", "stages", "both"],
)
def test_tokens_are_those_without_drafts(tmp_path: Path, options: dict[str, Any]) -> None:
    """With room for all requests, with too little of it for those that are admitted, and without sharing.

    And on several devices.
    """
    directory = written(tmp_path, DEEPSEEK, knowing(with_next_layer(DEEPSEEK)))
    assert_same_results(directory, "mtp", **options)


@pytest.mark.matrix
def test_drawn_requests_have_the_results_without_drafts(tmp_path: Path) -> None:
    directory = written(tmp_path, DEEPSEEK, knowing(with_next_layer(DEEPSEEK)))
    assert_drawn_results_are_the_same(directory, "mtp")


@pytest.mark.parametrize(
    "n_examples", [6, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_drawn_policies_change_no_result(tmp_path: Path, n_examples: int) -> None:
    directory = written(tmp_path, DEEPSEEK, knowing(with_next_layer(DEEPSEEK)))
    assert_drawn_policies_change_no_result(directory, "mtp", n_examples)


def knowing(tensors: Tensors, others: float = 0.01) -> Tensors:
    """A model whose next token depends mostly on its last one, and a head that computes just this.

    What layers add is multiplied by `others`, and is nothing in the head.
    """
    n = config_of(DEEPSEEK)["num_hidden_layers"]
    here, hidden = f"model.layers.{n}.", config_of(DEEPSEEK)["hidden_size"]
    made = dict(tensors)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = value * np.float32(0 if name.startswith(here) else others)
    made[f"{here}eh_proj.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
    for norm in ("enorm", "hnorm"):
        made[f"{here}{norm}.weight"] = np.ones(hidden, np.float32)
    made[f"{here}shared_head.norm.weight"] = tensors["model.norm.weight"]
    return made


def reading_states(tensors: Tensors, seed: int = 1) -> Tensors:
    """A model that maps each token to the next, and a head that predicts from the state before a token alone.

    It does not see the token itself.
    """
    made = knowing(tensors, others=0.0)
    n = config_of(DEEPSEEK)["num_hidden_layers"]
    here, hidden = f"model.layers.{n}.", config_of(DEEPSEEK)["hidden_size"]
    embedding = tensors["model.embed_tokens.weight"]
    rows = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    following = np.random.default_rng(seed).permutation(len(rows))
    for name, images in (
        ("lm_head.weight", following),
        (f"{here}shared_head.head.weight", following[following]),
    ):
        made[name] = np.empty_like(rows)
        made[name][images] = rows
    for norm in ("model.norm", f"{here}shared_head.norm"):
        made[f"{norm}.weight"] = np.ones(hidden, np.float32)
    made[f"{here}eh_proj.weight"] = np.eye(hidden, 2 * hidden, hidden, dtype=np.float32)
    return made


@pytest.mark.matrix(but=["one", "both"])
@pytest.mark.parametrize("split", [{}, *SPLIT], ids=["one", "parts", "stages", "both"])
def test_a_head_that_knows_the_state_is_always_right(tmp_path: Path, split: dict[str, Any]) -> None:
    """In prompts that begin alike, over several iterations, with many requests together, and new weights."""
    tensors = with_next_layer(DEEPSEEK)
    directory = written(tmp_path, DEEPSEEK, reading_states(tensors))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(directory, speculative="mtp", speculative_tokens=1, **split, **SIZES) as llm:
        made = llm.service.speculation
        assert made is not None
        found = llm.generate([[*PREFIX, i] for i in range(6)], [params] * 6)
        found += llm.generate([[*PREFIX, *range(30)], [4, 2]], [params] * 2)
        found += llm.generate([[*PREFIX, 50]], [params])
        assert found[-1].n_cached == 8
        n_before = made.n_compared
        llm.update_weights(written(tmp_path / "other", DEEPSEEK, reading_states(tensors, seed=2)))
        again = llm.generate([[*PREFIX, i] for i in range(6)], [params] * 6)
    assert again[0].token_ids != found[0].token_ids and made.n_compared > n_before + 20
    assert made.n_right == made.n_compared > 50


def test_what_has_no_head_is_refused(tmp_path: Path) -> None:
    without = written(tmp_path / "without", DEEPSEEK, load_file(DIRECTORY / DEEPSEEK / "model.safetensors"))
    with pytest.raises(TensorMismatch, match=r"model\.layers\.2\..* is missing"):
        LLM(without, speculative="mtp", **SIZES)
    with pytest.raises(ConfigError, match=r"and .* is a Qwen 3 model, whose layers that predict further"):
        LLM(DIRECTORY / "qwen3-tied", speculative="mtp", **SIZES)
    with pytest.raises(ConfigError, match="a draft model does not work with workers or worker_processes yet"):
        EngineConfig(worker_processes=True, speculative="mtp")
