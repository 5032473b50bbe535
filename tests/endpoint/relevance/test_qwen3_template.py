"""The text around a query and a document that Qwen3's rerankers read."""

from server.http.relevance.similarity import QWEN3_TEMPLATE


def test_the_published_template() -> None:
    """As the model card of Qwen3-Reranker builds a prompt."""
    expected = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: what?\n<Document>: this<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert QWEN3_TEMPLATE.replace("{query}", "what?").replace("{document}", "this") == expected
