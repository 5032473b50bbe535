"""The engine as Tunix's rollout: `ClusterConfig(rollout_engine=OrcaRollout)`, or a partial of it."""

# Tunix is an extra, and not installed where the project is checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from orca_jax.errors import ConfigError, NotSupported
from orca_jax.launch.new_weights import named_arrays
from orca_jax.llm import LLM
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.rollout.rollout import Rollout
from orca_jax.rollout.sample import Key, Sample


class OrcaRollout(BaseRollout):
    """Samples from, and scores with, an engine that has the trainer's weights.

    `rollout_actor` is the trainer's model: Tunix's Llama3, Qwen2, Qwen3, Gemma, or Gemma3 for text.
    Its weights are copied to the engine now and at each `update_params`. `tokenizer` and `rollout_config` are
    Tunix's. `mesh` is not used: the engine is on the first devices of JAX, `tensor_parallel` times
    `pipeline_parallel` of them.

    If the model has LoRA adapters, all of one rank, their products are merged into the engine's weights,
    multiplied with alpha over rank. The model does not record alpha: pass that of the Qwix rule as
    `lora_alpha`. With `merge` False they stay beside the weights, as a LoRA adapter of the engine: an update
    moves the adapters alone, and the base's weights are the trainer's to the bit.

    `engine` are further arguments of LLM, such as max_batch_size and deterministic. By default the engine
    takes sequences up to the `kv_cache_size` of `rollout_config`, in its `data_type` or else the dtype of the
    model's weights. The attribute `llm` is the engine. Raises NotSupported for another model, and ConfigError
    for one with adapters but no `lora_alpha`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        lora_alpha: float | None = None,
        merge: bool = True,
        **engine: Any,
    ) -> None:
        self._lora_alpha = lora_alpha
        config = rollout_config or RolloutConfig()
        self._tokenizer = tokenizer if hasattr(tokenizer, "dedup_bos_ids") else TokenizerAdapter(tokenizer)
        state = nnx.state(rollout_actor, nnx.Param)
        longest = max(config.kv_cache_size, config.max_prompt_length + config.max_tokens_to_generate)
        fields = config_fields(rollout_actor, longest)
        dtype = config.data_type or jax.tree.leaves(state)[0].dtype
        adapters = {} if merge else _adapters_of(named_arrays(state))
        self._adapter = _ADAPTER if adapters else None
        if adapters:
            engine = {"max_loras": 1, "max_lora_rank": max(_ranks(adapters)), **engine}
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(fields))
            self.llm = LLM(
                directory,
                load_format="dummy",
                **{"dtype": np.dtype(dtype).name, "max_batch_size": 64, **engine},
            )
        # With the trainer's own module Tunix would consider the weights shared, and never call update_params.
        graph, variables = nnx.split(rollout_actor)
        self._model = nnx.merge(graph, jax.eval_shape(lambda: variables))
        self._rollout = Rollout(self.llm, max_groups=1 << 20, max_tokens=1 << 40)  # a call takes what it gave
        self._calls = itertools.count()
        self.update_params(state)

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """A sample of each prompt, which is a text.

        `tokens` are unpadded, with the end token that ended them; `text` is without it. Prompts are padded on
        the left to `max_prompt_length`, or if one is longer to the next power of two. `logprobs` are those of
        the sampled tokens if `return_logprobs`; `logits` are not returned.

        With a `seed` the samples are the same at each call; without one they differ. Raises NotSupported for
        log-probabilities at a temperature other than 1 (or 0), and a leaf of InvalidRequest for prompts
        and parameters that the engine cannot take.
        """
        if kwargs:
            raise NotSupported(f"generate does not know {', '.join(kwargs)}", param=next(iter(kwargs)))
        temperature = rollout_config.temperature
        if rollout_config.return_logprobs and temperature not in (0.0, 1.0):
            raise NotSupported(
                f"return_logprobs at temperature {temperature}: the engine reports the model's own "
                "log-probabilities, which are those of the samples at temperature 1; use get_per_token_logps",
                param="return_logprobs",
            )
        ends = tuple(rollout_config.eos_tokens or [self.eos_id()])
        token_ids = [self._encoded(prompt) for prompt in prompts]
        seed = self._seed(rollout_config.seed)
        sampling = SamplingParams(
            max_tokens=rollout_config.max_tokens_to_generate,
            temperature=temperature,
            top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
            top_k=rollout_config.top_k or 0,
            ignore_eos=True,
            stop_token_ids=ends,
            logprobs=0 if rollout_config.return_logprobs else None,
        )
        samples = self._samples(token_ids, [replace(sampling, seed=seed + i) for i in range(len(token_ids))])
        return RolloutOutput(
            text=[self._text(sample.token_ids.tolist(), ends) for sample in samples],
            logits=None,
            tokens=[sample.token_ids for sample in samples],
            left_padded_prompt_tokens=self._left_padded(token_ids, rollout_config.max_prompt_length),
            logprobs=[sample.logprobs for sample in samples] if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """The model's log-probabilities of the completions' tokens, [B, C] float32; 0 for padding.

        prompt_tokens [B, P] are padded on the left, completion_tokens [B, C] on the right.
        """
        pad_id = self.pad_id()
        prompts, outputs = list[list[int]](), list[list[int]]()
        for prompt, completion in zip(np.asarray(prompt_tokens), np.asarray(completion_tokens), strict=True):
            (real,) = np.nonzero(prompt != pad_id)
            (kept,) = np.nonzero(completion != pad_id)
            prompts.append(prompt[real[0] if len(real) else len(prompt) :].tolist())
            outputs.append(completion[: kept[-1] + 1 if len(kept) else 0].tolist())
        # Without a prompt the first token has no log-probability, and begins the others.
        unprompted = [not prompt for prompt in prompts]
        scores = self._rollout.score(
            [prompt or output[:1] for prompt, output in zip(prompts, outputs, strict=True)],
            [output[n:] for n, output in zip(unprompted, outputs, strict=True)],
            adapter=self._adapter,
        )
        logps = np.zeros(completion_tokens.shape, np.float32)
        for row, n, score in zip(logps, unprompted, scores, strict=True):
            row[n : n + len(score)] = score
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Copy the trainer's weights, an nnx.State, to the engine; its requests finish before.

        For a model with adapters they may be all weights or only the adapters, as Tunix passes them. Raises
        TensorMismatch for weights of another model.
        """
        arrays = named_arrays(params)
        adapters = _adapters_of(arrays)
        scale = self._lora_scale(adapters)
        others = {name: value for name, value in arrays.items() if name not in adapters}
        if others:
            self._rollout.update(others, running="finish", layout="tunix", cast=True)
        if scale is not None and self._adapter is not None:
            self._rollout.update(adapters, running="finish", adapter=self._adapter, lora_scale=scale)
        elif scale is not None:
            self._rollout.update(adapters, running="finish", layout="tunix", lora_scale=scale)

    def _lora_scale(self, adapters: Mapping[str, jax.Array]) -> float | None:
        """The factor of these adapters' products; None without adapters."""
        ranks = _ranks(adapters)
        if not ranks:
            return None
        if len(ranks) > 1:
            raise NotSupported(
                f"the trainer's adapters have the ranks {sorted(ranks)}; give all of them one rank",
                param="rollout_actor",
            )
        if self._lora_alpha is None:
            raise ConfigError(
                "the trainer's model has LoRA adapters: give OrcaRollout the lora_alpha of their Qwix rule"
            )
        return self._lora_alpha / ranks.pop()

    def pad_id(self) -> int:
        """The tokenizer's padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's end-of-sequence token."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """The trainer's module with shapes in place of weights, which are in `llm`.

        So ClusterConfig's offload_to_cpu cannot move them; `llm.sleep` can.
        """
        return self._model

    def close(self) -> None:
        """Free the engine's memory."""
        self._rollout.close()
        self.llm.close()

    def _encoded(self, prompt: str) -> list[int]:
        """Encode a prompt as Tunix's own sampler does."""
        bos_id = self._tokenizer.bos_id()
        token_ids = [*([bos_id] if bos_id else []), *self._tokenizer.encode(prompt)]
        return [int(token_id) for token_id in self._tokenizer.dedup_bos_ids(token_ids)]

    def _samples(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Sample]:
        """A sample of each prompt, in their order."""
        keys = list[Key]()
        try:
            for token_ids, params in zip(prompts, sampling, strict=True):
                keys.append(self._rollout.submit(token_ids, params, adapter=self._adapter))
        finally:  # a prompt that is refused leaves nothing running
            taken = self._rollout.take(len(keys), timeout=_A_DAY) if keys else []
        groups = {group.key: group for group in taken}
        return [groups[key].samples[0] for key in keys]

    def _text(self, token_ids: list[int], ends: tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids[:-1] if token_ids[-1] in ends else token_ids)

    def _left_padded(self, prompts: Sequence[Sequence[int]], length: int) -> np.ndarray:
        longest = max(map(len, prompts))
        if longest > length:
            length = 1 << (longest - 1).bit_length()
        padded = np.full((len(prompts), length), self.pad_id(), np.int32)
        for row, token_ids in zip(padded, prompts, strict=True):
            row[length - len(token_ids) :] = token_ids
        return padded

    def _seed(self, seed: Any) -> int:
        """The first sample's seed, from a whole number, a JAX key, or the number of this call."""
        if seed is None:
            return next(self._calls) << 32
        if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            seed = jax.random.key_data(seed)
        high, low = [0, 0, *np.asarray(seed).reshape(-1).tolist()][-2:]
        return (int(high) & 0x7FFF) << 48 | (int(low) & 0xFFFF_FFFF) << 16


_A_DAY = 86_400.0  # seconds, the limit of a call; a failure of the engine is noticed at once
_ADAPTER = "policy"  # the name of the trainer's adapters in the engine


def _adapters_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arrays.items() if name.endswith(("_lora_a", "_lora_b"))}


def _ranks(adapters: Mapping[str, Any]) -> set[int]:
    return {array.shape[-1 if name.endswith("_a") else 0] for name, array in adapters.items()}


# Tunix's Llama 3 and Qwen 3 rotate with this, whatever their config's rope_theta says (0.1.7).
_ROPE_THETA = 1_000_000
# And its Gemma 1 and 2 with this, while Gemma's norms have this epsilon.
_GEMMA_ROPE_THETA, _GEMMA_EPS = 10_000, 1e-6

# By the module of the Tunix model, whose "gemma" is both Gemma 1 and Gemma 2.
_MODEL_TYPES = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_KINDS = {"GLOBAL": "full_attention", "LOCAL_SLIDING": "sliding_attention"}


def config_fields(model: Any, n_positions: int) -> dict[str, Any]:
    """The fields of config.json for a Tunix model that is used with `n_positions` positions.

    Raises NotSupported for a model other than Llama 3, Qwen 2, Qwen 3, and Gemma for text.
    """
    # A model with adapters has a class of Qwix's, which is derived from Tunix's.
    modules = {each.__module__ for each in type(model).__mro__}
    families = [*_MODEL_TYPES, "gemma", "gemma3"]
    family = next((name for name in families if any(m.endswith(f".{name}.model") for m in modules)), None)
    config = getattr(model, "config", None)
    if (
        family is None
        or (family != "qwen3" and getattr(config, "num_experts", None))
        or getattr(config, "vision_config", None) is not None
    ):
        raise NotSupported(
            f"the rollout model is {type(model).__module__}.{type(model).__name__}; it must be Tunix's "
            "Llama3, Qwen2, Qwen3, Gemma, or a Gemma3 without vision",
            param="rollout_actor",
        )
    assert config is not None
    shared = {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": n_positions,
    }
    if family in _MODEL_TYPES:
        tied = getattr(config, "weight_tying", None)
        fields = {
            "model_type": _MODEL_TYPES[family],
            "vocab_size": config.vocab_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": float(config.rope_theta if family == "qwen2" else _ROPE_THETA),
            "tie_word_embeddings": bool(config.use_tied_embedding if tied is None else tied),
            "hidden_act": "silu",
        }
        return shared | fields | _experts_fields(config)
    shared |= {
        "vocab_size": config.num_embed,
        "rms_norm_eps": _GEMMA_EPS,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": config.sliding_window_size,
        "layer_types": [_KINDS[layer.attn.attn_type.name] for layer in model.layers],
    }
    return shared | (_gemma3_fields(config) if family == "gemma3" else _gemma_fields(config, shared))


def _experts_fields(config: Any) -> dict[str, Any]:
    if not getattr(config, "num_experts", None):
        return {}
    return {
        "model_type": "qwen3_moe",
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.hidden_dim,
        "norm_topk_prob": True,
    }


def _gemma_fields(config: Any, shared: dict[str, Any]) -> dict[str, Any]:
    rotary = {"rope_theta": _GEMMA_ROPE_THETA}
    if config.use_post_attn_norm and config.use_post_ffw_norm:
        return rotary | {
            "model_type": "gemma2",
            "query_pre_attn_scalar": config.head_dim,
            "attn_logit_softcapping": config.attn_logits_soft_cap,
            "final_logit_softcapping": config.final_logit_softcap,
        }
    caps = (config.attn_logits_soft_cap, config.final_logit_softcap)
    if (
        config.use_post_attn_norm
        or config.use_post_ffw_norm
        or caps != (None, None)
        or "sliding_attention" in shared["layer_types"]
    ):
        raise NotSupported(
            "the rollout model is neither Gemma 1 nor Gemma 2: it must have all of the norms after attention "
            "and feed-forward, or none of these, soft caps and windows",
            param="rollout_actor",
        )
    return rotary | {"model_type": "gemma", "layer_types": None, "sliding_window": None}


def _gemma3_fields(config: Any) -> dict[str, Any]:
    by_head = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"

    def rotary(base: float, factor: float) -> dict[str, Any]:
        scaling = (
            {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": float(factor)}
        )
        return {"rope_theta": float(base), **scaling}

    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": config.head_dim if by_head else config.embed_dim // config.num_heads,
        "rope_parameters": {
            "full_attention": rotary(config.global_base_frequency, config.global_scale_factor),
            "sliding_attention": rotary(config.local_base_frequency, config.local_scale_factor),
        },
    }
