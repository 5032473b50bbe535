"""The model in the package: what its card claims, and that it writes English."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.families.parameters import parameter_shapes
from orca_jax.model import reference
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.request.tokenizer import Tokenizer
from tests.places import DATA

HELD_OUT = DATA / "held_out.txt"


def test_it_is_small() -> None:
    shapes = parameter_shapes(load_checkpoint(DEMO_MODEL, dtype=jnp.bfloat16).config)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) <= 5_500_000
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= 12 << 20


@pytest.mark.long
def test_held_out_loss_is_the_cards() -> None:
    """The loss as the card defines it: documents between end-of-text tokens, in independent windows."""
    checkpoint = load_checkpoint(DEMO_MODEL, dtype=jnp.float32)
    model, window = checkpoint.config, checkpoint.config.n_positions
    tokenizer = Tokenizer.from_file(DEMO_MODEL / "tokenizer.json")
    (end,) = model.eos_token_ids

    @jax.jit
    def losses(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(reference.forward(model, checkpoint.parameters, tokens))
        return -jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]

    total = count = 0
    for document in HELD_OUT.read_text(encoding="utf-8").strip().split("\n\n"):
        ids = [end, *tokenizer.encode(document), end]
        for start in range(0, len(ids) - 1, window):
            tokens, targets = ids[:-1][start : start + window], ids[1:][start : start + window]
            padding = [0] * (window - len(tokens))  # behind what is read: the model is causal
            each = losses(jnp.array(tokens + padding), jnp.array(targets + padding))[: len(tokens)]
            total += float(each.sum())
            count += len(tokens)
    card = (DEMO_MODEL / "README.md").read_text(encoding="utf-8")
    row = re.search(r"\| `tests/data/held_out.txt` \|[^|]+\| ([\d,]+) \|[^|]+\| ([\d.]+) \|", card)
    assert row is not None
    assert count == int(row[1].replace(",", ""))
    assert abs(total / count - float(row[2])) < 2e-3


def test_it_writes_english_words() -> None:
    known = set(re.findall(r"[a-z]+", HELD_OUT.read_text(encoding="utf-8").lower()))
    with LLM(max_batch_size=4) as llm:
        params = SamplingParams(max_tokens=60, temperature=0.7, seed=3)
        results = llm.generate(["In the beginning", "And he said", "The king", "Jesus said to them,"], params)
    words = [word for result in results for word in re.findall(r"[a-z]+", result.text.lower())]
    assert len(words) > 80
    assert sum(word in known for word in words) > 0.6 * len(words)
