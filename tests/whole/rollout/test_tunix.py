"""OrcaRollout against Tunix itself: its models, its sampler and its GRPO learner."""

# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix", reason="the extra `tunix` is not installed")

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from examples.grpo_arithmetic import Characters, cluster, sums, tiny_llama, train
from orca_jax.errors import NotSupported, TensorMismatch
from orca_jax.rollout.tunix import OrcaRollout

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]  # warnings of Tunix and its libraries

SIZES: dict[str, Any] = {
    "num_layers": 2, "vocab_size": 16, "embed_dim": 64, "hidden_dim": 96, "head_dim": 16,
    "rope_theta": 10_000, "norm_eps": 1e-6,
}  # fmt: skip
ENGINE: dict[str, Any] = {"max_batch_size": 16, "n_slots": 1024}
CONFIG = RolloutConfig(max_tokens_to_generate=12, max_prompt_length=8, kv_cache_size=32, temperature=1.0)


def model(name: str, seed: int = 0) -> nnx.Module:
    heads = {"num_heads": 4, "num_kv_heads": 4 if name == "llama3" else 2}
    module, kind = {
        "llama3": (llama3, "Llama3"),
        "llama3 grouped": (llama3, "Llama3"),
        "llama3 tied": (llama3, "Llama3"),
        "qwen2": (qwen2, "Qwen2"),
        "qwen3": (qwen3, "Qwen3"),
    }[name]
    tied = {"weight_tying": True} if name == "llama3 tied" else {}
    config = module.ModelConfig(**SIZES, **heads, **tied)
    return redrawn(getattr(module, kind)(config, rngs=nnx.Rngs(seed)), seed)


def redrawn(module: nnx.Module, seed: int) -> nnx.Module:
    rng = np.random.default_rng(seed)

    def drawn(weight: jax.Array) -> jax.Array:
        near = 1.0 if weight.ndim == 1 else 0.0
        return jnp.asarray(rng.normal(near, 0.3, weight.shape), weight.dtype)

    nnx.update(module, jax.tree.map(drawn, nnx.state(module, nnx.Param)))
    return module


def trainers_logps(module: nnx.Module, prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    logps = common.compute_per_token_logps(
        *nnx.split(module), jnp.asarray(prompts), jnp.asarray(completions), pad_id=0, eos_id=2
    )
    return np.where(before_padding(completions), np.asarray(logps), 0)


def before_padding(completions: np.ndarray) -> np.ndarray:
    """Where the trainer sees what was sampled: the padding token it never sees, even if it was sampled."""
    return np.cumprod(completions != 0, axis=1) == 1


def padded(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    prompts, completions = rng.integers(1, 16, (6, 8)), rng.integers(1, 16, (6, 12))
    for i in range(6):
        prompts[i, : rng.integers(0, 8)] = 0
        completions[i, rng.integers(1, 13) :] = 0
    return prompts, completions


@pytest.mark.parametrize("name", ["llama3", "llama3 grouped", "llama3 tied", "qwen2", "qwen3"])
def test_log_probabilities_are_the_trainers_also_after_an_update(name: str) -> None:
    module = model(name)
    prompts, completions = padded(np.random.default_rng(1))
    rollout = OrcaRollout(module, Characters(), None, CONFIG, **ENGINE)
    try:
        for seed in (0, 1):
            ours = np.asarray(rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions)))
            np.testing.assert_allclose(ours, trainers_logps(module, prompts, completions), atol=1e-4)
            redrawn(module, seed + 7)
            rollout.update_params(nnx.state(module, nnx.Param), (nnx.Param,))
        other = llama3.Llama3(
            llama3.ModelConfig(**{**SIZES, "embed_dim": 32}, num_heads=4, num_kv_heads=2), rngs=nnx.Rngs(0)
        )
        with pytest.raises(TensorMismatch):
            rollout.update_params(nnx.state(other, nnx.Param))
        with pytest.raises(NotSupported, match="LoRA"):
            rollout.update_params(nnx.state(module, nnx.LoRAParam), (nnx.LoRAParam,))
    finally:
        rollout.close()


def test_a_model_with_adapters_is_refused() -> None:
    """Its adapters would be left out of what is sampled."""
    module: Any = model("llama3")
    module.layers[0].attn.q_proj.w_lora_a = nnx.LoRAParam(jnp.ones((16, 2)))
    with pytest.raises(NotSupported, match="LoRA"):
        OrcaRollout(module, Characters(), None, CONFIG, **ENGINE)


def test_what_generate_returns() -> None:
    module = model("llama3 grouped")
    tokenizer = TokenizerAdapter(Characters())
    texts = ["1+2=", "3", "4+5=6 "] * 8
    config = RolloutConfig(
        max_tokens_to_generate=12,
        max_prompt_length=8,
        kv_cache_size=32,
        temperature=1.0,
        return_logprobs=True,
    )
    rollout = OrcaRollout(module, tokenizer, None, config, **ENGINE)
    vanilla = VanillaRollout(module, tokenizer, CacheConfig(32, 2, 2, 16))
    try:
        ours, theirs = rollout.generate(texts, config), vanilla.generate(texts, config)
        assert (rollout.pad_id(), rollout.eos_id()) == (vanilla.pad_id(), vanilla.eos_id()) == (0, 2)
        assert ours.left_padded_prompt_tokens.tolist() == theirs.left_padded_prompt_tokens.tolist()
        assert len(ours.text) == len(texts) == len(ours.tokens)
        assert len({tuple(tokens) for tokens in ours.tokens[::3]}) > 1, "the samples of a prompt differ"
        ended = 0
        for text, tokens in zip(ours.text, ours.tokens, strict=True):
            ends = tokens == 2
            ended += ends.any()
            assert not ends[:-1].any() and (len(tokens) == 12 or ends[-1])
            assert text == tokenizer.decode(tokens[tokens != 2].tolist())
        assert ended
        completions = np.array([np.pad(tokens, (0, 12 - len(tokens))) for tokens in ours.tokens])
        said = np.array([np.pad(logprobs, (0, 12 - len(logprobs))) for logprobs in ours.logprobs])
        exact = trainers_logps(module, ours.left_padded_prompt_tokens, completions)
        np.testing.assert_allclose(np.where(before_padding(completions), said, 0), exact, atol=1e-4)
        # Greedy (for Tunix's sampler that needs top_p None), tokens are the sampler's own, but for the end
        # token, which it drops, and what follows a padding token, which it does not see.
        greedy = RolloutConfig(
            max_tokens_to_generate=12, max_prompt_length=8, kv_cache_size=32, temperature=0.0, top_p=None
        )
        for ours_, theirs_ in zip(
            rollout.generate(texts, greedy).tokens, vanilla.generate(texts, greedy).tokens, strict=True
        ):
            n = [*theirs_.tolist(), 0].index(0) + 1
            assert ours_[ours_ != 2].tolist()[:n] == theirs_.tolist()[:n]
        with pytest.raises(NotSupported, match=r"return_logprobs at temperature 0\.5"):
            rollout.generate(texts, RolloutConfig(temperature=0.5, return_logprobs=True))
    finally:
        rollout.close()


def test_a_seed_gives_the_same_samples_again() -> None:
    module: Any = model("llama3")
    rollout = OrcaRollout(module, Characters(), None, CONFIG, **ENGINE)
    try:

        def tokens(seed: Any) -> list[list[int]]:
            config = RolloutConfig(
                max_tokens_to_generate=12, max_prompt_length=8, kv_cache_size=32, temperature=1.0, seed=seed
            )
            return [each.tolist() for each in rollout.generate(["1+2="] * 4, config).tokens]

        assert tokens(jax.random.PRNGKey(3)) == tokens(jax.random.key(3)) != tokens(jax.random.PRNGKey(4))
        assert tokens(5) == tokens(5) != tokens(None) != tokens(None)
    finally:
        rollout.close()


def test_grpo_learns_as_with_tunix_s_own_rollout() -> None:
    engine = partial(OrcaRollout, max_batch_size=64)
    ours, theirs = train(engine, 10, beta=0.04), train("vanilla", 10, beta=0.04)
    assert len(ours) == len(theirs) == 10
    # Before the first update: 64 rewards each, with a deviation of about 0.4. Then both learn.
    assert abs(ours[0] - theirs[0]) < 0.25
    assert abs(np.mean(ours) - np.mean(theirs)) < 0.15
    assert min(np.mean(ours[-3:]) - ours[0], np.mean(theirs[-3:]) - theirs[0]) > 0.1


def test_the_kl_divergence_begins_at_nothing() -> None:
    """Between the rollout's log-probabilities and the trainer's, of samples of the first step."""
    own = cluster(partial(OrcaRollout, max_batch_size=64), 1)
    (batch,) = sums(1, 0)
    output = own.generate(batch["prompts"].tolist() * 8)
    completions = np.array([np.pad(tokens, (0, 2 - len(tokens))) for tokens in output.tokens])
    ours = own.get_old_per_token_logps(output.left_padded_prompt_tokens, jnp.asarray(completions))
    exact = trainers_logps(tiny_llama(0), output.left_padded_prompt_tokens, completions)
    ours = jnp.where(before_padding(completions), ours, 0)
    np.testing.assert_allclose(np.asarray(ours), exact, atol=1e-4)
    kl = common.compute_kl_divergence(jnp.asarray(exact), ours)
    assert float(jnp.max(kl)) < 1e-6
    own.rollout.close()
