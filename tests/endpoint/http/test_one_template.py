"""A conversation gives the same prompt over each of three APIs, in the form that the template reads best."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.endpoint.harness import serving
from tests.endpoint.http_client import connected
from tests.endpoint.tool_replies import Replies

# It reads the first part of a system message, refuses other system messages, and prints a tool's content as
# it is: as Gemma 3's, Qwen 3.5's and Devstral's do.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('a system message must be the first') }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ m.content | string }}{% elif m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}<assistant>"
)


def parts(kind: str, *texts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def chat(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": parts("text", "Act.", "Never delete.")},
            {"role": "user", "content": parts("text", "w?", " Now.")},
            {"role": "developer", "content": "Hurry."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": parts("text", "3", "degrees")},
        ],
    }


def responses(arguments: str) -> dict[str, Any]:
    return {
        "max_output_tokens": 9,
        "instructions": "Act.\nNever delete.",
        "input": [
            {"role": "user", "content": parts("input_text", "w?", " Now.")},
            {"role": "developer", "content": "Hurry."},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": parts("input_text", "3", "degrees")},
        ],
    }


def messages(arguments: Mapping[str, Any]) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": parts("text", "3", "degrees")}
    return {
        "model": "test",
        "max_tokens": 9,
        "system": parts("text", "Act.", "Never delete."),
        "messages": [
            {"role": "user", "content": parts("text", "w?", " Now.")},
            {"role": "system", "content": "Hurry."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": arguments}],
            },
            {"role": "user", "content": [result]},
        ],
    }


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("/v1/chat/completions", chat('{"a": 1}'), '[f {"a": 1}]'),
        ("/v1/responses", responses('{"a": 1}'), '[f {"a": 1}]'),
        ("/v1/messages", messages({"a": 1}), '[f {"a": 1}]'),
        ("/v1/chat/completions", chat('{"a": 1'), '[f "{\\"a\\": 1"]'),  # cut by max_tokens
        ("/v1/responses", responses('{"a": 1'), '[f "{\\"a\\": 1"]'),
    ],
)
def test_a_conversation_reaches_the_model_whole(path: str, body: dict[str, Any], call: str) -> None:
    replies = Replies("Yes.")
    with serving(replies, chat_template=TEMPLATE) as server, connected(server) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    system = "<system>Act.\nNever delete.\n\nHurry."
    assert replies.prompt == f"{system}<user>w? Now.<assistant>{call}<tool>3\ndegrees<assistant>"
