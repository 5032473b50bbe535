"""The contents and usage of a stream's chunks, each released by the test."""

from typing import Any

import pytest

from tests.endpoint.harness import serving
from tests.endpoint.openai_client import by_seed, client_of, letters_by_seed
from tests.host.engines import GatedEngine, writing

HI: Any = [{"role": "user", "content": "Hi"}]
ABSENT = "absent"


def test_a_chat_stream() -> None:
    engine = GatedEngine(writing("token"))
    asked: Any = {"model": "test", "messages": HI, "max_tokens": 5}
    with serving(engine=engine) as server, client_of(server) as client:
        try:
            with client.chat.completions.create(**asked, stream=True) as stream:
                chunks = list[Any]()
                for _ in range(5):
                    engine.let(1)
                    chunks.append(next(stream))
        finally:
            engine.let(1000)
    assert [chunk.choices[0].delta.content for chunk in chunks] == list("token")
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, "length"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_without_a_tokenizer_each_token_has_a_chunk_with_empty_text() -> None:
    engine = GatedEngine(writing("token"))
    with serving(engine=engine, tokenizer=False) as server, client_of(server) as client:
        try:
            with client.completions.create(model="test", prompt=[1], max_tokens=3, stream=True) as stream:
                for reason in (None, None, "length"):
                    engine.let(1)
                    (choice,) = next(stream).choices
                    assert (choice.text, choice.finish_reason) == ("", reason)
        finally:
            engine.let(1000)


@pytest.mark.parametrize(
    "options, usages",
    [
        (None, [ABSENT, ABSENT]),
        ({}, [ABSENT, ABSENT]),
        ({"include_usage": False}, [ABSENT, ABSENT]),
        ({"include_usage": True}, [None, None, (3, 2)]),
        ({"include_usage": True, "continuous_usage_stats": True}, [(3, 1), (3, 2), (3, 2)]),
        ({"continuous_usage_stats": True}, [(3, 1), (3, 2)]),
    ],
)
def test_usage_in_each_chunk(options: dict[str, bool] | None, usages: list[Any]) -> None:
    """Prompt tokens and output tokens so far; the last of three chunks has no choices."""
    engine = GatedEngine(writing("ab"))
    body: Any = {"model": "test", "prompt": "xyz", "max_tokens": 2, "extra_body": {"stream_options": options}}
    with serving(engine=engine) as server, client_of(server) as client:
        try:
            with client.completions.create(**body, stream=True) as stream:
                chunks = list[Any]()
                for _ in range(2):
                    engine.let(1)
                    chunks.append(next(stream))
                chunks += stream
        finally:
            engine.let(1000)

    def usage_of(chunk: Any) -> Any:
        if "usage" not in chunk.model_fields_set:
            return ABSENT
        usage = chunk.usage
        return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)

    assert [usage_of(chunk) for chunk in chunks] == usages
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0][: len(usages)]


def test_each_chat_choice_begins_once_and_has_its_own_seed() -> None:
    asked: Any = {"model": "test", "messages": HI, "n": 3, "seed": 4, "max_tokens": 20}
    texts = {0: "", 1: "", 2: ""}
    roles = list[int]()
    with serving(by_seed, seconds=0.002) as server, client_of(server) as client:
        for chunk in client.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles.append(choice.index)
    assert texts == {i: letters_by_seed(b"<user>Hi<assistant>", 4 + i, 20) for i in range(3)}
    assert sorted(roles) == [0, 1, 2]
