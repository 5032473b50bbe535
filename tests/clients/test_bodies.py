"""Requests as Open WebUI, Continue and Cline send them, written after their sources.

These three are not installed: one is a server with its own database, two are extensions of editors.
"""

import json
import urllib.request
from typing import Any

import pytest

from tests.clients.page import MODEL

QUESTION = "What is the weather in Rome?"
ANSWER = "It says squall, as you asked."
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "where"}},
    "required": ["place"],
}
FUNCTION: dict[str, Any] = {
    "name": "weather",
    "description": "The weather at a place",
    "parameters": PARAMETERS,
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Rome"}'},
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "squall"}

# Open WebUI puts together the calls of a stream from its deltas, and leaves their `index` in them.
OPEN_WEBUI = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "temperature": 0.8,
    "max_tokens": 500,
    "frequency_penalty": 0.0,
    "seed": 0,
    "stop": ["</stop>"],
}
OPEN_WEBUI_RESULTS = [{"role": "assistant", "content": "", "tool_calls": [{"index": 0, **CALL}]}, RESULT]

# Continue writes a space where there is no text. Its settings that are not set are not in the JSON.
CONTINUE = {
    "messages": [
        {"role": "system", "content": "You are in agent mode."},
        {"role": "user", "content": QUESTION},
    ],
    "model": MODEL,
    "max_tokens": 2048,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": FUNCTION}],
}
CONTINUE_RESULTS = [{"role": "assistant", "content": " ", "tool_calls": [CALL]}, RESULT]

# Cline's user messages are lists of parts, and a message with nothing but calls has no content.
CLINE = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f"<task>\n{QUESTION}\n</task>"},
                {"type": "text", "text": "<environment_details>\n# Current Mode\nACT MODE"},
            ],
        },
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
}
CLINE_RESULTS = [
    {"role": "assistant", "tool_calls": [CALL]},
    RESULT,
    {
        "role": "user",
        "content": [{"type": "text", "text": "<environment_details>\n# Current Mode\nACT MODE"}],
    },
]


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The contents of a stream's chunks together: `content`, `calls`, `finish_reason`, `usage`."""
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    said: dict[str, Any] = {"content": "", "calls": []}
    with urllib.request.urlopen(request, timeout=60) as response:
        *lines, done = [line for line in response.read().decode().split("\n\n") if line]
    assert done == "data: [DONE]"
    for line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        said["usage"] = chunk.get("usage")
        for choice in chunk["choices"]:
            said["finish_reason"] = choice["finish_reason"]
            said["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                if call["index"] == len(said["calls"]):
                    said["calls"].append({"name": call["function"]["name"], "arguments": ""})
                said["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
    return said


@pytest.mark.parametrize(
    "body, results",
    [
        pytest.param(OPEN_WEBUI, OPEN_WEBUI_RESULTS, id="Open WebUI"),
        pytest.param(CONTINUE, CONTINUE_RESULTS, id="Continue"),
        pytest.param(CLINE, CLINE_RESULTS, id="Cline"),
    ],
)
def test_a_turn_with_a_tool(errands: str, body: dict[str, Any], results: list[dict[str, Any]]) -> None:
    called = asked(errands, body)
    (call,) = called["calls"]
    assert called["finish_reason"] == "tool_calls" and called["usage"]["completion_tokens"] > 20
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"place": "Rome"})
    said = asked(errands, {**body, "messages": [*body["messages"], *results]})
    assert (said["content"], said["finish_reason"]) == (ANSWER, "stop")
