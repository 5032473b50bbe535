"""Compares rollouts of this engine and of Tunix's sampler: tokens per second for the same samples, in turn.

    .venv/bin/pip install -e '.[tunix]'
    python -m bench.rollout [--prompts 64] [--samples 8] [--layers 4] [--hidden 256] [--runs 3]

Prompts have U(4, 32) tokens and samples U(8, 256), drawn once. Tunix's sampler works on padded batches of
`--vanilla-batch` samples, in their order, and runs each for 256 steps: the longest of so many samples has
about that many. No sample ends early. Padding does not count as tokens. Both
compile in a run that is not timed.
"""

# pyright: reportMissingImports=false

import argparse
import json
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from bench.plain_rollout import LONGEST, LONGEST_PROMPT, VOCABULARY, drawn_samples, timed
from bench.versions import packages
from orca_jax import SamplingParams
from orca_jax.rollout.tunix import OrcaRollout


class Numbers:
    """A tokenizer of texts that are token ids; no sampled token ends a text."""

    def encode(self, text: str) -> list[int]:
        """The token ids of "12 7 300"."""
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these token ids."""
        return " ".join(map(str, token_ids))

    def pad_id(self) -> int:
        """The padding token."""
        return 0

    def bos_id(self) -> int:
        """No token is added at the beginning."""
        return 0

    def eos_id(self) -> int:
        """A token beyond the vocabulary, which is never sampled."""
        return VOCABULARY


def llama(n_layers: int, hidden: int) -> Llama3:
    """A model with random weights, whose padding token is never sampled."""
    config = ModelConfig(
        num_layers=n_layers, vocab_size=VOCABULARY, embed_dim=hidden, hidden_dim=4 * hidden,
        num_heads=hidden // 32, head_dim=32, num_kv_heads=hidden // 64, rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip
    model = Llama3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def drawn(weight: jax.Array) -> jax.Array:
        return weight if weight.ndim == 1 else jnp.asarray(rng.normal(0, 0.05, weight.shape), weight.dtype)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
    return model


def orca_samples(rollout: OrcaRollout, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Draw all samples, each with its length; return the number of tokens."""
    asked = [
        SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True, logprobs=0, seed=i)
        for i, n in enumerate(lengths)
    ]
    return sum(len(result.token_ids) for result in rollout.llm.generate(prompts, asked))


def vanilla_samples(
    rollout: VanillaRollout, prompts: Sequence[Sequence[int]], lengths: Sequence[int], batch: int
) -> int:
    """Draw the samples batch by batch, each up to its longest; return the number of requested tokens."""
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    for first in range(0, len(texts), batch):
        part = slice(first, first + batch)
        config = RolloutConfig(
            # One size for all batches: another would compile again.
            max_tokens_to_generate=LONGEST,
            max_prompt_length=LONGEST_PROMPT,
            temperature=1.0,
            return_logprobs=True,
        )
        output = rollout.generate(texts[part], config)
        assert all(len(tokens) == LONGEST for tokens in output.tokens)
    return sum(lengths)


def main() -> None:
    """Measure both in turn, and print the ratio of each pair."""
    parser = argparse.ArgumentParser(description="rollout throughput beside Tunix's own sampler")
    for name, default in (("prompts", 64), ("samples", 8), ("layers", 4), ("hidden", 256), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vanilla-batch", type=int, default=64, help="samples of a batch of Tunix's sampler")
    parser.add_argument("--max-batch-size", type=int, default=64)
    options = parser.parse_args()
    prompts, lengths = drawn_samples(options.prompts, options.samples)
    model = llama(options.layers, options.hidden)
    config = RolloutConfig(kv_cache_size=LONGEST_PROMPT + LONGEST, max_prompt_length=LONGEST_PROMPT)
    orca = OrcaRollout(model, Numbers(), None, config, max_batch_size=options.max_batch_size)
    heads = model.config.num_kv_heads
    vanilla = VanillaRollout(
        model, Numbers(), CacheConfig(LONGEST_PROMPT + LONGEST, options.layers, heads, 32)
    )
    batch = options.vanilla_batch
    run_orca = partial(orca_samples, orca, prompts, lengths)
    run_vanilla = partial(vanilla_samples, vanilla, prompts, lengths, batch)
    orca_samples(orca, prompts, lengths)
    vanilla_samples(vanilla, prompts[:batch], lengths[:batch], batch)
    pairs = [(timed(run_orca), timed(run_vanilla)) for _ in range(options.runs)]
    print(json.dumps({**vars(options), "versions": packages()}))
    for ours, theirs in pairs:
        print(f"orca {ours:,.0f} tokens/s, vanilla {theirs:,.0f} tokens/s, ratio {ours / theirs:.2f}")
    orca.close()


if __name__ == "__main__":
    main()
