"""`orca diff`: the layer that differs from a trainer's forward pass is named, and no other."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.own_model import GatedModel
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import ConfigError, InvalidPrompt, UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.model import reference
from orca_jax.rollout import LayerReport, layer_gaps
from server import cli
from tests.device.model.golden import DIRECTORY as GOLDEN

TOKENS = [5, 9, 2, 31, 7, 7, 40, 1, 12, 33, 8, 3, 22, 17, 6, 30, 4, 11, 2, 19]
Weights = dict[str, jax.Array]


def loaded(name: str) -> tuple[ModelConfig, Weights]:
    found = load_checkpoint(GOLDEN / name, dtype=jnp.float32)
    return found.config, {name: jnp.asarray(value) for name, value in found.parameters.items()}


def states_of(config: ModelConfig, weights: Weights, ids: jax.Array, n_layers: int) -> jax.Array:
    """The state after so many layers, by the reference: its logits with the identity as head."""
    later = tuple(f"layers.{i}." for i in range(n_layers, config.n_layers))
    weights = {name: w * (not name.startswith(later)) for name, w in weights.items()}  # zeros add nothing
    cut = replace(
        config,
        embedding=replace(config.embedding, tied=False),
        final_norm=None,
        logit_multiplier=1.0,
        logit_soft_cap=None,
    )
    return reference.forward(cut, {**weights, "head.weight": jnp.eye(config.hidden_size)}, ids)


def as_transformers(config: ModelConfig, weights: Weights, *, last: str) -> Callable[[np.ndarray], Any]:
    """A trainer's forward pass by the reference; `last` says which states end the list."""

    def forward(token_ids: np.ndarray) -> Any:
        ids = jnp.asarray(token_ids)
        states = [states_of(config, weights, ids, n) for n in range(config.n_layers + 1)]
        if last != "raw":
            normed = by_final_norm(config, weights, states[-1])
            states = [*states[:-1], normed] if last == "normed" else [*states, normed]
        # With transformers' axis for the batch.
        return SimpleNamespace(
            logits=reference.forward(config, weights, ids)[None],
            hidden_states=tuple(state[None] for state in states),
        )

    return forward


def by_final_norm(config: ModelConfig, weights: Weights, x: jax.Array) -> jax.Array:
    """The final norm, by hand: an RMSNorm, perhaps with 1 added to its scale."""
    norm = config.final_norm
    assert norm is not None and norm.kind == "rms_norm"
    scale = weights["final_norm.scale"] + (1 if norm.unit_offset else 0)
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps) * scale


def broken(weights: Weights, name: str) -> Weights:
    return {**weights, name: weights[name] * 1.01}


def compare(name: str, weights: Weights | None = None, last: str = "normed") -> LayerReport:
    config, own = loaded(name)
    forward = as_transformers(config, own if weights is None else weights, last=last)
    return layer_gaps(str(GOLDEN / name), lambda: forward, prompt=TOKENS)


@pytest.mark.parametrize("last", ["raw", "normed", "both"])
def test_equal_forward_passes_do_not_differ(last: str) -> None:
    report = compare("gemma2-caps", last=last)
    assert report.first is None
    assert report.tolerance == 1e-4
    n_layers = loaded("gemma2-caps")[0].n_layers
    assert len(report.places) == 1 + n_layers + (last == "both") + 1
    assert max(place.error for place in report.places) < 1e-4
    assert report.logprobs.n_tokens == len(TOKENS) - 1
    assert report.logprobs.largest < 1e-4 and report.logprobs.outside == 0


@pytest.mark.matrix(but=["qwen3-5-grouped"])
@pytest.mark.parametrize("name", ["qwen3-5-grouped", "qwen3-moe-renormalised", "llama-grouped"])
def test_other_families(name: str) -> None:
    assert compare(name).first is None


@pytest.mark.parametrize(
    ("weight", "place"),
    [
        ("token_embedding", "embedding"),
        ("layers.0.qkv.weight", "layer 0"),
        ("layers.1.down.weight", "layer 1"),
        ("final_norm.scale", "the final norm"),
    ],
)
def test_what_is_broken_is_named(weight: str, place: str) -> None:
    config, weights = loaded("llama-grouped")
    assert config.n_layers > 2, "a layer follows the broken ones"
    report = compare("llama-grouped", broken(weights, weight), last="both")
    assert report.first is not None and report.first.name == place
    if weight.startswith("layers"):
        # Later layers inherit the error, and none of them is blamed.
        assert [each.name for each in report.places if each.exceeds(report.tolerance)] == [place]
        after = report.places[-2]
        assert after.error > report.tolerance and after.alone is not None
        assert after.alone < report.tolerance
    assert report.logprobs.largest > 1e-4


def test_a_broken_head_is_named() -> None:
    config, weights = loaded("llama-grouped")
    assert not config.embedding.tied
    report = compare("llama-grouped", broken(weights, "head.weight"))
    assert report.first is not None and report.first.name == "the head"


def test_the_last_layer_is_named_where_only_its_norm_is_seen() -> None:
    config, weights = loaded("llama-grouped")
    last = config.n_layers - 1
    report = compare("llama-grouped", broken(weights, f"layers.{last}.down.weight"))
    assert report.first is not None and report.first.name == f"layer {last} with the final norm"


def own_model() -> GatedModel:
    return GatedModel(vocab_size=64)


def broken_own_model() -> GatedModel:
    model = own_model()
    model.layers[1].gate.kernel[...] *= 1.02
    return model


def test_a_module_of_ones_own() -> None:
    report = layer_gaps(own_model(), own_model, prompt=TOKENS)
    assert report.first is None and report.logprobs.kl < 1e-10
    assert [place.name for place in report.places] == [
        *("embedding", "layer 0", "layer 1", "layer 2", "the head")
    ]
    report = layer_gaps(own_model(), broken_own_model, prompt=TOKENS)
    assert [place.name for place in report.places if place.exceeds(report.tolerance)] == ["layer 1"]


def test_log_probabilities_are_compared_over_the_vocabulary() -> None:
    model, other = own_model(), own_model()
    other.head.kernel[...] *= 1.5
    report = layer_gaps(model, lambda: lambda ids: {"logits": other(jnp.asarray(ids)[None])}, prompt=TOKENS)
    assert [place.name for place in report.places] == ["the head"], "there are no states to compare"
    ours, theirs = (
        np.asarray(jax.nn.log_softmax(each(jnp.asarray([TOKENS]))[0]), np.float64) for each in (model, other)
    )
    at = np.arange(len(TOKENS) - 1), TOKENS[1:]
    apart = (theirs - ours)[at]
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1)[:-1].mean()
    found = report.logprobs
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert found.mean == pytest.approx(np.abs(apart).mean(), rel=1e-3)
    assert found.outside == pytest.approx(np.mean(np.abs(np.exp(apart) - 1) > 0.2))
    assert 0 < found.outside < 1


def test_states_that_are_no_numbers_differ() -> None:
    model = own_model()
    model.layers[0].up.kernel[...] *= jnp.nan
    report = layer_gaps(own_model(), lambda: model, prompt=TOKENS)
    assert report.first is not None and report.first.name == "layer 0"


@pytest.mark.parametrize(
    ("against", "words"),
    [
        (lambda: 3, "makes a int"),
        (lambda: lambda ids: {"states": ids}, "without logits"),
        (lambda: lambda ids: {"logits": np.zeros((3, 64))}, "the logits of the trainer's side has the shape"),
        (
            lambda: lambda ids: {"logits": np.zeros((len(ids), 64)), "hidden_states": [np.zeros((20, 64))]},
            "has 1 hidden states, and the model 3 layers",
        ),
        ("tests.whole.rollout.test_layer_gaps:TOKENS", "name a function"),
        ("tests.whole.rollout.test_layer_gaps:nothing", "cannot be imported"),
    ],
)
def test_mistakes_in_the_trainers_side(against: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layer_gaps(own_model(), against, prompt=TOKENS)


def test_mistakes_in_the_prompt() -> None:
    with pytest.raises(ConfigError, match="takes 2 to 128"):
        layer_gaps(own_model(), own_model, length=129)
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        layer_gaps(own_model(), own_model, prompt=[1, 64])
    with pytest.raises(InvalidPrompt, match="no tokenizer"):
        layer_gaps(own_model(), own_model, prompt="a text")


def test_layers_that_need_others_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="one by one"):
        layer_gaps(str(GOLDEN / "gemma4-inputs-shared"), own_model, prompt=TOKENS)


THIS = "tests.whole.rollout.test_layer_gaps"


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["diff", f"{THIS}:own_model", "--length", "20", "--against"]
    assert cli.main([*command, f"{THIS}:own_model"]) == 0
    assert "no layer differs (tolerance 1e-04)" in capfd.readouterr().out
    assert cli.main([*command, f"{THIS}:broken_own_model"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "the first difference is in layer 1 (tolerance 1e-04)"
    assert [line.split()[1] for line in lines if line.endswith("differs")] == ["1"]
    assert cli.main([*command, f"{THIS}:broken_own_model", "--tolerance", "0.5"]) == 0
    assert cli.main([*command, "nothing"]) == 2
    assert "package.file:name" in capfd.readouterr().err


def given_the_model(model: object) -> GatedModel:
    assert model == f"{THIS}:own_model"
    return own_model()


def test_the_function_gets_the_model_if_it_takes_one() -> None:
    assert layer_gaps(f"{THIS}:own_model", f"{THIS}:given_the_model", length=8).first is None
