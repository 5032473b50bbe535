"""EAGLE-3 heads: the published formula, the same tokens, and drafts that are right where they can be."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, HeadMismatch, NotACheckpoint, TensorMismatch
from orca_jax.model import reference
from orca_jax.model_files.draft_model import eagle3_reader
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

Config = dict[str, Any]

LAYER: Config = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
}
LLAMA: Config = {**LAYER, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 7}
QWEN2: Config = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3: Config = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def hybrid(config: Config) -> Config:
    """Qwen 3.5's config of the same sizes: every layer recurrent but two."""
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": 0.5}
    kinds = ["full_attention" if i in (1, 5) else "linear_attention" for i in range(7)]
    return {name: value for name, value in config.items() if name != "rope_theta"} | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": kinds,
        "rope_parameters": rope,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 6,
    }


def matrices(config: Config, rng: np.random.Generator, place: str, width: int) -> Tensors:
    """A random layer, whose queries, keys and values are of `width` inputs."""
    h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {
        "self_attn.q_proj": (n, width),
        "self_attn.k_proj": (k, width),
        "self_attn.v_proj": (k, width),
        "self_attn.o_proj": (h, n),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
    }
    made = {f"{place}{name}.weight": rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    norms = {"input_layernorm": h, "post_attention_layernorm": h}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}
    if config["model_type"] == "qwen2":
        for name, size in (("q", n), ("k", k), ("v", k)):
            made[f"{place}self_attn.{name}_proj.bias"] = rng.normal(0, 0.3, size)
    return made | {f"{place}{name}.weight": 1 + rng.normal(0, 0.3, size) for name, size in norms.items()}


def in_float32(tensors: Mapping[str, np.ndarray]) -> Tensors:
    return {
        name: value.astype(np.float32) if value.dtype == np.float64 else value
        for name, value in tensors.items()
    }


def served_tensors(config: Config, seed: int = 1) -> Tensors:
    rng = np.random.default_rng(seed)
    h, v = config["hidden_size"], config["vocab_size"]
    made: Tensors = {
        "model.embed_tokens.weight": rng.normal(0, 1, (v, h)),
        "model.norm.weight": 1 + rng.normal(0, 0.3, h),
        "lm_head.weight": rng.normal(0, 0.5, (v, h)),
    }
    for i in range(config["num_hidden_layers"]):
        made |= matrices(config, rng, f"model.layers.{i}.", h)
        if config["model_type"] == "qwen3_5_text":
            made = as_hybrid(made, config, rng, i)
    return in_float32(made)


def as_hybrid(made: Tensors, config: Config, rng: np.random.Generator, layer: int) -> Tensors:
    """The tensors with this layer's as Qwen 3.5 has them."""
    here, h = f"model.layers.{layer}.", config["hidden_size"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        made = made | {f"{here}{norm}.weight": made[f"{here}{norm}.weight"] - 1}  # it adds one to them
    if config["layer_types"][layer] == "full_attention":
        query = f"{here}self_attn.q_proj.weight"
        size = config["head_dim"]
        norms = {f"{here}self_attn.{each}_norm.weight": rng.normal(0, 0.3, size) for each in "qk"}
        return made | norms | {query: rng.normal(0, 0.3, (2 * len(made[query]), h))}  # with output gates
    made = {name: tensor for name, tensor in made.items() if not name.startswith(f"{here}self_attn.")}
    keys, n, size = 2 * 8, 4, 6
    shapes = {
        "in_proj_qkv.weight": (2 * keys + n * size, h),
        "in_proj_z.weight": (n * size, h),
        "in_proj_a.weight": (n, h),
        "in_proj_b.weight": (n, h),
        "conv1d.weight": (2 * keys + n * size, 1, 4),
        "A_log": (n,),
        "dt_bias": (n,),
        "norm.weight": (size,),
        "out_proj.weight": (h, n * size),
    }
    own = {f"{here}linear_attn.{name}": rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    return made | own


class Head(NamedTuple):
    """A head as it is published: config.json, tensors, and the layers whose inputs it should read."""

    config: Config
    tensors: Tensors
    layers: tuple[int, ...]

    @property
    def layer(self) -> Config:
        return self.config.get("transformer_layer_config", self.config)

    def written(self, directory: Path) -> Path:
        return write_checkpoint(directory, self.config, self.tensors)


def head_tensors(
    config: Config, place: str, width: int, n_drafted: int | None, seed: int = 2, *, embedding: bool = False
) -> Tensors:
    rng = np.random.default_rng(seed)
    h, v = config["hidden_size"], config["vocab_size"]
    made = matrices(config, rng, place, 2 * h) | {
        f"{place}hidden_norm.weight": 1 + rng.normal(0, 0.3, h),
        "fc.weight": rng.normal(0, 0.3, (h, width)),
        "norm.weight": 1 + rng.normal(0, 0.3, h),
        "lm_head.weight": rng.normal(0, 0.5, (n_drafted or v, h)),
    }
    if embedding:
        made["embed_tokens.weight"] = rng.normal(0, 1, (v, h))
    if n_drafted is not None:
        made |= mapping(np.sort(rng.choice(v, n_drafted, replace=False)), v)
    return in_float32(made)


def mapping(token_ids: np.ndarray, vocab_size: int) -> Tensors:
    """`d2t` and `t2d` of a head that drafts these tokens."""
    chosen = np.isin(np.arange(vocab_size), token_ids).astype(np.uint8)
    return {"d2t": (token_ids - np.arange(len(token_ids))).astype(np.int64), "t2d": chosen}


def llama_head(served: Config, n_drafted: int | None = 23, **fields: Any) -> Head:
    """A head in the form of the paper's authors."""
    h, n = served["hidden_size"], served["num_hidden_layers"]
    sizes = {name: served[name] for name in ("hidden_size", "vocab_size")}
    config = {**LAYER, **sizes, "architectures": ["LlamaForCausalLMEagle3"], **fields}
    config |= {} if n_drafted is None else {"draft_vocab_size": n_drafted}
    ids = fields.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    layers = (2, n // 2, n - 3) if ids is None else tuple(i + 1 for i in ids)
    return Head(config, head_tensors(config, "midlayer.", 3 * h, n_drafted), layers)


def speculators_head(served: Config, kind: str, ids: Sequence[int], **fields: Any) -> Head:
    """A head in the form of vLLM's speculators, with an embedding of its own."""
    sizes = {name: served[name] for name in ("hidden_size", "vocab_size")}
    layer = {**LAYER, **sizes, "model_type": kind}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "served"}},
        "transformer_layer_config": layer,
        "draft_vocab_size": 31,
        "eagle_aux_hidden_state_layer_ids": [*ids],
        "embed_requires_grad": True,
        "tie_word_embeddings": False,
        **fields,
    }
    width = 3 * served["hidden_size"]
    tensors = head_tensors(layer, "layers.0.", width, 31, embedding=True)
    if fields.get("norm_before_fc"):
        scale = 1 + np.random.default_rng(5).normal(0, 0.3, width)
        tensors["input_norm.weight"] = scale.astype(np.float32)
    return Head(config, tensors, tuple(sorted(ids)))


class Formula:
    """EAGLE-3 as the authors' code and speculators have it, in float64, for one text without a cache."""

    def __init__(self, head: Head, embedding: np.ndarray) -> None:
        self._config, self._layer = head.config, head.layer
        self._t = {name: value.astype(np.float64) for name, value in head.tensors.items()}
        self._embedding = self._t.get("embed_tokens.weight", embedding.astype(np.float64))
        self._place = "midlayer." if "midlayer.hidden_norm.weight" in self._t else "layers.0."

    @property
    def token_ids(self) -> np.ndarray:
        """The served model's token of each token that can be drafted."""
        n = len(self._t["lm_head.weight"])
        return np.arange(n) + self._t.get("d2t", np.zeros(n)).astype(int)

    def fused(self, states: np.ndarray) -> np.ndarray:
        if self._config.get("norm_before_fc"):
            states = self._norm(states, "input_norm.weight")
        return states @ self._t["fc.weight"].T

    def __call__(self, token_ids: Sequence[int], before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, draft vocabulary] of all tokens, and what the head goes on from, [T, H]."""
        place = self._place
        embedded = self._norm(self._embedding[[*token_ids]], f"{place}input_layernorm.weight")
        normed = self._norm(before, f"{place}hidden_norm.weight")
        x = normed if self._config.get("norm_before_residual") else before
        x = x + self._attention(np.concatenate([embedded, normed], axis=1))
        y = self._norm(x, f"{place}post_attention_layernorm.weight")
        gate, up = self._linear("mlp.gate_proj", y), self._linear("mlp.up_proj", y)
        x = x + self._linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        out = self._norm(x, "norm.weight")
        return out @ self._t["lm_head.weight"].T, out if self._config.get("norm_output") else x

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self._layer["rms_norm_eps"]) * self._t[name]

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self._t[f"{self._place}{name}.weight"].T

    def _attention(self, x: np.ndarray) -> np.ndarray:
        n, size = len(x), self._layer["head_dim"]
        q, k, v = (self._linear(f"self_attn.{each}_proj", x).reshape(n, -1, size) for each in "qkv")
        if self._layer["model_type"] == "qwen3":
            q = self._norm(q, f"{self._place}self_attn.q_norm.weight")
            k = self._norm(k, f"{self._place}self_attn.k_norm.weight")
        half = size // 2
        angle = np.arange(n)[:, None] / self._layer["rope_theta"] ** (np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        q, k = (
            np.concatenate(
                [
                    each[..., :half] * cos - each[..., half:] * sin,
                    each[..., half:] * cos + each[..., :half] * sin,
                ],
                axis=-1,
            )
            for each in (q, k)
        )
        group = q.shape[1] // k.shape[1]
        scores = np.einsum("qnd,knd->nqk", q, k.repeat(group, axis=1)) / np.sqrt(size)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        mixed = np.einsum("nqk,knd->qnd", weights, v.repeat(group, axis=1)).reshape(n, -1)
        return self._linear("self_attn.o_proj", mixed)


GPT_OSS = "gpt-oss-yarn"


def served_and_head(name: str) -> tuple[Config, Tensors, Head]:
    if name == "gpt-oss":
        config = json.loads((DIRECTORY / GPT_OSS / "config.json").read_text())
        tensors = load_file(DIRECTORY / GPT_OSS / "model.safetensors")
        head = llama_head(config, 50, eagle_aux_hidden_state_layer_ids=[0, 1, 2], head_dim=6)
        return config, tensors, head._replace(layers=(0, 1, 2))
    if name == "hybrid":  # both a recurrent layer and one that attends come before each state
        config = hybrid(LLAMA)
        return config, served_tensors(config), llama_head(LLAMA)
    if name == "llama":
        return LLAMA, served_tensors(LLAMA), llama_head(LLAMA)
    if name == "qwen2":  # all tokens can be drafted, without d2t; layers are named by their outputs
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
        return QWEN2, served_tensors(QWEN2), llama_head(QWEN2, None, eagle_config=ids)
    norms = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    head = speculators_head(QWEN3, "qwen3", [5, 0, 3], **norms)
    return QWEN3, served_tensors(QWEN3), head


def test_the_reference_is_the_published_formula(tmp_path: Path) -> None:
    """The reference takes the states of the first tokens, and the head's outputs before the last ones."""
    config, tensors, head = served_and_head("qwen3")
    directory = write_checkpoint(tmp_path / "served", config, tensors)
    served = load_checkpoint(directory, dtype=jnp.float32)
    read = partial(eagle3_reader, served=served.config)
    loaded = load_checkpoint(head.written(tmp_path / "head"), dtype=jnp.float32, read=read)
    rng = np.random.default_rng(8)
    states, outputs = (rng.normal(0, 1, (n, size)).astype(np.float32) for n, size in ((6, 96), (3, 32)))
    token_ids = [*PREFIX]
    formula = Formula(head, tensors["model.embed_tokens.weight"])
    before = np.concatenate([formula.fused(states.astype(np.float64)), outputs])
    expected, _ = formula(token_ids, before)
    found = reference.forward(
        loaded.config,
        loaded.parameters,
        jnp.array(token_ids),
        states=jnp.array(states),
        outputs=jnp.array(outputs),
    )
    np.testing.assert_allclose(np.asarray(found)[:, formula.token_ids], expected, atol=1e-4, rtol=1e-4)
    assert (np.asarray(found) > -np.inf).sum(axis=1).tolist() == [len(formula.token_ids)] * len(token_ids)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "hybrid"),
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("qwen2", "gpt-oss")),
    ],
)
@pytest.mark.usefixtures("hopeful")
def test_logits_of_the_published_formula(tmp_path: Path, name: str) -> None:
    """After the first draft the head reads its own output in place of the served model's states.

    Tokens that it has drafted and that were right are computed again from those states.
    """
    config, tensors, head = served_and_head(name)
    directory = write_checkpoint(tmp_path / "served", config, tensors)
    served = load_checkpoint(directory, dtype=jnp.float32)
    formula = Formula(head, tensors["model.embed_tokens.weight"])
    token_ids = formula.token_ids
    speculative = f"eagle3:{head.written(tmp_path / 'head')}"
    with LLM(directory, speculative=speculative, speculative_tokens=3, **SIZES) as llm:
        rounds = recorded(llm)
        whole = texts(llm, forced=int(token_ids[3]))
    of_served = dense(served.config, served.parameters)
    others = np.setdiff1d(np.arange(config["vocab_size"]), token_ids)
    n_compared = 0
    for text in whole:
        _, passed = of_served(text.token_ids)
        states = np.concatenate([passed[i] for i in head.layers], axis=1)
        for token_ids_before, logits in text.rounds(rounds):
            known, before = token_ids_before[1:], formula.fused(states[: len(token_ids_before) - 1])
            for found in logits:
                expected, outputs = formula(known, before)
                np.testing.assert_allclose(found[token_ids], expected[-1], atol=1e-4, rtol=1e-4)
                assert (found[others] == -np.inf).all()
                known = [*known, text.drafted(found)]
                before = np.concatenate([before, outputs[-1:]])
                n_compared += 1
    assert n_compared > 30


ONE_HOT: Config = {
    **LLAMA,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 7,
}


def following(seed: int = 1) -> np.ndarray:
    """The token after each token: one of 40, which follow one another in a circle."""
    rng = np.random.default_rng(seed)
    circle = rng.choice(ONE_HOT["vocab_size"], 40, replace=False)
    after = rng.choice(circle, ONE_HOT["vocab_size"])
    after[circle] = np.roll(circle, -1)
    return after


KINDS = {"llama": ONE_HOT, "hybrid": hybrid(ONE_HOT)}


def knowing_served(kind: str = "llama", others: float = 0.0, seed: int = 1) -> Tensors:
    """A model whose token has a state of its own, and whose next token is likely the one that follows.

    What layers add is multiplied by `others`.
    """
    made, after = served_tensors(KINDS[kind]), following(seed)
    n = len(after)
    for name, value in made.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            made[name] = value * np.float32(others)
    made["model.embed_tokens.weight"] = np.eye(n, dtype=np.float32)
    made["model.norm.weight"] = np.full(n, kind == "llama", np.float32)  # Qwen 3.5's norms add one
    made["lm_head.weight"] = np.zeros((n, n), np.float32)
    made["lm_head.weight"][after, np.arange(n)] = 1
    return made


def knowing_head(seed: int = 1) -> Head:
    """A head that goes from the state before a token to that of the token, and drafts what follows it.

    It takes the state of its first layer from the served model, and later its own. It does not see the token.
    """
    head, after = llama_head(ONE_HOT, 40, intermediate_size=64), following(seed)
    t, n = head.tensors, len(after)
    drafted = np.unique(after)
    t |= mapping(drafted, n)
    t["lm_head.weight"] = np.zeros((len(drafted), n), np.float32)
    t["lm_head.weight"][np.searchsorted(drafted, after), np.arange(n)] = 1
    for norm in ("norm", "midlayer.post_attention_layernorm"):
        t[f"{norm}.weight"] = np.ones(n, np.float32)
    t["fc.weight"] = np.eye(n, 3 * n, dtype=np.float32)
    t["midlayer.self_attn.o_proj.weight"] *= 0
    # Unit u of the feed-forward sees token u's state alone, and replaces it by that of the token after it.
    for name in ("gate", "up"):
        t[f"midlayer.mlp.{name}_proj.weight"] = np.eye(n, dtype=np.float32)
    normed = 1 / np.sqrt(1 / n + LAYER["rms_norm_eps"])
    moved = np.eye(n)[after].T - np.eye(n)
    t["midlayer.mlp.down_proj.weight"] = (moved / (normed**2 / (1 + np.exp(-normed)))).astype(np.float32)
    return head


# A hybrid's snapshot needs four blocks, which the common beginnings of prompts fill if blocks are small.
SMALL: Mapping[str, dict[str, Any]] = {"llama": {}, "hybrid": {"block_size": 2}}


@pytest.mark.matrix(but=["llama-n_slots", "hybrid-n_slots"])
@pytest.mark.parametrize(
    "options",
    [{}, {"n_slots": 160}, {"prefix_caching": False}, {"tensor_parallel": 2}],
    ids=["all", "n_slots", "not-shared", "parts"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_drafts(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """With room for all requests, too little of it for those that are admitted, no sharing, and split."""
    directory = write_checkpoint(tmp_path / "served", KINDS[kind], knowing_served(kind, others=0.003))
    head = knowing_head().written(tmp_path / "head")
    assert_same_results(directory, f"eagle3:{head}", **options, **SMALL[kind])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_requests_have_the_results_without_drafts(tmp_path: Path, kind: str) -> None:
    directory = write_checkpoint(tmp_path / "served", KINDS[kind], knowing_served(kind, others=0.003))
    head = knowing_head().written(tmp_path / "head")
    assert_drawn_results_are_the_same(directory, f"eagle3:{head}", **SMALL[kind])


@pytest.mark.parametrize(
    ("kind", "n_examples"),
    [
        ("llama", 6),
        pytest.param("hybrid", 6, marks=pytest.mark.matrix),
        *(pytest.param(kind, 150, marks=[pytest.mark.long, pytest.mark.timeout(1200)]) for kind in KINDS),
    ],
)
def test_drawn_policies_change_no_result(tmp_path: Path, kind: str, n_examples: int) -> None:
    directory = write_checkpoint(tmp_path / "served", KINDS[kind], knowing_served(kind, others=0.003))
    head = knowing_head().written(tmp_path / "head")
    assert_drawn_policies_change_no_result(directory, f"eagle3:{head}", n_examples, **SMALL[kind])


@pytest.mark.parametrize(
    ("kind", "split"),
    [*((kind, {}) for kind in KINDS), *((kind, {"tensor_parallel": 2}) for kind in KINDS)],
    ids=["llama", "hybrid", "llama-parts", "hybrid-parts"],
)
@pytest.mark.matrix(but=["llama", "hybrid", "llama-parts"])
def test_a_head_that_knows_is_always_right(tmp_path: Path, kind: str, split: dict[str, Any]) -> None:
    """In prompts that begin alike, several drafts deep, with many requests together, and new weights."""
    directory = write_checkpoint(tmp_path / "served", KINDS[kind], knowing_served(kind))
    head = knowing_head().written(tmp_path / "head")
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    sizes = SIZES | SMALL[kind] | split
    with LLM(directory, speculative=f"eagle3:{head}", speculative_tokens=3, **sizes) as llm:
        made = llm.service.speculation
        assert made is not None
        found = llm.generate([[*PREFIX, i] for i in range(6)], [params] * 6)
        found += llm.generate([[*PREFIX, *range(30)], [4, 2]], [params] * 2)
        found += llm.generate([[*PREFIX, 50]], [params])
        assert found[-1].n_cached == 8
        assert made.n_right == made.n_compared > 50
        for result in found:
            assert [*following()[result.token_ids[:-1]]] == result.token_ids[1:]
        llm.update_weights(write_checkpoint(tmp_path / "other", KINDS[kind], knowing_served(kind, seed=2)))
        llm.generate([[*PREFIX, 50]], [params])
        assert made.n_right < made.n_compared  # the head is still the old model's


def test_the_embedding_is_the_served_models(tmp_path: Path) -> None:
    """One array on the device for both, also after new weights and sleep."""
    directory = write_checkpoint(tmp_path / "served", LLAMA, served_tensors(LLAMA))
    head = llama_head(LLAMA).written(tmp_path / "head")
    with LLM(directory, speculative=f"eagle3:{head}", **SIZES) as llm:
        (worker,) = head_workers(llm).workers
        engine: Any = llm.service.scheduler.engine
        served = engine._workers.workers[0]

        def are_one() -> bool:
            first, second = (each.stage.parameters["token_embedding"] for each in (worker, served))
            return first is second

        assert are_one()
        before = np.asarray(worker.stage.parameters["token_embedding"])
        llm.update_weights(write_checkpoint(tmp_path / "other", LLAMA, served_tensors(LLAMA, seed=9)))
        assert are_one() and (np.asarray(worker.stage.parameters["token_embedding"]) != before).any()
        arrays = {name: np.asarray(value) for name, value in served.stage.parameters.items()}
        own = {f"draft.{name}": np.asarray(value) for name, value in worker.stage.parameters.items()}
        del own["draft.token_embedding"]  # it is not the head's
        own["draft.final_norm.scale"] = np.full(32, 3, np.float32)
        llm.update_weights(arrays | own)
        assert (np.asarray(worker.stage.parameters["final_norm.scale"]) == 3).all()
        llm.sleep(2)
        llm.wake_up()
        assert are_one()
        assert len(llm.generate([[5, 3, 1]], [SamplingParams(max_tokens=9)])[0].token_ids) == 9


def test_what_is_no_fitting_head_is_refused(tmp_path: Path) -> None:
    """Heads of other models, heads whose tensors are not those of config.json, and several stages."""
    directory = write_checkpoint(tmp_path / "served", LLAMA, served_tensors(LLAMA))
    good = llama_head(LLAMA)

    def refused(kind: type[Exception], message: str, head: Head) -> None:
        place = head.written(tmp_path / "head")
        with pytest.raises(kind, match=message):
            LLM(directory, speculative=f"eagle3:{place}", **SIZES)

    def without(name: str) -> Head:
        return good._replace(tensors={each: t for each, t in good.tensors.items() if each != name})

    def with_one(name: str, tensor: np.ndarray) -> Head:
        return good._replace(tensors=good.tensors | {name: tensor})

    other = llama_head({**LLAMA, "vocab_size": 48})
    refused(
        HeadMismatch, "vocab_size is 48, and the served model's is 64; use a head that was trained", other
    )
    narrow = llama_head({**LLAMA, "hidden_size": 40}, target_hidden_size=32)
    refused(HeadMismatch, r"hidden_size is 40, .* embedding 32, and the head has no embed_tokens", narrow)
    refused(TensorMismatch, "tensor 'd2t' is missing", without("d2t"))
    norm = "midlayer.hidden_norm.weight"
    refused(TensorMismatch, f"'{norm}' is missing", without(norm))
    more = with_one("mask_hidden", np.zeros(3, np.float32))
    refused(TensorMismatch, "mask_hidden.*expected no such tensor", more)
    same = with_one("d2t", np.zeros(23, np.int64) - np.arange(23))
    refused(TensorMismatch, "'d2t': expected .* found tokens from 0 to 0, 1 of 23 different", same)
    floats = with_one("d2t", good.tensors["d2t"].astype(np.float32))
    refused(TensorMismatch, "d2t.*expected dtype I64, I32, found F32", floats)
    place = good.written(tmp_path / "head")
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    with pytest.raises(
        NotACheckpoint, match=r"must be written as safetensors first: python -c .*weights_only"
    ):
        LLM(directory, speculative=f"eagle3:{place}", **SIZES)
    with pytest.raises(ConfigError, match="a draft model does not work with workers or worker_processes yet"):
        EngineConfig(worker_processes=True, speculative="eagle3:head")
    with pytest.raises(ConfigError, match="leave pipeline_parallel at 1, or choose mtp"):
        EngineConfig(pipeline_parallel=2, speculative="eagle3:head")
    with pytest.raises(ConfigError, match="without a head; write eagle3:DIRECTORY"):
        EngineConfig(speculative="eagle3:")
