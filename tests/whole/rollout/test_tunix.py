"""OrcaRollout against Tunix itself: its models, its sampler and its GRPO learner."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix", reason="the extra `tunix` is not installed")

import qwix
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from examples.grpo_arithmetic import Characters, cluster, reward, sums, tiny_llama, train
from orca_jax.errors import ConfigError, NotSupported, TensorMismatch
from orca_jax.rollout.tunix import OrcaRollout

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]  # warnings of Tunix and its libraries

SIZES: dict[str, Any] = {
    "num_layers": 2, "vocab_size": 16, "embed_dim": 64, "hidden_dim": 96, "head_dim": 16,
    "rope_theta": 10_000, "norm_eps": 1e-6,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "num_embed": 16, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 16,
    "sliding_window_size": 5,
}  # fmt: skip
FULL, LOCAL = gemma.AttentionType.GLOBAL, gemma.AttentionType.LOCAL_SLIDING
GEMMAS: dict[str, Callable[[], nnx.Module]] = {
    "gemma": lambda: gemma.Gemma(gemma_config(4, None, FULL, FULL), rngs=nnx.Rngs(0)),
    "gemma2": lambda: gemma.Gemma(gemma_config(2, 20.0, LOCAL, FULL), rngs=nnx.Rngs(0)),
    "gemma3": lambda: gemma3.Gemma3(
        gemma3.ModelConfig(
            **GEMMA,
            num_layers=7,
            num_kv_heads=2,
            global_base_frequency=1_000_000,
            global_scale_factor=8.0,
            param_dtype=jnp.float32,
        ),
        rngs=nnx.Rngs(0),
    ),
}
LLAMAS = ("llama3", "llama3 grouped", "llama3 tied", "qwen2", "qwen3", "qwen3 experts")
ENGINE: dict[str, Any] = {"max_batch_size": 16, "n_slots": 1024}
CONFIG = RolloutConfig(max_tokens_to_generate=12, max_prompt_length=8, kv_cache_size=32, temperature=1.0)


def gemma_config(n_kv_heads: int, cap: float | None, *kinds: gemma.AttentionType) -> gemma.ModelConfig:
    """A configuration of Tunix's Gemma; with a soft cap it is Gemma 2."""
    return gemma.ModelConfig(
        **GEMMA,
        num_layers=len(kinds),
        num_kv_heads=n_kv_heads,
        final_logit_softcap=cap,
        attn_logits_soft_cap=cap,
        use_post_attn_norm=cap is not None,
        use_post_ffw_norm=cap is not None,
        attention_types=kinds,
    )


def model(name: str, seed: int = 0) -> nnx.Module:
    if name in GEMMAS:
        return redrawn(GEMMAS[name](), seed)
    heads = {"num_heads": 4, "num_kv_heads": 4 if name == "llama3" else 2}
    module, kind = {
        "llama3": (llama3, "Llama3"),
        "llama3 grouped": (llama3, "Llama3"),
        "llama3 tied": (llama3, "Llama3"),
        "qwen2": (qwen2, "Qwen2"),
        "qwen3": (qwen3, "Qwen3"),
        "qwen3 experts": (qwen3, "Qwen3"),
    }[name]
    others: dict[str, Any] = {"weight_tying": True} if name == "llama3 tied" else {}
    if name == "qwen3 experts":
        others = {"num_experts": 6, "num_experts_per_tok": 2}
    config = module.ModelConfig(**SIZES, **heads, **others)
    return redrawn(getattr(module, kind)(config, rngs=nnx.Rngs(seed)), seed)


def redrawn(module: nnx.Module, seed: int) -> nnx.Module:
    rng = np.random.default_rng(seed)

    def drawn(weight: jax.Array) -> jax.Array:
        near = float(jnp.mean(weight)) if weight.ndim == 1 else 0.0  # 1, or of Gemma's norms 0
        return jnp.asarray(rng.normal(near, 0.3, weight.shape), weight.dtype)

    nnx.update(module, jax.tree.map(drawn, nnx.state(module, nnx.Param)))
    return module


def trainers_logps(module: nnx.Module, prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    logps = common.compute_per_token_logps(
        *nnx.split(module), jnp.asarray(prompts), jnp.asarray(completions), pad_id=0, eos_id=2
    )
    return np.where(before_padding(completions), np.asarray(logps), 0)


def before_padding(completions: np.ndarray) -> np.ndarray:
    """The positions that the trainer uses; it ignores padding tokens, even sampled ones."""
    return np.cumprod(completions != 0, axis=1) == 1


def padded(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts padded on the left, except for Gemma 2, whose windows Tunix 0.1.7 shifts by the padding."""
    prompts, completions = rng.integers(1, 16, (6, 8)), rng.integers(1, 16, (6, 12))
    for i in range(6):
        prompts[i, : rng.integers(0, 1 if name == "gemma2" else 8)] = 0
        completions[i, rng.integers(1, 13) :] = 0
    return prompts, completions


@pytest.mark.parametrize("name", [*LLAMAS, *GEMMAS])
def test_log_probabilities_are_the_trainers_also_after_an_update(name: str) -> None:
    module = model(name)
    prompts, completions = padded(np.random.default_rng(1), name)
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
    finally:
        rollout.close()


def with_adapters(name: str, **rule: Any) -> nnx.Module:
    module = model(name)
    tokens = jnp.ones((1, 4), jnp.int32)
    provider = qwix.LoraProvider(**{"module_path": ADAPTED, "rank": 3, "alpha": 6.0} | rule)
    arguments = (tokens, tokens, None, jnp.ones((1, 4, 4), bool))
    return qwix.apply_lora_to_model(module, provider, *arguments, rngs=nnx.Rngs(1))


def redrawn_adapters(module: nnx.Module, seed: int) -> nnx.State:
    rng = np.random.default_rng(seed)
    state = nnx.state(module, nnx.LoRAParam)
    state = jax.tree.map(lambda w: jnp.asarray(rng.normal(0, 0.2, w.shape), w.dtype), state)
    nnx.update(module, state)
    return state


# Every weight of a layer but one, so that some of ours are adapted in part.
ADAPTED = ".*(q_proj|q_einsum|kv_einsum|qkv_einsum|o_proj|attn_vec_einsum|v_proj|gate_proj|down_proj|router)"


@pytest.mark.parametrize("name", ["llama3 grouped", "qwen3", "qwen3 experts", *GEMMAS])
def test_adapters_are_merged(name: str) -> None:
    """The trainer keeps its adapters separate; the divergence from it is zero."""
    module: Any = with_adapters(name)
    n_adapters = len(jax.tree.leaves(nnx.state(module, nnx.LoRAParam)))
    of_layer = {"gemma": 4, "qwen3 experts": 4}.get(name, 5)  # experts have none of their own
    assert n_adapters == 2 * len(module.layers) * of_layer
    prompts, completions = padded(np.random.default_rng(1), name)
    state = redrawn_adapters(module, 3)
    rollout = OrcaRollout(module, Characters(), None, CONFIG, lora_alpha=6.0, **ENGINE)
    try:
        before = None
        for seed in (3, 4, 5):
            ours = np.asarray(rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions)))
            exact = trainers_logps(module, prompts, completions)
            np.testing.assert_allclose(ours, exact, atol=1e-4)
            assert float(jnp.max(common.compute_kl_divergence(jnp.asarray(exact), jnp.asarray(ours)))) < 1e-6
            assert before is None or np.abs(before - ours).max() > 0.01
            before = ours
            state = redrawn_adapters(module, seed + 1)
            if seed == 3:
                rollout.update_params(state, (nnx.LoRAParam,))
            else:
                redrawn(module, seed)
                redrawn_adapters(module, seed + 1)
                rollout.update_params(nnx.state(module, nnx.Param), (nnx.Param,))
    finally:
        rollout.close()


# As ADAPTED, without routers, which have no adapters here unless they are merged.
LINEAR = ADAPTED.replace("|router", "")


@pytest.mark.parametrize("name", ["llama3 grouped", "qwen3", *GEMMAS])
def test_adapters_stay_beside_the_weights(name: str) -> None:
    module: Any = with_adapters(name, module_path=LINEAR)
    prompts, completions = padded(np.random.default_rng(1), name)
    redrawn_adapters(module, 3)
    rollout = OrcaRollout(module, Characters(), None, CONFIG, lora_alpha=6.0, merge=False, **ENGINE)
    try:
        before = None
        for seed in (3, 4, 5):
            ours = np.asarray(rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions)))
            exact = trainers_logps(module, prompts, completions)
            np.testing.assert_allclose(ours, exact, atol=1e-4)
            assert before is None or np.abs(before - ours).max() > 0.01
            before = ours
            rollout.update_params(redrawn_adapters(module, seed + 1), (nnx.LoRAParam,))
        assert rollout.llm.weights_version == 1, "the base's weights came once"
    finally:
        rollout.close()


def test_adapters_that_cannot_be_merged_are_refused() -> None:
    """The samples would otherwise be those of a model without them."""
    with pytest.raises(ConfigError, match="lora_alpha"):
        OrcaRollout(with_adapters("llama3"), Characters(), None, CONFIG, **ENGINE)
    module: Any = with_adapters("llama3")
    rollout = OrcaRollout(module, Characters(), None, CONFIG, lora_alpha=6.0, **ENGINE)
    attention = module.layers[0].attn
    try:
        attention.q_proj.w_lora_a = nnx.LoRAParam(jnp.ones((63, 3)))
        with pytest.raises(TensorMismatch, match=r"q_proj.w_lora_a \[63, 3\] times _lora_b \[3, 4, 16\]"):
            rollout.update_params(nnx.state(module, nnx.LoRAParam), (nnx.LoRAParam,))
        attention.q_proj.w_lora_a = nnx.LoRAParam(jnp.ones((64, 2)))
        with pytest.raises(NotSupported, match=r"ranks \[2, 3\]"):
            rollout.update_params(nnx.state(module, nnx.LoRAParam), (nnx.LoRAParam,))
    finally:
        rollout.close()


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


def test_grpo_with_adapters_beside_the_weights() -> None:
    """In each of ten steps the engine's log-probabilities of its samples are the trainer's."""
    provider = qwix.LoraProvider(module_path=LINEAR, rank=4, alpha=8.0)
    tokens = jnp.ones((1, 4), jnp.int32)
    arguments = (tokens, tokens, None, jnp.ones((1, 4, 4), bool))
    actor = qwix.apply_lora_to_model(tiny_llama(0), provider, *arguments, rngs=nnx.Rngs(1))
    engine = partial(OrcaRollout, max_batch_size=64, lora_alpha=8.0, merge=False)
    own, n_steps = cluster(engine, 10, actor=actor), 0
    before = nnx.to_pure_dict(nnx.state(own.actor_trainer.model, nnx.LoRAParam))
    first = jax.tree.map(np.array, before)

    def seen(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        nonlocal n_steps
        n_steps += 1
        encoded = [[1, *Characters().encode(prompt)] for prompt in prompts]
        left = np.array([[0] * (8 - len(one)) + one for one in encoded])
        right = np.array([(Characters().encode(one) + [0, 0])[:2] for one in completions])
        ours = own.rollout.get_per_token_logps(jnp.asarray(left), jnp.asarray(right))
        exact = trainers_logps(own.actor_trainer.model, left, right)
        np.testing.assert_allclose(np.asarray(ours), exact, atol=1e-4)
        return reward(prompts, completions)

    config = GRPOConfig(num_generations=8, beta=0.0)
    GRPOLearner(rl_cluster=own, algo_config=config, reward_fns=seen).train(list(sums(10, 0)))
    assert n_steps == 10 and own.rollout.llm.weights_version == 1, "the base's weights came once"
    own.rollout.close()
    after = nnx.to_pure_dict(nnx.state(own.actor_trainer.model, nnx.LoRAParam))
    changes = jax.tree.map(lambda one, other: float(np.abs(one - np.asarray(other)).max()), first, after)
    assert min(jax.tree.leaves(changes)) > 1e-3, "the adapters were trained"


def test_the_kl_divergence_begins_at_nothing() -> None:
    """The rollout's log-probabilities of the first step's samples are the trainer's."""
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
