"""Forced tool calls of the demo model at temperature 1: every call parses and follows its schema."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from orca_jax import LLM
from orca_jax.request.chat.tools import OfferedTool, ToolWish
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from server.gateway.reply.events import ReplyEvent, whole_reply
from server.gateway.reply.reply import ReplyParser
from server.gateway.reply.reply_plan import ReplyPlan, plan_reply
from server.gateway.served_model import ServedModel
from server.gateway.tool_formats.table import TOOL_FORMATS
from tests.whole.server.random_schemas import random_schema

N_SCHEMAS = 240
N_QUICK = 12
FORMATS = [name for name in TOOL_FORMATS if name != "gpt_oss"]  # this model would never end its analysis


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_batch_size=32) as llm:
        yield llm


def random_tool(seed: int) -> OfferedTool:
    """A function whose parameters are a random schema of an object."""
    rng = random.Random(seed)
    while True:
        schema = random_schema(rng)
        if schema.get("type") == "object" and "$defs" not in json.dumps(schema.get("properties")):
            return OfferedTool(name=f"f_{seed}", parameters=schema)


def planned(llm: LLM, form: str, sampling: SamplingParams, wish: ToolWish) -> ReplyPlan:
    model = ServedModel(
        name="demo",
        service=llm.service,
        config=llm.config,
        serving=llm.serving,
        tokenizer=llm.tokenizer,
        tool_format=TOOL_FORMATS[form],
    )
    return plan_reply(model, "In the beginning", sampling, wish)


def check_calls(llm: LLM, seeds: range) -> int:
    """Generate a call for each, and return how many were complete before max_tokens."""
    running: list[tuple[Any, ReplyPlan, OfferedTool]] = []
    prompt = llm.tokenizer.encode("In the beginning") if llm.tokenizer else []
    for seed in seeds:
        sampling = SamplingParams(max_tokens=200, temperature=1.0, seed=seed)
        tool = random_tool(seed)
        wish = ToolWish(tools=[tool], must_call=True, parallel=False)
        plan = planned(llm, FORMATS[seed % len(FORMATS)], sampling, wish)
        rules = llm.service.rules(sampling, plan.form)
        running.append((llm.service.submit(prompt, rules), plan, tool))
    n_complete = 0
    for generation, plan, tool in running:
        result = generation.result(timeout=120)
        parser, events = ReplyParser(plan.read, plan.offered), list[ReplyEvent]()
        for character in result.text:
            events += parser.feed(character)
        reply = whole_reply(events + parser.finish())
        if result.finish_reason is FinishReason.LENGTH:
            assert (not reply.calls and reply.content == result.text) or len(reply.calls) == 1
            continue
        n_complete += 1
        (call,) = reply.calls
        assert (reply.content, call.name) == (None, tool.name)
        jsonschema_rs.validate(dict(tool.parameters or {}), json.loads(call.arguments))
    return n_complete


def test_forced_calls_parse_and_keep_to_their_schemas(llm: LLM) -> None:
    assert check_calls(llm, range(N_QUICK)) >= 0.9 * N_QUICK


@pytest.mark.long
def test_many_forced_calls_parse_and_keep_to_their_schemas(llm: LLM) -> None:
    assert check_calls(llm, range(N_QUICK, N_QUICK + N_SCHEMAS)) >= 0.9 * N_SCHEMAS


def test_under_auto_a_call_that_begins_keeps_to_its_schema(llm: LLM) -> None:
    """The model is forced to begin a call, and samples the rest."""
    tool = OfferedTool(
        name="count",
        parameters={"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]},
    )
    seen = set[int]()
    for seed in range(12):
        sampling = SamplingParams(max_tokens=120, temperature=1.0, seed=seed)
        plan = planned(llm, "hermes", sampling, ToolWish(tools=[tool], parallel=False))
        assert plan.form.lark is not None
        begun = plan.form.lark.replace("start: ", 'start: "So: <tool_call>" rest\nunused: ', 1)
        rules = llm.service.rules(sampling, replace(plan.form, lark=begun))
        text = llm.service.submit([1, 2, 3], rules).result(timeout=60).text
        parser = ReplyParser(plan.read, plan.offered)
        reply = whole_reply(parser.feed(text) + parser.finish())
        assert reply.content == "So:"
        seen.add(json.loads(reply.calls[0].arguments)["n"])
    assert seen <= {1, 2, 3} and len(seen) >= 2
