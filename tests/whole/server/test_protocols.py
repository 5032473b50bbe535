"""The demo model behind the Responses and Messages APIs: text and forced calls of a real engine."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from orca_jax import LLM
from tests.endpoint.anthropic_client import anthropic_of
from tests.endpoint.harness import Server, serving_model
from tests.endpoint.openai_client import client_of

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    '{# <tool_call> "arguments" #}'  # the form of calls
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        LLM(max_batch_size=4) as llm,
        serving_model(
            llm.service, llm.config, llm.serving, tokenizer=llm.tokenizer, chat_template=TEMPLATE
        ) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Iterator[Anthropic]:
    with anthropic_of(server) as client:
        yield client


def test_both_protocols_give_the_text_of_chat(openai: OpenAI, anthropic: Anthropic) -> None:
    hello: Any = [{"role": "user", "content": "In the beginning"}]
    chat = openai.chat.completions.create(model="test", messages=hello, max_tokens=12, temperature=0)
    response = openai.responses.create(
        model="test", input="In the beginning", max_output_tokens=12, temperature=0
    )
    greedy = {"temperature": 0}
    message = anthropic.messages.create(model="test", max_tokens=12, messages=hello, extra_body=greedy)
    text = chat.choices[0].message.content
    assert text
    assert response.output_text == message.content[0].text == text  # pyright: ignore[reportAttributeAccessIssue]
    assert response.usage and chat.usage
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_forced_calls_follow_their_schema(openai: OpenAI, anthropic: Anthropic) -> None:
    tool: Any = {"type": "function", "name": "count", "parameters": SCHEMA, "strict": True}
    with openai.responses.stream(
        model="test", input="Count", tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and json.loads(call.arguments)["n"] in (1, 2, 3)
    count: Any = {"name": "count", "input_schema": SCHEMA}
    with anthropic.messages.stream(
        model="test",
        max_tokens=200,
        messages=[{"role": "user", "content": "Count"}],
        tools=[count],
        tool_choice={"type": "tool", "name": "count"},
    ) as stream:
        message = stream.get_final_message()
    (use,) = message.content
    assert use.type == "tool_use" and use.input["n"] in (1, 2, 3)  # pyright: ignore[reportIndexIssue]
    assert message.stop_reason == "tool_use"
