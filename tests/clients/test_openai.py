"""OpenAI's client: chat and responses with tools, whole and streamed, and objects of pydantic's classes."""

import json
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.clients.page import MODEL, printed


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["Rome", "Oslo"]


QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}
CHAT_TOOLS: Any = [pydantic_function_tool(Weather, name="weather")]
TOOLS: Any = [{"type": "function", **CHAT_TOOLS[0]["function"]}]
ANSWER = "It says sleet, as you asked."


@pytest.fixture
def client(errands: str) -> OpenAI:
    return OpenAI(base_url=errands + "/v1", api_key="none", max_retries=0, timeout=60)


def test_the_documented_program_prints_a_reply(errands: str) -> None:
    assert printed("OpenAI's client", errands)


def test_a_chat_with_a_tool(client: OpenAI) -> None:
    messages: list[Any] = [QUESTION]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
        n_deltas = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        choice = stream.get_final_completion().choices[0]
    whole = client.chat.completions.parse(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0]
    (call,) = choice.message.tool_calls or []
    (same,) = whole.message.tool_calls or []
    assert n_deltas > 1 and choice.finish_reason == whole.finish_reason == "tool_calls"
    assert call.function.parsed_arguments == same.function.parsed_arguments == Weather(place="Rome")
    # The client's own message goes back as it came, with `parsed`, `index` and nulls.
    messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sleet"}]
    said = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
    assert said.choices[0].message.content == ANSWER


def test_responses_with_a_tool(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=[QUESTION], tools=TOOLS) as stream:
        n_deltas = sum(event.type == "response.function_call_arguments.delta" for event in stream)
        streamed = stream.get_final_response()
    (call,) = streamed.output
    assert n_deltas > 1 and call.type == "function_call" and json.loads(call.arguments) == {"place": "Rome"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sleet"}
    items: list[Any] = [QUESTION, call.model_dump(), result]
    said = client.responses.create(model=MODEL, input=items, tools=TOOLS)
    assert said.output_text == ANSWER
    then = client.responses.create(model=MODEL, input=[result], tools=TOOLS, previous_response_id=streamed.id)
    assert then.output_text == ANSWER


def test_parsed_replies_are_objects_of_the_class(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    chat = client.chat.completions.parse(
        model="demo", messages=[QUESTION], response_format=Weather, max_completion_tokens=100
    )
    response = client.responses.parse(
        model="demo", input=[QUESTION], text_format=Weather, max_output_tokens=100
    )
    assert isinstance(chat.choices[0].message.parsed, Weather)
    assert isinstance(response.output_parsed, Weather)
