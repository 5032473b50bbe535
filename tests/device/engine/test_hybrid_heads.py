"""The layers of hybrids that predict further tokens: the published formula, and the same tokens."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import ConfigError, TensorMismatch
from orca_jax.families.next_token import next_token_head, next_token_model
from orca_jax.families.parameters import HEAD, TOKEN_EMBEDDING, parameter_table
from orca_jax.families.presets import PRESETS
from orca_jax.model import reference
from orca_jax.planning.cost_model import IterationShape, operations
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint
from tests.device.engine.observed_heads import (  # noqa: F401  (fixtures)
    PREFIX,
    SIZES,
    assert_drawn_policies_change_no_result,
    assert_drawn_results_are_the_same,
    assert_same_results,
    dense,
    free_drafts,
    head_workers,
    hopeful,
    recorded,
    texts,
)
from tests.device.model.golden import DIRECTORY

pytestmark = pytest.mark.usefixtures("free_drafts")

NEXT, TIED = "qwen3-next-grouped", "qwen3-next-dense-among-sparse-tied"
DENSE, SPARSE = "qwen3-5-grouped", "qwen3-5-moe-grouped"
LONG = [*PREFIX, *range(40, 49)]  # four full blocks, after which there is a snapshot
NEMOTRON, LATENT = "nemotron-h-experts-mixer-last", "nemotron-h-experts-latent"


def config_of(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / name / "config.json").read_text())


def is_nemotron(tensors: Tensors) -> bool:
    return "backbone.norm_f.weight" in tensors


def with_mtp(name: str, seed: int = 3) -> Tensors:
    """The golden checkpoint with random tensors under the published names of a layer that drafts."""
    tensors, rng = load_file(DIRECTORY / name / "model.safetensors"), np.random.default_rng(seed)
    config = config_of(name)
    hidden = config["hidden_size"]

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    def like(place: str, here: str) -> Tensors:
        return {
            here + name.removeprefix(place): random(*value.shape)
            for name, value in tensors.items()
            if name.startswith(place)
        }

    if is_nemotron(tensors):
        kinds = config["layers_block_type"]
        made = like(f"backbone.layers.{kinds.index('full_attention')}.", "mtp.layers.0.")
        made |= like(f"backbone.layers.{kinds.index('moe')}.", "mtp.layers.1.")
        norms = ["layers.0.norm", "layers.1.norm", "layers.0.enorm", "layers.0.hnorm"]
        made |= {f"mtp.{each}.weight": 1 + random(hidden) for each in [*norms, "layers.1.final_layernorm"]}
        made["mtp.layers.0.eh_proj.weight"] = random(hidden, 2 * hidden)
    else:
        made = like(f"model.layers.{config['layer_types'].index('full_attention')}.", "mtp.layers.0.")
        norms = ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
        made |= {f"mtp.{each}.weight": random(hidden) for each in norms}
        made["mtp.fc.weight"] = random(hidden, 2 * hidden)
    return tensors | made


def written(directory: Path, name: str, tensors: Tensors) -> Path:
    return write_checkpoint(directory, config_of(name), tensors)


class Formula:
    """The published code's formula, in numpy up to the layer.

    The layer, its norm and the head are those of an ordinary model of the family without recurrent layers,
    whose embedding has a row for each of the text's tokens: the layer's input.
    """

    def __init__(self, directory: Path, name: str, tensors: Tensors) -> None:
        config = config_of(name)
        hidden, self._tensors = config["hidden_size"], tensors
        nemotron = is_nemotron(tensors)
        embedding = "backbone.embeddings.weight" if nemotron else "model.embed_tokens.weight"
        self._embedding = tensors[embedding]
        layer = {name: value for name, value in tensors.items() if name.startswith("mtp.layers.")}
        if nemotron:
            self._eps, self._offset = config["layer_norm_epsilon"], 0
            self._names = [f"mtp.layers.0.{each}.weight" for each in ("enorm", "hnorm", "eh_proj")]
            plain = {f"backbone.{name.removeprefix('mtp.')}": value for name, value in layer.items()}
            for own in self._names:
                del plain[f"backbone.{own.removeprefix('mtp.')}"]
            plain["backbone.norm_f.weight"] = plain.pop("backbone.layers.1.final_layernorm.weight")
            config |= {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2}
        else:
            self._eps, self._offset = config["rms_norm_eps"], 1
            parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
            self._names = [f"mtp.{each}.weight" for each in parts]
            plain = {f"model.{name.removeprefix('mtp.')}": value for name, value in layer.items()}
            plain["model.norm.weight"] = tensors["mtp.norm.weight"]
            config |= {"layer_types": ["full_attention"], "num_hidden_layers": 1, "mlp_only_layers": []}
        plain["lm_head.weight"] = tensors.get("lm_head.weight", self._embedding)
        plain[embedding] = np.zeros((config["vocab_size"], hidden), np.float32)
        if config["model_type"].startswith("qwen3_5"):
            del config["mlp_only_layers"]
        loaded = load_checkpoint(
            write_checkpoint(directory, config | {"tie_word_embeddings": False}, plain), dtype=jnp.float32
        )

        @jax.jit
        def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            passed = list[jax.Array]()
            parameters = {**loaded.parameters, "token_embedding": x}
            logits = reference.forward(loaded.config, parameters, jnp.arange(32), passed=passed)
            return logits, passed[-1]

        self._run = run

    def __call__(self, token_ids: Sequence[int], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logits, and the outputs after the norm, from which the next draft goes on."""
        of_embedding, of_states, project = (self._tensors[name] for name in self._names)
        embedded = self._normed(self._embedding[[*token_ids]], of_embedding)
        x = np.concatenate([embedded, self._normed(states, of_states)], axis=1) @ project.T
        rows = np.zeros_like(self._embedding)
        rows[: len(x)] = x
        logits, outputs = self._run(rows)
        return np.asarray(logits)[: len(x)], np.asarray(outputs)[: len(x)]

    def _normed(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self._eps) * (self._offset + scale)


EVERY = [NEXT, TIED, DENSE, SPARSE, NEMOTRON, LATENT]
_OTHERS = pytest.mark.matrix(but=[NEXT, NEMOTRON])


@pytest.mark.parametrize("name", EVERY)
def test_the_reference_is_the_published_formula(tmp_path: Path, name: str) -> None:
    tensors = with_mtp(name)
    head = load_checkpoint(written(tmp_path / "all", name, tensors), dtype=jnp.float32, read=next_token_head)
    formula = Formula(tmp_path / "plain", name, tensors)
    states = np.random.default_rng(8).normal(0, 1, (len(PREFIX), head.config.hidden_size))
    expected, outputs = formula(PREFIX, states.astype(np.float32))
    embedding = jnp.array(formula._embedding)
    shared = {
        "token_embedding": embedding,
        "head.weight": jnp.array(tensors.get("lm_head.weight", embedding)),
    }
    passed = list[jax.Array]()
    found = reference.forward(
        head.config,
        {**shared, **head.parameters},
        jnp.array(PREFIX),
        states=jnp.array(states, jnp.float32),
        passed=passed,
    )
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(passed[-1], outputs, atol=1e-4, rtol=1e-4)


@_OTHERS
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.usefixtures("hopeful")
def test_logits_of_the_published_formula(tmp_path: Path, name: str) -> None:
    """After the first draft the layer reads its own output, after its norm.

    Tokens that it has drafted and that were right are computed again from the served model's states.
    """
    tensors = with_mtp(name)
    directory = written(tmp_path / "all", name, tensors)
    served, formula = (
        load_checkpoint(directory, dtype=jnp.float32),
        Formula(tmp_path / "plain", name, tensors),
    )
    with LLM(directory, speculative="mtp", speculative_tokens=3, **SIZES) as llm:
        rounds = recorded(llm)
        whole = texts(llm, forced=11)
    of_served, n_compared = dense(served.config, served.parameters), 0
    for text in whole:
        _, (*_, states) = of_served(text.token_ids)
        for token_ids, logits in text.rounds(rounds):
            known, before = token_ids[1:], states[: len(token_ids) - 1]
            for found in logits:
                expected, outputs = formula(known, before)
                np.testing.assert_allclose(found, expected[-1], atol=1e-4, rtol=1e-4)
                known, before = [*known, text.drafted(found)], np.concatenate([before, outputs[-1:]])
                n_compared += 1
    assert n_compared > 30


def knowing(tensors: Tensors, others: float = 0.01, recurrent: float = 0.1) -> Tensors:
    """A model whose next token depends mostly on its last one, and a layer that computes just this.

    What the model's layers add is multiplied by `others`, or `recurrent`, and is nothing in the layer that
    drafts.
    """
    made = dict(tensors)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc2_latent_proj.weight")):
            made[name] = value * np.float32(0 if name.startswith("mtp.") else others)
        if name.endswith("out_proj.weight"):
            made[name] = value * np.float32(recurrent)
    nemotron = is_nemotron(tensors)
    hidden = len(tensors["backbone.norm_f.weight" if nemotron else "model.norm.weight"])
    both = np.eye(hidden, 2 * hidden, dtype=np.float32)
    if nemotron:
        of_both, project = ("layers.0.enorm", "layers.0.hnorm"), "layers.0.eh_proj"
        made["mtp.layers.1.final_layernorm.weight"] = tensors["backbone.norm_f.weight"]
    else:
        of_both, project = ("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc"
        made["mtp.norm.weight"] = tensors["model.norm.weight"]
    for norm in of_both:
        made[f"mtp.{norm}.weight"] = np.full(hidden, nemotron, np.float32)  # Qwen's norms add one
    return made | {f"mtp.{project}.weight": both}


def turning(tensors: Tensors, step: int = 1) -> Tensors:
    """A model that counts up by `step`, and a layer that turns the state before a token by one token.

    The embeddings are the powers of a rotation. The layer does not see the token itself.
    """
    made = knowing(tensors, others=0.0, recurrent=0.0)
    n, hidden = tensors["lm_head.weight"].shape
    angles = 2 * np.pi * step * np.arange(1, hidden // 2 + 1) / n
    turn = np.zeros((hidden, hidden))
    for i, angle in enumerate(angles):
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [
            [np.cos(angle), -np.sin(angle)],
            [np.sin(angle), np.cos(angle)],
        ]
    each = np.stack([np.linalg.matrix_power(turn, i) @ np.tile([1.0, 0.0], hidden // 2) for i in range(n)])
    at = np.arange(n) * step % n
    embedding = np.empty_like(each)
    embedding[at] = each  # token i * step has been turned i times
    nemotron = is_nemotron(tensors)
    for norm in (
        ("backbone.norm_f", "mtp.layers.1.final_layernorm") if nemotron else ("model.norm", "mtp.norm")
    ):
        made[f"{norm}.weight"] = np.full(hidden, nemotron, np.float32)
    made["backbone.embeddings.weight" if nemotron else "model.embed_tokens.weight"] = embedding
    made["lm_head.weight"] = np.roll(embedding, step, axis=0)
    project = "mtp.layers.0.eh_proj.weight" if nemotron else "mtp.fc.weight"
    made[project] = np.concatenate([np.zeros_like(turn), turn], axis=1)
    return {name: value.astype(np.float32) for name, value in made.items()}


@pytest.mark.parametrize("name", [DENSE, pytest.param(NEMOTRON, marks=pytest.mark.matrix)])
def test_a_layer_that_knows_the_state_is_always_right(tmp_path: Path, name: str) -> None:
    """Several drafts deep, from snapshots too, with many requests together, and new weights."""
    tensors = with_mtp(name)
    directory, n = written(tmp_path, name, turning(tensors)), config_of(name)["vocab_size"]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(directory, speculative="mtp", speculative_tokens=3, **SIZES) as llm:
        made = llm.service.speculation
        assert made is not None
        found = llm.generate([[*LONG, i] for i in range(6)], [params] * 6)
        found += llm.generate([[*LONG, *range(15)], [4, 2]], [params] * 2)
        found += llm.generate([[*LONG, 50]], [params])
        assert found[-1].n_cached == 16
        n_before = made.n_compared
        llm.update_weights(written(tmp_path / "other", name, turning(tensors, step=5)))
        again = llm.generate([[*LONG, 50]], [params])
    assert found[-1].token_ids == [(51 + i) % n for i in range(20)]
    assert again[0].token_ids == [(55 + 5 * i) % n for i in range(20)]
    assert made.n_right == made.n_compared > n_before > 50


# Blocks of which the common beginnings of prompts fill four, as many as a snapshot needs.
SMALL_BLOCKS: dict[str, Any] = {"block_size": 2}


@pytest.mark.matrix(but=[f"{DENSE}-all", f"{NEMOTRON}-n_slots"])
@pytest.mark.parametrize(
    "options", [{}, {"n_slots": 160}, {"prefix_caching": False}], ids=["all", "n_slots", "not-shared"]
)
@pytest.mark.parametrize("name", [DENSE, NEXT, NEMOTRON])
def test_tokens_are_those_without_drafts(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """With room for all requests, with too little of it for those that are admitted, and without sharing."""
    directory = written(tmp_path, name, knowing(with_mtp(name)))
    service = assert_same_results(directory, "mtp", **options, **SMALL_BLOCKS)
    snapshots = service.scheduler.kv.snapshots
    assert (snapshots.n_used > 0) if options.get("prefix_caching", True) else snapshots is None


@pytest.mark.matrix
@pytest.mark.parametrize("name", [NEXT, NEMOTRON])
def test_drawn_requests_have_the_results_without_drafts(tmp_path: Path, name: str) -> None:
    directory = written(tmp_path, name, knowing(with_mtp(name)))
    assert_drawn_results_are_the_same(directory, "mtp", **SMALL_BLOCKS)


@pytest.mark.parametrize(
    "n_examples", [6, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_drawn_policies_change_no_result(tmp_path: Path, n_examples: int) -> None:
    directory = written(tmp_path, NEXT, knowing(with_mtp(NEXT)))
    assert_drawn_policies_change_no_result(directory, "mtp", n_examples, **SMALL_BLOCKS)


@pytest.mark.parametrize(
    ("name", "split"),
    [(NEXT, {}), (TIED, {}), (NEXT, {"tensor_parallel": 2}), (NEXT, {"pipeline_parallel": 2})],
    ids=["next", "tied", "parts", "stages"],
)
@pytest.mark.matrix(but=["next", "tied", "stages"])
def test_embedding_and_head_are_the_served_models(tmp_path: Path, name: str, split: dict[str, Any]) -> None:
    """One array on the device for both, also after new weights and sleep; a copy from another stage."""
    directory = written(tmp_path, name, with_mtp(name))
    other = {each: value + np.float32(0.1) for each, value in with_mtp(name, seed=4).items()}
    shared = [TOKEN_EMBEDDING] if name == TIED else [TOKEN_EMBEDDING, HEAD]
    with LLM(directory, speculative="mtp", **split, **SIZES) as llm:
        (worker,) = head_workers(llm).workers
        engine: Any = llm.service.scheduler.engine
        first, *_, last = [*engine._workers.workers] * 2

        def are_one() -> bool:
            of_head, of_first = worker.stage.parameters, first.stage.parameters
            of_last = last.stage.parameters
            assert (HEAD in of_head) is (HEAD in of_last) is (name != TIED)
            if TOKEN_EMBEDDING in of_last:
                return all(of_head[each] is of_last[each] for each in shared)
            copied, own = of_head[TOKEN_EMBEDDING], of_first[TOKEN_EMBEDDING]
            assert copied.devices() == of_last[HEAD].devices() != own.devices()
            return of_head[HEAD] is of_last[HEAD] and np.array_equal(copied, own)

        assert are_one()
        before = np.asarray(worker.stage.parameters[shared[-1]])
        llm.update_weights(written(tmp_path / "other", name, other))
        assert are_one() and (np.asarray(worker.stage.parameters[shared[-1]]) != before).any()
        np.testing.assert_array_equal(
            worker.stage.parameters["states.project"], other["mtp.fc.weight"], strict=True
        )
        llm.sleep(2)
        llm.wake_up()
        assert are_one()
        assert (
            len(llm.generate([[5, 3, 1]], [SamplingParams(max_tokens=9, ignore_eos=True)])[0].token_ids) == 9
        )


def test_the_layer_beside_a_vision_tower(tmp_path: Path) -> None:
    """A whole Qwen 3.5 has it where its text part does: outside of the text's tensors."""
    tensors, config = with_mtp(SPARSE), config_of(SPARSE)
    expected = load_checkpoint(
        written(tmp_path / "text", SPARSE, tensors), dtype=jnp.float32, read=next_token_head
    )
    whole = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": config | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    }
    renamed = {
        f"model.language_model.{each.removeprefix('model.')}" if each.startswith("model.") else each: value
        for each, value in tensors.items()
    }
    renamed["model.visual.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
    directory = write_checkpoint(tmp_path / "whole", whole, renamed)
    found = load_checkpoint(directory, dtype=jnp.float32, read=next_token_head)
    assert found.config == expected.config and found.parameters.keys() == expected.parameters.keys()
    for each, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[each], value)


def test_what_has_no_such_layer_is_refused(tmp_path: Path) -> None:
    without = written(tmp_path / "without", NEXT, load_file(DIRECTORY / NEXT / "model.safetensors"))
    with pytest.raises(TensorMismatch, match=r"tensor 'mtp\..*' is missing"):
        LLM(without, speculative="mtp", **SIZES)
    for name, place in ((NEXT, "mtp.embed_tokens.weight"), (NEMOTRON, "mtp.layers.0.mixer.gate.weight")):
        more = with_mtp(name) | {place: np.zeros((3, 3), np.float32)}
        with pytest.raises(TensorMismatch, match=f"tensor '{place}'.*: expected no such tensor"):
            LLM(written(tmp_path / "more", name, more), speculative="mtp", **SIZES)
    second = with_mtp(NEXT) | {"mtp.layers.1.mlp.gate.weight": np.zeros((3, 3), np.float32)}
    read = load_checkpoint(
        written(tmp_path / "second", NEXT, second), dtype=jnp.float32, read=next_token_head
    )
    assert read.config.n_layers == 1
    with pytest.raises(ConfigError, match=r"is a Falcon-H1 model, whose layers that predict further"):
        LLM(DIRECTORY / "falcon-h1-multipliers", speculative="mtp", **SIZES)
    with pytest.raises(ConfigError, match="a hybrid with layers that attend alone; choose ngram"):
        next_token_model(PRESETS["falcon-h1-0.5b"])


def test_a_presets_layer_shares_embedding_and_head() -> None:
    """`orca plan` counts a shared head's time, and no memory for it, in Qwen3-Next and Nemotron 3."""
    table = parameter_table(next_token_model(PRESETS["qwen3-next-80b-a3b"]))
    assert not {TOKEN_EMBEDDING, HEAD} & {*table}
    assert table["states.project"].shape == (2048, 4096)
    assert table["layers.0.experts.up.weight"].shape == (512, 2, 512, 2048)
    nemotron = next_token_model(PRESETS["nemotron-3-nano-30b-a3b"])
    assert [(layer.mixes, layer.experts is not None) for layer in nemotron.layers] == [
        (True, False),
        (False, True),
    ]
    for tied in (False, True):
        served = PRESETS["qwen3-next-80b-a3b"]
        model = next_token_model(replace(served, embedding=replace(served.embedding, tied=tied)))
        each = operations(model, IterationShape([1], [9]), weight_bytes=2, kv_bytes=2)
        (head,) = (one.n_bytes for one in each if one.kind == "head")
        assert 0 <= head / (2 * 2048 * 151936) - 1 < 1e-3  # and a token's states
