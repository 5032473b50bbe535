"""Make the demo model that `orca_jax` ships: corpus, tokenizer, training, export.

A GPT-2 of about four million parameters, trained on two public-domain English Bibles, so that the engine can
be tried and tested without a download, with text that reads as prose. The text comes from Debian packages:

    apt-get install bible-kjv bible-kjv-text sword-text-web libsword-utils

The four commands share a working directory and run in this order, from the checkout:

    python -m scripts.demo_model corpus
    python -m scripts.demo_model tokenizer
    python -m scripts.demo_model train --minutes 75
    python -m scripts.demo_model export

`train` accepts `--tokens` instead of `--minutes`. Either way the learning rate reaches zero at the end.
`export` can run at any time after the first checkpoint; it writes the Hugging Face style directory and the
excerpt of held-out text whose loss the model card states. `--work` sets another working directory.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from scripts.demo_model.corpus import build_corpus, build_tokenizer
from scripts.demo_model.export import export
from scripts.demo_model.network import Shape
from scripts.demo_model.training import Options, train

REPOSITORY = Path(__file__).resolve().parents[2]


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.demo_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = {name: commands.add_parser(name) for name in ("corpus", "tokenizer", "train", "export")}
    for each in command.values():
        each.add_argument("--work", type=Path, default=REPOSITORY / "build/demo", help="working directory")
    add, defaults = command["train"].add_argument, Options()
    add("--minutes", type=float, default=defaults.minutes, help="wall-clock minutes to train")
    add("--tokens", type=int, help="tokens to train on, instead of --minutes")
    add("--resume", action="store_true", help="start from the checkpoint's weights, with a fresh optimizer")
    add("--batch-tokens", type=int, default=defaults.batch_tokens, help="tokens per iteration")
    add("--optimizer", choices=("muon", "adamw"), default=defaults.optimizer)
    add("--learning-rate", type=float, default=defaults.learning_rate, help="learning rate of Muon")
    add("--adam-learning-rate", type=float, default=defaults.adam_learning_rate)
    add(
        "--decay-from",
        type=float,
        default=defaults.decay_from,
        help="share of the run at the full learning rate",
    )
    add(
        "--long-from",
        type=float,
        default=defaults.long_from,
        help="share of the run with windows of half the positions",
    )
    add("--save-every", type=float, default=defaults.save_every, help="minutes between checkpoints")
    add = command["export"].add_argument
    add("--out", type=Path, default=REPOSITORY / "orca_jax/demo_model", help="the model's directory")
    add("--held-out", type=Path, default=REPOSITORY / "tests/data/held_out.txt", help="the excerpt's file")
    return parser.parse_args()


def main() -> None:
    """Run one command."""
    options = read_options()
    if options.command == "corpus":
        build_corpus(options.work)
    elif options.command == "tokenizer":
        build_tokenizer(options.work, Shape().vocab_size)
    elif options.command == "train":
        names = [field.name for field in dataclasses.fields(Options)]
        train(options.work, Shape(), Options(**{name: getattr(options, name) for name in names}))
    else:
        export(options.work, options.out, options.held_out)


if __name__ == "__main__":
    main()
