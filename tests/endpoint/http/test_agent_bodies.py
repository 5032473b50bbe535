"""Requests of agents and clients, shortened: each is answered, and unused fields are named.

They were recorded from the programs (see tests/clients), and have shorter texts, fewer tools and no personal
data.
"""

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from orca_jax.config import SchedulingConfig
from tests.endpoint.harness import CONFIG, MODEL, serving
from tests.endpoint.http_client import connected
from tests.endpoint.tool_replies import TEMPLATE, Replies

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ID = "00000000-0000-0000-0000-000000000000"
CACHED = {"cache_control": {"type": "ephemeral"}}


def schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


CITY = schema(place={"type": "string", "enum": ["Rome", "Oslo"]})
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": CITY, "strict": True},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Rome"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sun in Rome"}

CLAUDE_CODE = {
    "model": "test",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Thursday.\n</system-reminder>"},
                {"type": "text", "text": "Read note.txt and tell the word.", **CACHED},
            ],
        },
        {"role": "system", "content": "Available agent types for the Agent tool:\n- general"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A file.", "signature": "c2ln"},
                {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"file_path": "/note.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "tool_use_id": "toolu_01",
                    "type": "tool_result",
                    "content": "1\tthe word is heron\n",
                    "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
                }
            ],
        },
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are an interactive agent.", **CACHED},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                **schema(file_path={"type": "string"}),
            },
            "eager_input_streaming": True,
        },
        {"name": "mcp__" + "x" * 80, "input_schema": schema(), "defer_loading": True, **CACHED},
    ],
    "metadata": {"user_id": json.dumps({"device_id": "0", "session_id": ID})},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def said(role: str, text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{ID}", "role": role, "content": content}


CODEX = {
    "model": "test",
    "stream": True,
    "input": [
        said("developer", "You are a coding agent."),
        said("developer", "<permissions instructions>"),
        said("user", "<environment_context>"),
        said("user", "Read note.txt and tell the word."),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "exec_command",
            "arguments": '{"cmd":"cat note.txt"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "the word is heron"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": schema(cmd={"type": "string"}),
        },
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for sub-agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "close_agent",
                    "description": "Close an agent.",
                    "strict": False,
                    "parameters": schema(target={"type": "string"}),
                }
            ],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": ID,
    "client_metadata": {"x-codex-installation-id": ID},
}

OPENAI_AGENTS = {
    "include": [],
    "input": [
        {"content": "Rome?", "role": "user"},
        {
            "arguments": '{"place":"Rome"}',
            "call_id": "call_1",
            "name": "weather",
            "type": "function_call",
            "id": "fc_1",
            "status": "completed",
            "parsed_arguments": None,
            "caller": None,
            "namespace": None,
        },
        {"call_id": "call_1", "output": "Sun in Rome", "type": "function_call_output"},
    ],
    "instructions": "Be kind.",
    "model": "test",
    "stream": True,
    "tools": [
        {
            "name": "weather",
            "parameters": {**CITY, "title": "weather_args"},
            "strict": True,
            "type": "function",
            "description": "The weather of a place.",
            "defer_loading": None,
        }
    ],
}

# What the openai library's `parse` gives back, dumped and sent again.
OPENAI_PARSED = {
    "model": "test",
    "input": [
        {"role": "user", "content": "Rome?"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [
                {
                    "type": "output_text",
                    "text": '{"x":1}',
                    "annotations": [],
                    "logprobs": [],
                    "parsed": {"x": 1},
                }
            ],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "weather",
            "arguments": '{"place":"Rome"}',
            "parsed_arguments": {"place": "Rome"},
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "Sun"},
    ],
    "user": None,
    "metadata": None,
    "service_tier": "auto",
    "safety_identifier": "me",
    "text": {"verbosity": "low"},
}

A_CLIENTS_CHAT = {  # the openai library's messages sent back as they came, by LangChain, LiteLLM and others
    "model": "test",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Rome?", **CACHED}], "name": None},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
            "reasoning_content": None,
            "provider_specific_fields": {"refusal": None},
            "tool_calls": [{**CALL, "index": 0}],
        },
        RESULT,
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "metadata": {"session": "a"},
    "service_tier": "auto",
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "reasoning_effort": "medium",
    "prompt_cache_key": ID,
    "prompt_cache_retention": "24h",
    "safety_identifier": "me",
    "user": "me",
    "functions": None,
    "logit_bias": None,
    "modalities": ["text"],
    "prediction": None,
    "response_format": {"type": "text"},
    "verbosity": "medium",
}

AI_SDK = {
    "model": "test",
    "messages": [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        RESULT,
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
}
CLINE = {
    "model": "test",
    "messages": [{"role": "system", "content": "You are Cline."}, {"role": "user", "content": "Rome?"}],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning": {"effort": "none", "exclude": False},
}


@pytest.mark.parametrize(
    "path, body, unused",
    [
        pytest.param(
            f"{MESSAGES}?beta=true",
            CLAUDE_CODE,
            "context_management, messages.content.cache_control, messages.content.signature, "
            "system.cache_control, tools.eager_input_streaming, tools.defer_loading, tools.cache_control, "
            "output_config.effort",
            id="Claude Code",
        ),
        pytest.param(
            f"{MESSAGES}/count_tokens?beta=true",
            {name: CLAUDE_CODE[name] for name in ("messages", "system", "tools", "thinking")},
            "messages.content.cache_control, messages.content.signature, system.cache_control, "
            "tools.eager_input_streaming, tools.defer_loading, tools.cache_control",
            id="Claude Code, counting",
        ),
        pytest.param(
            RESPONSES,
            CODEX,
            "prompt_cache_key, client_metadata, tools.web_search, reasoning.summary, "
            "include.reasoning.encrypted_content",
            id="Codex",
        ),
        pytest.param(RESPONSES, OPENAI_AGENTS, None, id="openai-agents"),
        pytest.param(
            RESPONSES,
            OPENAI_PARSED,
            "safety_identifier, input.phase, input.content.parsed, input.parsed_arguments, text.verbosity",
            id="openai's parse",
        ),
        pytest.param(
            CHAT,
            A_CLIENTS_CHAT,
            "metadata, prompt_cache_key, prompt_cache_retention, safety_identifier, "
            "messages.content.cache_control, messages.provider_specific_fields, messages.tool_calls.index, "
            "reasoning_effort",
            id="LangChain and LiteLLM",
        ),
        pytest.param(CHAT, AI_SDK, None, id="the AI SDK, Continue and Open WebUI"),
        pytest.param(CHAT, CLINE, None, id="Cline"),
    ],
)
def test_a_body_is_answered_unchanged(path: str, body: dict[str, Any], unused: str | None) -> None:
    long = {"model": replace(MODEL, n_positions=4096), "config": replace(CONFIG, max_batch_tokens=4096)}
    replies = Replies("The word is heron.")
    with serving(replies, chat_template=TEMPLATE, **long) as server, connected(server) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-orca-ignored") == unused
    if "count_tokens" in path:
        assert response.json()["input_tokens"] > 500
        return
    assert "The word is heron." in response.text or _text(response) == "The word is heron."
    if "tools" in body:
        assert ("<tool>" in replies.prompt and "heron" in replies.prompt) or "Sun" in replies.prompt
    assert "cache_control" not in replies.prompt and "parsed" not in replies.prompt


def _text(response: httpx2.Response) -> str:
    """The text of a streamed reply, in any protocol."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    text = ""
    for event in map(json.loads, lines):
        if "choices" in event:
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
        elif event["type"] == "response.output_text.delta":
            text += event["delta"]
    return text


def test_a_models_list_with_a_clients_version() -> None:
    with serving() as server, connected(server) as client:
        assert client.get("/v1/models?client_version=0.169.0").status_code == 200


N_TURNS = 5_000


def turns(path: str) -> list[dict[str, Any]]:
    """A conversation with as many tool calls and their results, in the protocol's form."""
    found: list[dict[str, Any]] = [{"role": "user", "content": "Look at all of it."}]
    for i in range(N_TURNS):
        name, arguments, result = f"call_{i}", {"path": f"src/{i}.py"}, f"{i} lines"
        text = json.dumps(arguments)
        if path == CHAT:
            function = {"name": "read", "arguments": text}
            call = {"id": name, "type": "function", "function": function}
            found.append({"role": "assistant", "content": None, "tool_calls": [call]})
            found.append(
                {"role": "tool", "tool_call_id": name, "content": [{"type": "text", "text": result}]}
            )
        elif path == RESPONSES:
            found.append({"type": "function_call", "call_id": name, "name": "read", "arguments": text})
            found.append({"type": "function_call_output", "call_id": name, "output": result})
        else:
            use = {"type": "tool_use", "id": name, "name": "read", "input": arguments}
            content = [{"type": "text", "text": result}]
            answer = {"type": "tool_result", "tool_use_id": name, "content": content}
            found.append({"role": "assistant", "content": [{"type": "text", "text": "Next."}, use]})
            found.append({"role": "user", "content": [answer]})
    return found


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_conversation_of_five_thousand_tool_calls(path: str) -> None:
    reply = Replies("Done.")
    n = 1 << 21  # positions; a token is a byte here
    model = replace(MODEL, n_positions=n)
    sizes = replace(CONFIG, n_slots=n, max_batch_tokens=1 << 16, scheduling=SchedulingConfig())
    name = "input" if path == RESPONSES else "messages"
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {"model": "test", name: turns(path), limit: 8}
    with (
        serving(reply, model=model, config=sizes, chat_template=TEMPLATE) as server,
        connected(server) as client,
    ):
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "Done." in answer.text
    assert reply.prompt.count("<tool_call>") == N_TURNS and f"{N_TURNS - 1} lines" in reply.prompt
