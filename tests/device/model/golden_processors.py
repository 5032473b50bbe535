"""Reader of `processors.npz`: rows of random logits, each with its parameters, and what Hugging Face
transformers' logits processors make of them. scripts/golden/processors.py makes the file and says how it
is laid out.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.device.model.golden import DIRECTORY

FILE = DIRECTORY / "processors.npz"
VOCABULARIES = (50, 333, 1009)
# The processors in the order in which they act, by the field of GoldenRow that asks for each.
PROCESSORS = (
    *("bias", "repetition", "bad_words", "min_tokens", "allowed_token_ids"),
    *("temperature", "top_k", "top_p", "min_p"),
)


@dataclass(frozen=True, eq=False)
class GoldenRow:
    """One row: V logits, token ids, parameters (neutral where not asked for), Hugging Face's results."""

    logits: np.ndarray  # [V] float32
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    bias: dict[int, float]  # token id -> what is added; neutral: {}
    repetition: float  # neutral: 1
    bad_words: tuple[tuple[int, ...], ...]  # words of 1 to 3 tokens; neutral: ()
    min_tokens: int  # neutral: 0
    eos_ids: tuple[int, ...]  # not before min_tokens,
    stop_ids: tuple[int, ...]  # nor these
    allowed_token_ids: tuple[int, ...]  # neutral: ()
    temperature: float  # neutral: 1
    top_k: int  # neutral: 0
    top_p: float  # neutral: 1
    min_p: float  # neutral: 0
    adjusted: np.ndarray  # [V] float32, after bias and repetition penalty
    allowed: np.ndarray  # [V] bool, left by bad words, min_tokens and allowed_token_ids
    final: np.ndarray  # [V] float32, after all; -inf where a token may not come

    @property
    def processors(self) -> tuple[str, ...]:
        """The PROCESSORS that the row uses."""
        neutral = {"repetition": 1, "min_tokens": 0, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
        return tuple(name for name in PROCESSORS if getattr(self, name) not in ({}, (), neutral.get(name)))


@cache
def load_golden_rows(vocab: int) -> tuple[GoldenRow, ...]:
    """The rows of `vocab`, one of VOCABULARIES."""
    with np.load(FILE) as file:
        prefix = f"{vocab}_"
        arrays = {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}
    allowed = np.unpackbits(arrays["allowed"], axis=1, count=vocab, bitorder="little").astype(bool)
    return tuple(
        GoldenRow(
            logits=arrays["logits"][i],
            prompt=_ids(arrays["prompt_ids"][i]),
            output=_ids(arrays["output_ids"][i]),
            bias=dict(zip(_ids(arrays["bias_ids"][i]), arrays["bias_values"][i].tolist(), strict=False)),
            repetition=float(arrays["repetition"][i]),
            bad_words=tuple(word for word in map(_ids, arrays["bad_words"][i]) if word),
            min_tokens=int(arrays["min_tokens"][i]),
            eos_ids=_ids(arrays["eos_ids"]),
            stop_ids=_ids(arrays["stop_ids"][i]),
            allowed_token_ids=_ids(arrays["allowed_token_ids"][i]),
            temperature=float(arrays["temperature"][i]),
            top_k=int(arrays["top_k"][i]),
            top_p=float(arrays["top_p"][i]),
            min_p=float(arrays["min_p"][i]),
            adjusted=arrays["adjusted"][i],
            allowed=allowed[i],
            final=arrays["final"][i],
        )
        for i in range(len(arrays["logits"]))
    )


def _ids(array: np.ndarray) -> tuple[int, ...]:
    """The ids before the -1 at the end."""
    return tuple(array[array >= 0].tolist())
