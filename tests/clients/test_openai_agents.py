"""OpenAI Agents: an agent with a tool over both of OpenAI's protocols, and one whose output has a type."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.page import MODEL, printed

set_tracing_disabled(True)
QUESTION = "What is the weather in Rome?"


@function_tool
def weather(place: str) -> str:
    """The weather at a place."""
    return f"{place}: squall"


class Weather(BaseModel):
    """The weather."""

    place: Literal["Rome", "Oslo"]


@asynccontextmanager
async def model(protocol: Any, url: str, name: str) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield protocol(model=name, openai_client=client)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a new event loop; asyncio.run would drop a loop that LiteLLM has made and never closes."""
    with closing(asyncio.new_event_loop()) as loop:
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())


BOTH = pytest.mark.parametrize("protocol", [OpenAIResponsesModel, OpenAIChatCompletionsModel])


def test_the_documented_program_prints_the_reply(errands: str) -> None:
    assert printed("OpenAI Agents", errands) == "It says drizzle, as you asked.\n"


@BOTH
def test_an_agent_calls_its_tool_and_answers(errands: str, protocol: Any) -> None:
    async def runs() -> tuple[Any, Any]:
        async with model(protocol, errands + "/v1", MODEL) as served:
            agent = Agent(name="a", instructions="Be kind.", tools=[weather], model=served)
            whole = await Runner.run(agent, QUESTION)
            streamed = Runner.run_streamed(agent, QUESTION)
            kinds = [event.type async for event in streamed.stream_events()]
            assert "raw_response_event" in kinds
            again: Any = {"role": "user", "content": "Sure?"}
            return whole, await Runner.run(agent, [*streamed.to_input_list(), again])

    whole, more = run(runs())
    assert [item.type for item in whole.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert whole.final_output == more.final_output == "It says squall, as you asked."


@BOTH
def test_an_agent_with_a_type_of_output(url: str, protocol: Any) -> None:
    async def runs() -> Any:
        async with model(protocol, url, "demo") as served:
            settings = ModelSettings(max_tokens=100)
            agent = Agent(name="a", output_type=Weather, model_settings=settings, model=served)
            return (await Runner.run(agent, "Rome?")).final_output

    assert isinstance(run(runs()), Weather)
