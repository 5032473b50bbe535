"""Compares rollouts of plain functions: a static sampler, this engine, and this engine ahead of a trainer.

    python -m bench.plain_rollout [--prompts 64] [--samples 8] [--layers 4] [--hidden 256] [--runs 2]
    python -m bench.plain_rollout --steps 6 --prompts 16 [--train-seconds 2]

Prompts have U(4, 32) tokens and samples U(8, 256), drawn once. The static sampler is what a trainer has
without an engine: one jitted program for a batch of `--static-batch` samples, with prompts padded on the
left, caches of fixed size, and steps until the batch's longest sample is complete. Both run the same
functions in float32 and return log-probabilities, which are compared, and both compile in a run that is not
timed.

With `--steps` the engine samples that many steps of a trainer, which takes new weights after each:
synchronously, so that it samples and then waits for the trainer, and asynchronously, one step ahead. The
trainer has other devices: its step is a wait of `--train-seconds`, by default half of the time of a
step's samples.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.versions import packages
from orca_jax import LLM, FunctionModel, SamplingParams
from orca_jax.rollout import Rollout

VOCABULARY, LONGEST_PROMPT, LONGEST, HEAD = 512, 32, 256, 32


def drawn_weights(n_layers: int, hidden: int, seed: int) -> dict[str, Any]:
    """Random weights of the model."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    n_kv = hidden // 2
    shapes = {
        "q": (hidden, hidden), "k": (hidden, n_kv), "v": (hidden, n_kv), "out": (hidden, hidden),
        "gate": (hidden, 4 * hidden), "up": (hidden, 4 * hidden), "down": (4 * hidden, hidden),
    }  # fmt: skip
    layers = [{name: drawn(*shape) for name, shape in shapes.items()} for _ in range(n_layers)]
    return {
        "outside": {"tokens": drawn(VOCABULARY, hidden), "head": drawn(hidden, VOCABULARY)},
        "layers": layers,
    }


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    angle = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, HEAD // 2)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        (a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)), axis=-1
    )


def embed(outside: Any, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """Embed tokens."""
    return outside["tokens"][token_ids]


def layer(weights: Any, x: jax.Array, positions: jax.Array, attend: Any) -> jax.Array:
    """Rotary attention with grouped heads, and SwiGLU."""
    y = _norm(x)
    q, k, v = ((y @ weights[name]).reshape(*y.shape[:-1], -1, HEAD) for name in ("q", "k", "v"))
    attended = attend(_rotated(q, positions), _rotated(k, positions), v)
    x = x + attended.reshape(x.shape) @ weights["out"]
    y = _norm(x)
    return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]


def unembed(outside: Any, x: jax.Array) -> jax.Array:
    """Logits."""
    return _norm(x) @ outside["head"]


@jax.jit
def static_samples(weights: Any, prompts: jax.Array, n_prompt: jax.Array, n_steps: jax.Array) -> Any:
    """Sample `n_steps` tokens after each prompt [B, P], padded on the left: tokens and log-probabilities."""
    n_rows, width = prompts.shape[0], LONGEST_PROMPT + LONGEST
    first = LONGEST_PROMPT - n_prompt  # the place of each row's first token
    shape = (n_rows, width, weights["layers"][0]["k"].shape[1] // HEAD, HEAD)
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in weights["layers"]]

    def forward(token_ids: jax.Array, start: jax.Array, caches: Any) -> Any:
        places = start + jnp.arange(token_ids.shape[1])
        positions = jnp.maximum(0, places - first[:, None])
        seen = (jnp.arange(width) <= places[:, None]) & (jnp.arange(width) >= first[:, None, None])
        x, written = embed(weights["outside"], token_ids, positions), []
        for each, (keys, values) in zip(weights["layers"], caches, strict=True):

            def attend(q: Any, k: Any, v: Any, keys: Any = keys, values: Any = values) -> Any:
                keys = jax.lax.dynamic_update_slice(keys, k, (0, start, 0, 0))
                values = jax.lax.dynamic_update_slice(values, v, (0, start, 0, 0))
                written.append((keys, values))
                return jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None])

            x = layer(each, x, positions, attend)
        return unembed(weights["outside"], x[:, -1]), written

    def choose(i: jax.Array, logits: jax.Array, tokens: jax.Array, logprobs: jax.Array) -> Any:
        token = jax.random.categorical(jax.random.fold_in(jax.random.key(0), i), logits)
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
        return token, tokens.at[:, i].set(token), logprobs.at[:, i].set(found)

    def step(i: jax.Array, carried: Any) -> Any:
        token, tokens, logprobs, caches = carried
        logits, caches = forward(token[:, None], LONGEST_PROMPT + i - 1, caches)
        return (*choose(i, logits, tokens, logprobs), caches)

    logits, caches = forward(prompts, jnp.int32(0), caches)
    begun = choose(jnp.int32(0), logits, jnp.zeros((n_rows, LONGEST), int), jnp.zeros((n_rows, LONGEST)))
    _, tokens, logprobs, _ = jax.lax.fori_loop(1, n_steps, step, (*begun, caches))
    return tokens, logprobs


def run_static(weights: Any, prompts: Sequence[list[int]], lengths: Sequence[int], batch: int) -> int:
    """Draw all samples batch by batch, each up to its longest; return the number of requested tokens."""
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        padded = np.zeros((batch, LONGEST_PROMPT), np.int32)
        for row, prompt in zip(padded, part, strict=True):
            row[LONGEST_PROMPT - len(prompt) :] = prompt
        n_steps = max(lengths[first : first + batch])
        jax.block_until_ready(static_samples(weights, padded, np.array([*map(len, part)]), n_steps))
    return sum(lengths)


def check_static(llm: LLM, weights: Any, prompts: Sequence[list[int]]) -> None:
    """Compare the static sampler's log-probabilities of its tokens with the engine's."""
    padded = np.array([[0] * (LONGEST_PROMPT - len(prompt)) + prompt for prompt in prompts], np.int32)
    tokens, logprobs = static_samples(weights, padded, np.array([*map(len, prompts)]), LONGEST)
    with Rollout(llm) as rollout:
        scores = rollout.score(prompts, np.asarray(tokens).tolist())
    np.testing.assert_allclose(np.array(scores), np.asarray(logprobs), atol=1e-3)


def sampling(n: int, seed: int) -> SamplingParams:
    """The parameters of a sample of n tokens."""
    return SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True, logprobs=0, seed=seed)


def run_engine(llm: LLM, prompts: Sequence[list[int]], lengths: Sequence[int]) -> int:
    """Draw all samples, each with its length; return the number of tokens."""
    with Rollout(llm) as rollout:
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
            rollout.submit(prompt, sampling(n, i))
        groups = rollout.take(len(prompts))
    return sum(len(sample.token_ids) for group in groups for sample in group.samples)


def run_steps(
    llm: LLM,
    weights: Sequence[Any],
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    train_seconds: float,
    *,
    n_steps: int,
    ahead: bool,
) -> int:
    """Sample the steps of a trainer, `ahead` by one or not; return the number of tokens that it took."""
    n_tokens = 0
    with Rollout(llm, max_groups=2 * len(prompts)) as rollout:

        def submit() -> None:
            for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
                rollout.submit(prompt, sampling(n, i))

        if ahead:
            submit()
        for step in range(n_steps):
            if not ahead or step < n_steps - 1:
                submit()
            groups = rollout.take(len(prompts))
            n_tokens += sum(len(sample.token_ids) for group in groups for sample in group.samples)
            time.sleep(train_seconds)  # the trainer's step, on other devices
            rollout.update(weights[step % 2])
    return n_tokens


def drawn_samples(n_prompts: int, n_samples: int) -> tuple[list[list[int]], list[int]]:
    """The prompt and the length of each sample, drawn once; samples of one prompt follow one another."""
    rng = np.random.default_rng(0)
    drawn = [
        rng.integers(1, VOCABULARY, rng.integers(4, LONGEST_PROMPT + 1)).tolist() for _ in range(n_prompts)
    ]
    prompts = [prompt for prompt in drawn for _ in range(n_samples)]
    return prompts, rng.integers(8, LONGEST + 1, len(prompts)).tolist()


def timed(run: Callable[[], int]) -> float:
    """Tokens per second."""
    begin = time.perf_counter()
    n_tokens = run()
    return n_tokens / (time.perf_counter() - begin)


def main() -> None:
    """Measure in turn, and print the ratio of each pair."""
    parser = argparse.ArgumentParser(description="rollout throughput beside a trainer's static sampler")
    for name, default in (("prompts", 64), ("samples", 8), ("layers", 4), ("hidden", 256), ("runs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--static-batch", type=int, default=64, help="samples of a batch of the static sampler"
    )
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=0, help="steps of a trainer, sampled in both ways")
    parser.add_argument("--train-seconds", type=float, help="the time of a trainer's step")
    options = parser.parse_args()
    prompts, lengths = drawn_samples(options.prompts, options.samples)
    weights = [drawn_weights(options.layers, options.hidden, seed) for seed in (0, 1)]
    model = FunctionModel(
        embed=embed, layer=layer, unembed=unembed, **weights[0], vocab_size=VOCABULARY,
        n_positions=LONGEST_PROMPT + LONGEST, hidden_size=options.hidden, n_heads=options.hidden // HEAD,
        n_kv_heads=options.hidden // HEAD // 2, head_size=HEAD,
    )  # fmt: skip
    print(json.dumps({**vars(options), "versions": packages()}))
    with LLM(model, max_batch_size=options.max_batch_size, max_batch_tokens=512, compile_ahead=True) as llm:
        engine = partial(run_engine, llm, prompts, lengths)
        engine()
        if options.steps:
            seconds = options.train_seconds
            if seconds is None:
                seconds = sum(lengths) / timed(engine) / 2
            print(f"a trainer's step takes {seconds:.2f} s")
            steps = partial(run_steps, llm, weights, prompts, lengths, seconds)
            steps(n_steps=2, ahead=True)
            pairs = [
                tuple(timed(partial(steps, n_steps=options.steps, ahead=ahead)) for ahead in (True, False))
                for _ in range(options.runs)
            ]
            names = "asynchronous", "synchronous"
        else:
            static = partial(run_static, weights[0], prompts, lengths, options.static_batch)
            check_static(llm, weights[0], prompts[: options.static_batch])
            pairs = [(timed(engine), timed(static)) for _ in range(options.runs)]
            names = "engine", "static sampler"
    for one, other in pairs:
        print(f"{names[0]} {one:,.0f} tokens/s, {names[1]} {other:,.0f} tokens/s, ratio {one / other:.2f}")


if __name__ == "__main__":
    main()
