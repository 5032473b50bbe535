"""Make golden files: small random models, and the results of transformers or of a trainer's code on them.

    python -m scripts.golden decoders --only llama-grouped
    python -m scripts.golden tunix

Files of transformers need `torch` (the CPU build is enough) and `transformers`, files of a trainer its
package, each in a separate environment; the tests that read the files need none of these. `beams`, `hidden`,
`mxfp4` and `routing` read the files of `decoders`. The modules of the tests that read a file describe it.
"""

import argparse
import importlib

KINDS = {
    "decoders": "a checkpoint, logits and greedy tokens of each shape of shapes.py, GPT-2 and OPT",
    "encoders": "the same for models with an encoder, and their beam searches",
    "beams": "results of generate() with several beams",
    "adapters": "LoRA adapters that PEFT saves, and its results with them",
    "hidden": "final hidden states",
    "embeddings": "checkpoints of models like BERT, and their final hidden states",
    "routing": "the experts that mixtures choose",
    "mxfp4": "a model with experts packed in MXFP4",
    "fp8": "a matrix in FP8, and dequantised",
    "linear_attention": "results and states of the gated delta rule and of Mamba-2",
    "compressed": "matrices of compressed-tensors, unpacked by its own package",
    "gguf_types": "blocks of GGUF's types, unpacked by the package gguf",
    "unigram": "a tokenizer that SentencePiece trains, and its tokens of some texts",
    "processors": "results of logits processors on random logits",
    "text_parts": "models of text and images, and their tokens for texts",
    "chat": "renderings of chat templates",
    "tunix": "checkpoints of Tunix's CheckpointManager, and Tunix's logits",
    "maxtext": "the same for MaxText",
    "gemma": "the same for Google's gemma package",
    "levanter": "the same for Levanter",
    "easydel": "the same for EasyDeL",
}
# Kinds that can make some of their models.
BY_NAME = {
    "decoders",
    "adapters",
    "encoders",
    "beams",
    "embeddings",
    "hidden",
    "text_parts",
    "tunix",
    "maxtext",
    "levanter",
    "easydel",
}


def main() -> None:
    """Make the files of one kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, text in KINDS.items():
        added = kinds.add_parser(kind, help=text)
        added.set_defaults(only=[])
        if kind in BY_NAME:
            added.add_argument("--only", nargs="+", metavar="NAME", help="only the models of these names")
    flags = parser.parse_args()
    importlib.import_module(f"scripts.golden.{flags.kind}").make_files(flags.only)


if __name__ == "__main__":
    main()
