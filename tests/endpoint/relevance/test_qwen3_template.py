"""The text around a query and a document that Qwen3's rerankers read."""

from dataclasses import replace
from typing import Any

import pytest

from orca_jax.errors import InvalidRequest
from orca_jax.families.model_config import RankerHead
from orca_jax.request.tokenizer import Tokenizer
from server.http.relevance.score import RerankRequest, ScoreRequest
from server.http.relevance.similarity import INSTRUCTION, PairTemplate, pair_template
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
    published = pair_template(RANKER, None)
    assert published is not None and filled(published, "what?", "this") == expected


def filled(template: PairTemplate, first: str, second: str) -> str:
    text = template.text
    for name, value in template.texts(first, second).items():
        text = text.replace(name, value)
    return text


def test_an_instruction_takes_the_place_of_the_published_one() -> None:
    default, other = pair_template(RANKER, None), pair_template(RANKER, None, instruction="Find songs.")
    assert default is not None and other is not None
    expected = filled(default, "a", "b").replace(INSTRUCTION, "Find songs.")
    assert filled(other, "a", "b") == expected and "<Instruct>: Find songs.\n<Query>: a\n" in expected
    names = "query", "document"
    own = pair_template(RANKER, "{query} {document}: {instruction}", *names, instruction="rank")
    assert own is not None and filled(own, "a", "b") == "a b: rank"
    with pytest.raises(InvalidRequest, match=r"instruction is set, and template has no \{instruction\}"):
        pair_template(RANKER, "{query} {document}", *names, instruction="rank")
    with pytest.raises(InvalidRequest, match="instruction is set, and this model compares two texts as they"):
        pair_template(replace(MODEL, embeds=True), None, instruction="rank")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"instruction": "a"}, "a"),
        ({"chat_template_kwargs": {"instruction": "b"}}, "b"),
        ({"instruction": "a", "chat_template_kwargs": {"instruction": "b"}}, "b"),
        ({"instruction": "a", "chat_template_kwargs": {}}, "a"),
    ],
)
def test_both_forms_of_an_instruction(fields: dict[str, Any], expected: str | None) -> None:
    assert RerankRequest(query="q", documents=["d"], **fields).instructed == expected
    assert ScoreRequest(text_1="q", text_2="d", **fields).instructed == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_thinking": False}, "chat_template_kwargs.enable_thinking is not supported"),
        ({"instruction": ["a"]}, "chat_template_kwargs.instruction: expected a text"),
    ],
)
def test_other_arguments_of_the_template_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        _ = RerankRequest(query="q", documents=["d"], chat_template_kwargs=given).instructed
    assert caught.value.param == "chat_template_kwargs"


def test_only_a_fields_own_names_are_places() -> None:
    template = "{query}{text_2}{document} {text_1}"
    asked = pair_template(RANKER, template, "text_1", "text_2")
    assert asked is not None and (asked.text, asked.names) == (template, ("{text_1}", "{text_2}"))
    tokenizer = Tokenizer(FAMILIES["qwen"]())
    ids = tokenizer.encode_template(asked.text, dict(zip(asked.names, ("{text_2}", "b{query}"), strict=True)))
    assert tokenizer.decode(ids) == "{query}b{query}{document} {text_2}"
    with pytest.raises(InvalidRequest, match=r"must have \{query\} and \{document\} once each"):
        pair_template(RANKER, "{query}{document}{query}", "query", "document")
