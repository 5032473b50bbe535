"""LangChain: an agent with a tool, and a chat model with structured output, whole and streamed."""

from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.page import MODEL, printed


@tool
def weather(place: Literal["Rome", "Oslo"]) -> str:
    """The weather."""
    return f"sleet in {place}"


class Weather(BaseModel):
    """The weather."""

    place: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture
def model(url: str) -> ChatOpenAI:
    settings: Any = {"base_url": url, "api_key": "none", "max_completion_tokens": 120, "seed": 5}
    return ChatOpenAI(model="demo", max_retries=0, timeout=60, **settings)


def test_a_call_is_forced_whole_and_streamed(model: ChatOpenAI) -> None:
    bound = model.bind_tools([weather], tool_choice="weather")
    answer = bound.invoke("Rome?")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["place"] in ("Rome", "Oslo")
    assert answer.response_metadata["finish_reason"] == "tool_calls" and not answer.invalid_tool_calls
    whole: Any = None
    n_chunks = 0
    for chunk in bound.stream("Rome?"):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
        n_chunks += 1
    assert n_chunks > 3
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_is_an_object_of_the_class(model: ChatOpenAI, method: Any) -> None:
    answer = model.with_structured_output(Weather, method=method).invoke("Rome?")
    assert isinstance(answer, Weather) and answer.days in (1, 2, 3)


def test_the_documented_program_prints_the_reply(errands: str) -> None:
    assert printed("LangChain", errands) == "It says drizzle, as you asked.\n"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_its_tool_and_answers(errands: str, streamed: bool) -> None:
    settings: Any = {"base_url": errands + "/v1", "api_key": "none"}
    agent: Any = create_agent(ChatOpenAI(model=MODEL, max_retries=0, timeout=60, **settings), [weather])
    ask: Any = {"messages": [{"role": "user", "content": "What is the weather in Rome?"}]}
    if streamed:
        steps = list(agent.stream(ask, stream_mode=["messages", "values"]))
        assert sum(mode == "messages" for mode, _ in steps) > 10
        messages = [step for mode, step in steps if mode == "values"][-1]["messages"]
    else:
        messages = agent.invoke(ask)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].content == "sleet in Rome"
    assert messages[3].content == "It says sleet, as you asked."
