# pyright: standard
"""Where a trainer's forward pass and the engine's part: the gap after each layer, and of log-probabilities.

Two gaps are measured of each layer. `error` compares the engine's state with the trainer's after all layers
so far. `alone` gives the engine's layer the trainer's input, so that it shows this layer's difference without
what earlier ones have added: the first layer whose `alone` is too large is where the two differ first.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from orca_jax.checks import named_object
from orca_jax.config import Dtype, EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.launch.layer_by_layer import LayerByLayer
from orca_jax.model_files.found_model import FoundModel
from orca_jax.request.prompts import prompt_token_ids
from orca_jax.rollout.agreement import Agreement, gap
from orca_jax.user_model.find import find_any_model

States = npt.NDArray[np.float32]

_TOLERANCES = {"float32": 1e-4}
_TOLERANCE = 2e-2  # of other dtypes, which have 8 to 11 significant bits


@dataclass(frozen=True, slots=True)
class LayerGap:
    """The gap of one place in the model: the largest over all tokens of |ours - theirs| / |theirs|.

    `alone` is None where the trainer's states do not show this place's input.
    """

    name: str
    error: float
    alone: float | None

    def exceeds(self, tolerance: float) -> bool:
        """Whether this place differs, whatever those before it do; so does a gap that is not a number."""
        return not (self.error if self.alone is None else self.alone) <= tolerance


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The gaps of all places in order, and of the log-probabilities of the given tokens; a table as text.

    `logprobs.kl` is the divergence of the trainer's distributions from the engine's over the whole
    vocabulary, in nats per token.
    """

    places: tuple[LayerGap, ...]
    logprobs: Agreement
    tolerance: float
    clip: float

    @property
    def first(self) -> LayerGap | None:
        """The first place that differs by more than the tolerance."""
        return next((place for place in self.places if place.exceeds(self.tolerance)), None)

    def __str__(self) -> str:
        width = max(len(place.name) for place in self.places)
        lines = [f"{'':{width}}  {'gap':>8}  {'alone':>8}"]
        for place in self.places:
            alone = "" if place.alone is None else f"{place.alone:.2e}"
            mark = "  differs" if place.exceeds(self.tolerance) else ""
            lines.append(f"{place.name:{width}}  {place.error:.2e}  {alone:>8}{mark}".rstrip())
        found, first = self.logprobs, self.first
        verdict = "no layer differs" if first is None else f"the first difference is in {first.name}"
        return "\n".join(
            [
                *lines,
                f"log-probabilities of {found.n_tokens} tokens: gap {found.mean:.2e} on average, "
                f"{found.largest:.2e} at most; KL {found.kl:.2e} per token; {found.outside:.1%} outside a "
                f"clip of {self.clip:g}",
                f"{verdict} (tolerance {self.tolerance:.0e})",
            ]
        )


@dataclass(frozen=True, slots=True)
class _Trained:
    """A trainer's results for T tokens: states [T, H] before each layer and after the last, logits [T, V]."""

    states: Sequence[States]
    logits: States


def layer_gaps(
    model: Any,
    against: str | Callable[..., Any],
    *,
    prompt: str | Sequence[int] | None = None,
    length: int = 64,
    dtype: Dtype | None = None,
    clip: float = 0.2,
    tolerance: float | None = None,
) -> LayerReport:
    """Compare the engine's forward pass with a trainer's, layer by layer.

    `model` is what `LLM` takes. `against` is a function or its name, "package.file:function", which makes the
    trainer's side, and gets `model` if it takes an argument. It returns a module as `LLM(model=...)` takes it
    (docs/training.md), or a function of token ids [T] int32 whose result has `logits` [T, V] and, perhaps,
    `hidden_states`: the first layer's input and then each layer's output, [T, H] each, as attributes or in a
    dict. The last may be after the final norm, and a first axis of size 1 is left out.

    The tokens are `prompt`, a text or ids, or `length` random ones. `tolerance` is the largest gap that
    counts as none, by default 1e-4 in float32 and 2e-2 in other dtypes. Raises ConfigError, InvalidPrompt or
    a CheckpointError.
    """
    if isinstance(against, str):
        against = named_object("against", against)
    if not callable(against):
        raise ConfigError(f"against is {against!r}; name a function that makes the trainer's side")
    config = EngineConfig(model=model, dtype=dtype, generation_config="none")
    found = find_any_model(config)
    token_ids = _token_ids(found, prompt, length)
    layers = LayerByLayer(found, config, token_ids)
    trained = _trained(_made(against, model), token_ids)
    if trained.states and len(trained.states) not in (layers.n_layers + 1, layers.n_layers + 2):
        raise ConfigError(
            f"the trainer's side has {len(trained.states)} hidden states, and the model {layers.n_layers} "
            f"layers; expected {layers.n_layers + 1}: the first layer's input and each layer's output"
        )
    if tolerance is None:
        tolerance = _TOLERANCES.get(layers.dtype.name, _TOLERANCE)
    places, logits = _places(layers, trained)
    return LayerReport(tuple(places), _logprob_gap(logits, trained.logits, token_ids, clip), tolerance, clip)


def _places(layers: LayerByLayer, trained: _Trained) -> tuple[list[LayerGap], States]:
    """The gap of each place, and the engine's logits [T, V]."""
    theirs, places, n = trained.states, list[LayerGap](), layers.n_layers
    normed = len(theirs) == n + 2  # whether the trainer's last state is after the final norm
    x = layers.embedded()
    if theirs:
        places.append(LayerGap("embedding", _gap(x, theirs[0], "hidden state 0"), None))
    for i in range(n):
        out, name = layers.layer(i, x), f"layer {i}"
        if theirs:
            alone, expected = layers.layer(i, theirs[i]), theirs[i + 1]
            where = f"hidden state {i + 1}"
            if i == n - 1 and _is_normed(layers, alone, theirs):
                # The trainer shows only the final norm of this layer's output.
                name, normed = f"{name} with the final norm", True
                alone, ours = layers.final_states(alone), layers.final_states(out)
            else:
                ours = out
            places.append(LayerGap(name, _gap(ours, expected, where), _gap(alone, expected, where)))
        x = out
    logits, alone = np.asarray(layers.logits(x), np.float32), None
    if len(theirs) == n + 2:
        of_theirs = layers.final_states(theirs[n])
        gaps = (_gap(each, theirs[-1], "the last state") for each in (layers.final_states(x), of_theirs))
        places.append(LayerGap("the final norm", *gaps))
    if theirs:
        alone = _gap(layers.logits(theirs[-1], normed=normed), trained.logits, "the logits")
    places.append(LayerGap("the head", _gap(logits, trained.logits, "the logits"), alone))
    return places, logits


def _is_normed(layers: LayerByLayer, output: jax.Array, theirs: Sequence[States]) -> bool:
    """Whether the last of L + 1 states is after the final norm, as transformers has it.

    `output` is that of the engine's last layer for the trainer's input; whatever is closer decides.
    """
    if not layers.has_final_norm or len(theirs) != layers.n_layers + 1:
        return False
    normed = layers.final_states(output)
    if normed.shape != output.shape:
        return normed.shape == theirs[-1].shape
    return _gap(normed, theirs[-1], "the last state") < _gap(output, theirs[-1], "the last state")


def _gap(ours: npt.ArrayLike, theirs: npt.ArrayLike, what: str) -> float:
    """The largest relative distance of a token's vector. Raises ConfigError for other shapes."""
    a, b = np.asarray(ours).astype(np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        raise ConfigError(f"{what} of the trainer's side has the shape {[*b.shape]}, expected {[*a.shape]}")
    apart, size = np.linalg.norm(a - b, axis=1), np.linalg.norm(b, axis=1)
    return float((apart / np.maximum(size, np.finfo(np.float32).tiny)).max())


def _logprob_gap(ours: States, theirs: States, token_ids: npt.NDArray[np.int32], clip: float) -> Agreement:
    """The gap of the log-probabilities of each token after the first, with the exact divergence."""
    a, b = (_log_softmax(each[:-1].astype(np.float64)) for each in (ours, theirs))
    taken = np.arange(len(token_ids) - 1), token_ids[1:]
    return replace(gap(b[taken] - a[taken], clip), kl=float((np.exp(b) * (b - a)).sum(axis=1).mean()))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = logits - logits.max(axis=1, keepdims=True)
    return above - np.log(np.exp(above).sum(axis=1, keepdims=True))


def _token_ids(found: FoundModel, prompt: str | Sequence[int] | None, length: int) -> npt.NDArray[np.int32]:
    if prompt is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, found.config.vocab_size, length).astype(np.int32)
    return np.asarray(prompt_token_ids(found.name, found.tokenizer, prompt), np.int32)


def _made(make: Callable[..., Any], model: object) -> Any:
    """Call the user's function, with `model` if it takes an argument."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:
        return make()
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return make(model) if needed else make()


def _trained(side: Any, token_ids: npt.NDArray[np.int32]) -> _Trained:
    """The trainer's states and logits. Raises ConfigError."""
    if isinstance(side, nnx.Module) and hasattr(side, "layers") and hasattr(side, "unembed"):
        return _of_module(side, token_ids)
    if not callable(side):
        raise ConfigError(
            f"against makes a {type(side).__name__}; it must make a module with layers, embed and unembed, "
            "or a function of token ids"
        )
    result = side(token_ids)
    named: Any = (
        result if isinstance(result, Mapping) else vars(result) if hasattr(result, "__dict__") else {}
    )
    logits = named.get("logits", getattr(result, "logits", None))
    states = named.get("hidden_states", getattr(result, "hidden_states", None))
    if logits is None:
        raise ConfigError(
            f"the trainer's side returned a {type(result).__name__} without logits; return a dict with "
            "logits [T, V] and hidden_states"
        )
    return _Trained([_as_matrix(state) for state in states or ()], _as_matrix(logits))


def _as_matrix(value: Any) -> States:
    array = np.asarray(jnp.asarray(value, jnp.float32) if isinstance(value, jax.Array) else value)
    array = array.astype(np.float32)
    return array[0] if array.ndim == 3 and array.shape[0] == 1 else array


def _of_module(model: Any, token_ids: npt.NDArray[np.int32]) -> _Trained:
    """Run a module as in training, with plain causal attention."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    positions = jnp.arange(len(token_ids), dtype=jnp.int32)
    states = [model.embed(jnp.asarray(token_ids), positions)]
    for layer in model.layers:
        states.append(layer(states[-1], positions, attend))
    return _Trained([_as_matrix(x) for x in states], _as_matrix(model.unembed(states[-1])))
