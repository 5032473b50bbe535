"""Train a model of your own on text, sample from it as it learns, save it with Orbax, and serve it.

    python -m examples.train_own_model --steps 300
    orca serve examples.train_own_model:saved

The model is examples/own_model.py, which no published family has. The engine computes with the trainer's
layers, so nothing is converted: after some steps the new weights go into the running engine, and at the end
Orbax writes them to the folder `trained`, from which `saved` makes the model again.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from examples.own_model import GatedModel
from orca_jax import LLM, SamplingParams
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.request.tokenizer import Tokenizer

LENGTH, BATCH = 64, 16
DOCUMENTS = Path(__file__).parents[1] / "docs"


def new_model() -> GatedModel:
    """The model without training, with the tokenizer of the demo model: 2,048 tokens."""
    return GatedModel(vocab_size=2048, tokenizer=str(DEMO_MODEL))


def saved(directory: Path = Path("trained")) -> GatedModel:
    """The model with the weights that `save` wrote."""
    model = new_model()
    with ocp.StandardCheckpointer() as checkpointer:
        weights = checkpointer.restore(directory.absolute(), nnx.state(model, nnx.Param))
    nnx.update(model, weights)
    return model


def save(model: GatedModel, directory: Path = Path("trained")) -> None:
    """Write the weights, over those of an earlier run."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute(), nnx.state(model, nnx.Param), force=True)


def windows(text: str) -> Iterator[jax.Array]:
    """Batches [BATCH, LENGTH + 1] of token ids from random places of the text."""
    ids = np.array(Tokenizer.from_file(DEMO_MODEL / "tokenizer.json").encode(text), np.int32)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(ids) - LENGTH, BATCH)
        yield jnp.asarray(np.stack([ids[s : s + LENGTH + 1] for s in starts]))


@nnx.jit
def train_step(model: GatedModel, optimizer: nnx.Optimizer, window: jax.Array) -> jax.Array:
    """Update the model by one batch; returns the loss."""

    def loss(model: GatedModel) -> jax.Array:
        logits = model(window[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Train, sample every hundred steps from the weights as they are then, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="batches to train on (default: 300)")
    parser.add_argument("--prompt", default="The scheduler", help="text to continue (default: The scheduler)")
    args = parser.parse_args(argv)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md")))
    model = new_model()
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    params = SamplingParams(max_tokens=24, temperature=0)
    with LLM(model) as llm:  # it has a copy of the weights, so training can continue
        for step, window in zip(range(1, args.steps + 1), windows(text), strict=False):
            loss = train_step(model, optimizer, window)
            if step % 100 == 0 or step == args.steps:
                version = llm.update_weights(model)
                (result,) = llm.generate([args.prompt], params)
                print(f"step {step}, loss {float(loss):.2f}, weights {version}: {args.prompt}{result.text}")
    save(model)


if __name__ == "__main__":
    main()
