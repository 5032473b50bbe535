"""Make tests/data/golden/unigram.json: a small Unigram model of SentencePiece, and its tokens of some texts.

The model is trained on the held-out text, with T5's special tokens and a few rules of normalization, which
become a table as in published models. The environment needs `sentencepiece`.
"""

# pyright: reportMissingImports=false

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from tests.places import ROOT

DATA = ROOT / "tests" / "data"
TEXT = DATA / "held_out.txt"
RULES = {"\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "ﬁ": "fi", "½": "1/2", "Ａ": "A", "e\u0301": "é"}
TEXTS = (
    "Hear therefore, you kings!",
    "  two  spaces   three\n\n\ttabs\t\tand\r\nlines \n",
    "ﬁne ½ Ａ\u00a0B e\u0301 naïve “quoted” …",
    "日本語 🙂 x",
    "",
    " ",
    "a",
    "1234567 12 3.14",
)


def make_files(only: Sequence[str]) -> None:
    """Train the model and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        lines = (
            "\t".join(" ".join(f"{ord(character):X}" for character in side) for side in rule)
            for rule in RULES.items()
        )
        rules.write_text("\n".join(lines) + "\n")
        sentencepiece.SentencePieceTrainer.train(
            input=TEXT,
            model_prefix=f"{folder}/unigram",
            model_type="unigram",
            vocab_size=300,
            normalization_rule_tsv=rules,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
        processor = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/unigram.model")
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(Path(f"{folder}/unigram.model").read_bytes())
    texts = (*TEXTS, TEXT.read_text()[:4000])
    found = {
        "pieces": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "types": [piece.type for piece in model.pieces],
        "charsmap": list(model.normalizer_spec.precompiled_charsmap),
        "texts": [{"text": text, "ids": processor.encode(text, add_eos=True)} for text in texts],
    }
    (DATA / "golden" / "unigram.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")
