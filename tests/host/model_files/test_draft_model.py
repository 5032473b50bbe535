"""Models that may draft for another: those whose token ids mean the same."""

from collections.abc import Mapping

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orca_jax.errors import DifferentTokenizer
from orca_jax.model_files.draft_model import check_same_tokens
from orca_jax.model_files.found_model import FoundModel
from orca_jax.request.tokenizer import Tokenizer
from tests.gpt_config import changed_config
from tests.host.engines import MODEL

WORDS = {"a": 0, "b": 1, "c": 2, "<end>": 3}


def model(name: str, words: Mapping[str, int] | None, vocab_size: int = 5) -> FoundModel:
    tokenizer = None
    if words is not None:
        library = tokenizers.Tokenizer(models.BPE(dict(words), []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        tokenizer = Tokenizer(library)
    config = changed_config(MODEL, vocab_size=vocab_size, eos_token_ids=())
    return FoundModel(name, config, tokenizer, None)


def test_tokens_that_only_one_has_do_no_harm() -> None:
    served = model("served", WORDS)
    check_same_tokens(served, model("draft", WORDS, vocab_size=9))  # padded
    check_same_tokens(served, model("draft", {**WORDS, "d": 4}, vocab_size=9))
    check_same_tokens(served, model("draft", {"a": 0, "b": 1, "c": 2}, vocab_size=4))
    check_same_tokens(served, model("draft", None, vocab_size=5))


@pytest.mark.parametrize(
    "words, vocab_size, message",
    [
        (
            {**WORDS, "c": 1, "b": 2},
            5,
            "draft model draft has another tokenizer than served: of 4 tokens here and 4 there, 2 are the "
            "same; token 1 is 'b' here and 'c' there; a draft model must have the tokenizer of the served",
        ),
        ({"a": 0}, 5, "of 4 tokens here and 1 there, 1 are the same; a draft model must have"),
        (None, 6, "the draft model draft has 6 tokens, and served has 5"),
    ],
)
def test_another_tokenizer_is_refused(words: Mapping[str, int] | None, vocab_size: int, message: str) -> None:
    with pytest.raises(DifferentTokenizer, match=message):
        check_same_tokens(model("served", WORDS), model("draft", words, vocab_size))
