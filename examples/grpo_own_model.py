"""Train a model of your own by reinforcement learning: GRPO in 40 lines, with rollouts of this engine.

    python -m examples.grpo_own_model [--steps 30]

The model is examples/own_model.py. A sample's reward is the share of its tokens that are even numbers. The
engine samples the groups of the next step while the trainer computes this one; after each step it takes the
new weights, and running samples continue with them. Takes a minute on a CPU.
"""

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.own_model import GatedModel
from orca_jax import LLM, SamplingParams
from orca_jax.rollout import Group, Rollout, Sample

GROUPS, SAMPLES, LENGTH = 4, 8, 48  # groups in a step, samples in a group, tokens of the longest sequence
PARAMS = SamplingParams(n=SAMPLES, max_tokens=32, temperature=1.0, ignore_eos=True, logprobs=0)
CLIP = 0.2


def reward(sample: Sample) -> float:
    """The share of sampled tokens that are even."""
    return float(np.mean(sample.token_ids[sample.sampled] % 2 == 0))


def batch(groups: Sequence[Group]) -> dict[str, jax.Array]:
    """The samples of a step as arrays [samples, LENGTH], and the advantage of each within its group."""
    samples = [sample for group in groups for sample in group.samples]
    arrays = {
        "tokens": np.zeros((len(samples), LENGTH), np.int32),
        "mask": np.zeros((len(samples), LENGTH), bool),
        "old": np.zeros((len(samples), LENGTH), np.float32),
    }
    for row, sample in enumerate(samples):
        first, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.token_ids)
        arrays["tokens"][row, :end] = (*sample.prompt_ids, *sample.token_ids)
        arrays["mask"][row, first:end] = sample.sampled
        arrays["old"][row, first:end] = sample.logprobs
    rewards = [np.array([reward(sample) for sample in group.samples]) for group in groups]
    arrays["advantage"] = np.concatenate([(r - r.mean()) / (r.std() + 1e-6) for r in rewards]).astype("f4")
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def log_probabilities(model: GatedModel, tokens: jax.Array) -> jax.Array:
    """The log-probability of each token [samples, LENGTH] given those before it; 0 for the first."""
    logits = jax.nn.log_softmax(model(tokens[:, :-1]).astype(jnp.float32))
    found = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(found, ((0, 0), (1, 0)))


@nnx.jit
def train_step(model: GatedModel, optimizer: nnx.Optimizer, arrays: dict[str, jax.Array]) -> jax.Array:
    """Update the model by GRPO's clipped loss; returns it."""

    def loss(model: GatedModel) -> jax.Array:
        ratio = jnp.exp(log_probabilities(model, arrays["tokens"]) - arrays["old"])
        advantage = arrays["advantage"][:, None]
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        return -jnp.sum(gain * arrays["mask"]) / jnp.sum(arrays["mask"])

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train(
    model: GatedModel, llm: LLM, n_steps: int, seen: Callable[[Rollout, list[Group]], object] | None = None
) -> list[float]:
    """The mean reward of each step. `seen` is called with its groups, before the model is changed."""
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    rng, means = np.random.default_rng(0), list[float]()
    with Rollout(llm, max_groups=2 * GROUPS) as rollout:

        def submit() -> None:
            for _ in range(GROUPS):
                rollout.submit(rng.integers(0, model.vocab_size, rng.integers(4, 16)), PARAMS)

        submit()
        for _ in range(n_steps):
            submit()  # the engine samples the next step's groups while this one is trained
            groups = rollout.take(GROUPS)
            if seen is not None:
                seen(rollout, groups)
            train_step(model, optimizer, batch(groups))
            rollout.update(model)
            means.append(float(np.mean([reward(sample) for group in groups for sample in group.samples])))
    return means


def main() -> None:
    """Train, and print the reward."""
    parser = argparse.ArgumentParser(description="GRPO of a model of one's own")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    model = GatedModel(vocab_size=64)
    with LLM(model, max_batch_size=GROUPS * SAMPLES, max_batch_tokens=64, n_slots=8192) as llm:
        for step, mean in enumerate(train(model, llm, options.steps)):
            print(f"step {step:2}: reward {mean:.3f}")


if __name__ == "__main__":
    main()
