"""A tiny model with a tokenizer of bytes, as a directory and as one LLM that the tests of this room share."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import orca_jax
from orca_jax import LLM
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from tests.device.checkpoint.tiny_checkpoint import GPT2, gpt2_tensors, write_checkpoint
from tests.whole.lent import Lent

END = 256
CONFIG = GPT2 | {
    "vocab_size": 260,  # the last three ids have no token
    "n_positions": 64,
    "n_embd": 16,
    "n_layer": 1,
    "n_inner": 32,
    "bos_token_id": END,
    "eos_token_id": END,
}
# Room for two of the longest requests and a little, so that some have to wait.
TINY_SIZES: dict[str, Any] = {"max_batch_size": 4, "n_slots": 160, "max_batch_tokens": 64}


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of one layer with random weights, whose tokens are the bytes and one special token."""
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG, gpt2_tensors(CONFIG))
    tokenizer = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> Iterator[LLM]:
    """An engine of TINY_SIZES."""
    with LLM(tiny_directory, **TINY_SIZES, seed=3) as llm:
        yield llm


@pytest.fixture
def lent(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """Let the commands run the shared tiny model."""
    lent = Lent(tiny)
    monkeypatch.setattr(orca_jax, "LLM", SimpleNamespace(from_config=lambda *_, **__: lent), raising=False)
    return lent
