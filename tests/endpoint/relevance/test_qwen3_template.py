"""The text around a query and a document that Qwen3's rerankers read."""

from dataclasses import replace

import pytest

from orca_jax.errors import InvalidRequest
from orca_jax.families.model_config import RankerHead
from orca_jax.request.tokenizer import Tokenizer
from server.http.relevance.similarity import QWEN3_TEMPLATE, pair_template
from tests.endpoint.harness import MODEL
from tests.host.request.family_tokenizers import FAMILIES

RANKER = replace(MODEL, ranker=True, ranker_head=RankerHead(kind="linear", n_results=1))


def test_the_published_template() -> None:
    """As the model card of Qwen3-Reranker builds a prompt."""
    expected = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: what?\n<Document>: this<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert QWEN3_TEMPLATE.replace("{query}", "what?").replace("{document}", "this") == expected


def test_only_a_fields_own_names_are_places() -> None:
    template = "{query}{text_2}{document} {text_1}"
    asked = pair_template(RANKER, template, "text_1", "text_2")
    assert asked is not None and (asked.text, asked.names) == (template, ("{text_1}", "{text_2}"))
    tokenizer = Tokenizer(FAMILIES["qwen"]())
    ids = tokenizer.encode_template(asked.text, dict(zip(asked.names, ("{text_2}", "b{query}"), strict=True)))
    assert tokenizer.decode(ids) == "{query}b{query}{document} {text_2}"
    with pytest.raises(InvalidRequest, match=r"must have \{query\} and \{document\} once each"):
        pair_template(RANKER, "{query}{document}{query}", "query", "document")
