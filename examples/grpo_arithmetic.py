"""Teach a tiny Llama to add by reinforcement learning: Tunix's GRPO trains it, this engine samples rollouts.

    .venv/bin/pip install -e '.[tunix]'
    python -m examples.grpo_arithmetic [--steps 60] [--rollout orca|vanilla]

The model is Tunix's own Llama 3, of two layers with random weights. A prompt is a sum such as "3+4=", and the
answer begins with one digit, the last of the sum. The reward is 1 for the right digit, less for a digit
farther away, and 0 for anything else. It takes minutes on a CPU.
"""

# Tunix is an extra, and not installed where the project is checked.
# pyright: reportMissingImports=false

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from orca_jax.rollout.tunix import OrcaRollout

PROMPTS, SAMPLES = 8, 8  # prompts in a step, and samples of each
CHARACTERS = "0123456789+= "


class Characters:
    """A tokenizer of single characters, with the methods that Tunix asks for; 0 pads, 1 begins, 2 ends."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without beginning and end."""
        return [3 + CHARACTERS.index(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; other tokens have none."""
        return "".join(CHARACTERS[i - 3] for i in token_ids if 3 <= i < 3 + len(CHARACTERS))

    def pad_id(self) -> int:
        """The padding token."""
        return 0

    def bos_id(self) -> int:
        """The token that begins a text."""
        return 1

    def eos_id(self) -> int:
        """The token that ends a text."""
        return 2


def tiny_llama(seed: int) -> Llama3:
    """Two layers with random weights. Tunix itself begins with feed-forward layers of zeros."""
    config = ModelConfig(
        num_layers=2, vocab_size=16, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip
    model = Llama3(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)

    def drawn(weight: jax.Array) -> jax.Array:
        if weight.ndim == 1:
            return weight
        return jax.numpy.asarray(rng.normal(0, 0.1, weight.shape), weight.dtype)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
    return model


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Reward the first character: 1 for the last digit of the sum, less for another digit, else 0."""
    rewards: list[float] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        a, b = prompt.rstrip("=").split("+")
        digit = completion[:1]
        rewards.append(1 - abs((int(a) + int(b)) % 10 - int(digit)) / 10 if digit.isdigit() else 0.0)
    return rewards


def sums(n_steps: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """The prompts of each step, an array of texts."""
    rng = np.random.default_rng(seed)
    for _ in range(n_steps):
        yield {"prompts": np.array([f"{a}+{b}=" for a, b in rng.integers(0, 10, (PROMPTS, 2))])}


def train(rollout_engine: Any, n_steps: int, *, seed: int = 0, beta: float = 0.0) -> list[float]:
    """The mean reward of each step; `rollout_engine` is ClusterConfig's."""
    means: list[float] = []

    def seen(prompts: Sequence[str], completions: Sequence[str], **others: Any) -> list[float]:
        rewards = reward(prompts, completions, **others)
        means.append(float(np.mean(rewards)))
        return rewards

    own = cluster(rollout_engine, n_steps, seed=seed, beta=beta)
    learner = GRPOLearner(
        rl_cluster=own,
        algo_config=GRPOConfig(num_generations=SAMPLES, beta=beta),
        reward_fns=seen,
    )
    learner.train(list(sums(n_steps, seed)))
    if isinstance(own.rollout, OrcaRollout):
        own.rollout.close()
    return means


def cluster(
    rollout_engine: Any,
    n_steps: int,
    *,
    seed: int = 0,
    beta: float = 0.0,
    actor: nnx.Module | None = None,
) -> RLCluster:
    """A cluster on the first device: trainer, rollout, and with a `beta` the initial model as reference.

    The `actor` is the tiny Llama unless it is given.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return RLCluster(
        actor=tiny_llama(seed) if actor is None else actor,
        reference=tiny_llama(seed) if beta else None,
        tokenizer=Characters(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=rollout_engine,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=n_steps + 1, max_steps=n_steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=2, max_prompt_length=8, kv_cache_size=16, temperature=1.0
            ),
        ),
    )


def main() -> None:
    """Train, and print the reward."""
    parser = argparse.ArgumentParser(description="GRPO on sums of two digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rollout", choices=("orca", "vanilla"), default="orca")
    options = parser.parse_args()
    engine = partial(OrcaRollout, max_batch_size=64) if options.rollout == "orca" else "vanilla"
    means = train(engine, options.steps)
    for first in range(0, len(means), 10):
        part = means[first : first + 10]
        print(f"steps {first:3} to {first + len(part) - 1:3}: reward {np.mean(part):.3f}")


if __name__ == "__main__":
    main()
