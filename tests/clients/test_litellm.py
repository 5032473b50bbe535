"""LiteLLM, which speaks OpenAI's API to any server: chats with calls, whole and streamed."""

import json
from typing import Any

import pytest
from litellm import completion, stream_chunk_builder
from litellm.exceptions import BadRequestError

from tests.clients.page import MODEL, printed

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def ask(url: str, **fields: Any) -> Any:
    return completion(
        **{
            "model": "openai/demo",
            "api_base": url,
            "api_key": "none",
            "messages": [{"role": "user", "content": "Rome?"}],
            "max_tokens": 120,
            "seed": 4,
            "num_retries": 0,
            **fields,
        }
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call(url: str, choice: Any) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(url, **fields).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
    chunks = list(ask(url, stream=True, **fields))
    built: Any = stream_chunk_builder(chunks)
    (streamed,) = built.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert built.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_with_a_tool(errands: str, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    fields: Any = {"model": f"openai/{MODEL}", "messages": messages, "tools": TOOLS, "stream": streamed}
    answer = ask(errands + "/v1", **fields)
    built: Any = stream_chunk_builder(list(answer)) if streamed else answer
    message = built.choices[0].message
    (call,) = message.tool_calls
    # LiteLLM's own message goes back as it is, with the fields that it adds.
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "hoarfrost"}]
    said = ask(errands + "/v1", **{**fields, "stream": False})
    assert said.choices[0].message.content == "It says hoarfrost, as you asked."


def test_the_documented_program_prints_a_reply(errands: str) -> None:
    assert printed("LiteLLM", errands)


def test_text_whole_and_streamed(url: str) -> None:
    text = ask(url).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(url, stream=True))
    assert text and streamed == text


def test_a_refusal_is_a_client_error(url: str) -> None:
    with pytest.raises(BadRequestError, match="letters, digits"):
        ask(url, tools=[{"type": "function", "function": {"name": "a b"}}])
