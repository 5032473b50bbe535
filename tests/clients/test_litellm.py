"""LiteLLM, which speaks OpenAI's API to any server: chats with forced calls, whole and streamed."""

import json
from typing import Any

import pytest
from litellm import completion, stream_chunk_builder
from litellm.exceptions import BadRequestError

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


def test_text_whole_and_streamed(url: str) -> None:
    text = ask(url).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(url, stream=True))
    assert text and streamed == text


def test_a_refusal_is_a_client_error(url: str) -> None:
    with pytest.raises(BadRequestError, match="letters, digits"):
        ask(url, tools=[{"type": "function", "function": {"name": "a b"}}])
