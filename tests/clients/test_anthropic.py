"""Anthropic's client: its runner of tools, streams, and the count of tokens."""

from typing import Any

import pytest
from anthropic import Anthropic, beta_tool

from tests.clients.page import MODEL, printed

called = list[str]()


@beta_tool
def weather(place: str) -> str:
    """The weather at a place.

    Args:
        place: where
    """
    called.append(place)
    return f"{place}: hoarfrost"


QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}
TURN: Any = {"model": MODEL, "max_tokens": 200, "messages": [QUESTION]}


@pytest.fixture
def client(errands: str) -> Anthropic:
    return Anthropic(base_url=errands, api_key="none", max_retries=0, timeout=60)


def test_the_documented_program_prints_the_reply(errands: str) -> None:
    assert printed("Anthropic's client", errands) == "It says drizzle, as you asked.\n"


def test_the_runner_streams_both_turns(client: Anthropic) -> None:
    called.clear()
    texts = list[str]()
    runner: Any = client.beta.messages.tool_runner(**TURN, tools=[weather], stream=True)
    for stream in runner:
        texts.append("".join(stream.text_stream))
    assert called == ["Rome"] and texts == ["", "It says hoarfrost, as you asked."]


def test_a_stream_is_what_a_whole_message_is(client: Anthropic) -> None:
    tools: Any = [weather.to_dict()]
    whole = client.messages.create(**TURN, tools=tools)
    with client.messages.stream(**TURN, tools=tools) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    (use,) = (block for block in streamed.content if block.type == "tool_use")
    (same,) = (block for block in whole.content if block.type == "tool_use")
    assert use.input == same.input == {"place": "Rome"}
    assert len(pieces) > 1 and streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted(client: Anthropic) -> None:
    tools: Any = [weather.to_dict()]
    counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION], tools=tools)
    usage = client.messages.create(**TURN, tools=tools).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
