"""Conversations as lines of `orca generate --input`: rendered, run and read as the HTTP endpoint does it."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orca_jax.errors import NotSupported
from orca_jax.request.sampling_params import SamplingParams
from server.commands import jsonl
from server.commands.answer_file import AnswerStream
from server.commands.replies import Replies
from tests.endpoint.harness import CONFIG, MODEL, Server, serving
from tests.endpoint.http_client import connected
from tests.endpoint.tool_replies import CALL, SCHEMA, TEMPLATE, ending
from tests.host.engines import LETTERS

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "weather", "description": "Looks.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
OTHER = {"type": "function", "function": {"name": "time"}}
LIMIT = SamplingParams(max_tokens=200, temperature=0.0)


class Held:
    """Stands in for the LLM of the command: the running service of a server."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.service, self.config, self.serving = server.service, MODEL, CONFIG
        self.name, self.tokenizer, self.text_directory = "test", LETTERS, directory

    def stream(self, prompt: Any, sampling: SamplingParams) -> Any:
        return self.service.submit(LETTERS.encode(prompt), sampling)


@contextmanager
def running(text: str, directory: Path, template: str | None = TEMPLATE) -> Iterator[tuple[Held, Server]]:
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    with serving(ending(text), chat_template=TEMPLATE) as server:
        yield Held(server, directory), server


def answers(llm: Any, *lines: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    source, sink = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode()), io.BytesIO()
    jsonl.run(
        llm,
        source,
        AnswerStream(sink),
        LIMIT,
        Console(file=io.StringIO()),
        replies=lambda: Replies(llm, advice="give one", **options),
    )
    return [json.loads(line) for line in sink.getvalue().splitlines()]


REASONED = f"<think>hm\nyes</think>\n\nIt is {CALL}{CALL}"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Good day", {}),
    ("<think>hm</think>Good day", {}),
    (REASONED, {"tools": TOOLS}),
    (REASONED, {"tools": TOOLS, "tool_choice": "none"}),
    (REASONED, {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}),
    (CALL, {"tools": [*TOOLS, OTHER], "tool_choice": "required"}),
    (CALL, {"tools": [*TOOLS, OTHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (CALL + CALL, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (CALL + CALL, {"tools": TOOLS, "parallel_tool_calls": False, "n": 2}),
    (CALL, {"tools": TOOLS, "max_tokens": 20}),
    (
        " and on",
        {"messages": [*HELLO, {"role": "assistant", "content": "Go"}], "continue_final_message": True},
    ),
    ("Good day", {"add_generation_prompt": False, "stop": ["day"]}),
    ("Good day", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}]}]}),
]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    plain = {name: value for name, value in message.items() if name != "refusal"}
    return {**plain, "tool_calls": calls} if calls else plain


@pytest.mark.parametrize(("text", "line"), CASES)
def test_a_reply_is_the_endpoint_s(text: str, line: dict[str, Any], tmp_path: Path) -> None:
    line = {"messages": HELLO, **line}
    with running(text, tmp_path) as (llm, server):
        (record,) = answers(llm, line)
        body = {"max_tokens": 200, "temperature": 0, "model": "test", **line}
        with connected(server) as client:
            response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        whole = response.json()
    assert (record["line"], record["messages"]) == (1, line["messages"])
    choices = record.get("choices", [record])
    assert record["n_input"] == whole["usage"]["prompt_tokens"]
    assert [(without_ids(choice["message"]), choice["finish_reason"]) for choice in choices] == [
        (without_ids(choice["message"]), choice["finish_reason"]) for choice in whole["choices"]
    ]
    ids = [call["id"] for choice in choices for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(ids) and all(len(name) == 29 for name in ids)


def test_the_calls_ids_do_not_depend_on_the_run(tmp_path: Path) -> None:
    with running(REASONED, tmp_path) as (llm, _):
        lines = [{"messages": HELLO, "tools": TOOLS}, {"messages": HELLO, "tools": TOOLS, "seed": 3}]
        first, second = answers(llm, *lines), answers(llm, *lines)
    assert [record["message"] for record in first] == [record["message"] for record in second]
    assert first[0]["message"]["tool_calls"][0]["id"] != first[1]["message"]["tool_calls"][0]["id"]
    assert first[0]["text"] == REASONED, "the text is all that the model wrote"


BAD_LINES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "no prompt and no messages"),
    ({"messages": None}, "prompt", "no prompt and no messages"),
    ({"messages": HELLO, "prompt": "a"}, "messages", "a prompt and messages"),
    ({"prompt": "a", "tools": TOOLS}, "tools", "tools goes with messages"),
    ({"messages": HELLO, "tool": TOOLS}, "tool", "unknown field 'tool'; did you mean tools?"),
    ({"messages": HELLO, "temperatur": 1}, "temperatur", "did you mean temperature?"),
    ({"messages": "Hello"}, "messages", "messages must be a list"),
    ({"messages": []}, "messages", "empty list"),
    ({"messages": ["Hello"]}, "messages.0", "not an object"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "content"),
    ({"messages": HELLO, "tools": {}}, "tools", "tools must be a list"),
    ({"messages": HELLO, "tools": ["weather"]}, "tools.0", "must be an object"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools.0.function", "an object with a name"),
    ({"messages": HELLO, "tools": TOOLS, "tool_choice": "some"}, "tool_choice", "tool_choice must be"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "tool_choice must be"),
    (
        {"messages": HELLO, "tools": TOOLS, "tool_choice": {"function": {"name": "x"}}},
        "tool_choice",
        "one of",
    ),
    (
        {"messages": HELLO, "chat_template": "{{ messages }}"},
        "chat_template",
        "the name of one of the model's",
    ),
    ({"messages": HELLO, "chat_template": "other"}, "chat_template", "no chat template 'other'"),
    ({"messages": HELLO, "continue_final_message": 1}, "continue_final_message", "must be true or false"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature", "'hot'"),
    ({"messages": HELLO, "max_tokens": 600}, "max_tokens", "at most"),
    (
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO}},
        "body",
        "`orca serve --batch-dir` runs",
    ),
]


def test_a_mistake_is_its_line_s(tmp_path: Path) -> None:
    good: dict[str, Any] = {"messages": HELLO, "tools": None, "tool_choice": "auto"}
    with running("Good day", tmp_path) as (llm, _):
        records = answers(
            llm, good, *(line for line, *_ in BAD_LINES), good, {"prompt": "a", "messages": None}
        )
    assert records[0]["message"]["content"] == records[-2]["message"]["content"] == "Good day"
    assert records[-1]["text"] == "Good day" and "message" not in records[-1]
    for record, (line, param, message) in zip(records[1:-2], BAD_LINES, strict=True):
        assert (record["error"]["param"], "text" in record) == (param, False), line
        assert message in record["error"]["message"], line


def test_a_model_without_a_template_ends_the_run(tmp_path: Path) -> None:
    """Every such line would have the same error, and a template changes what answers all lines."""
    with running("Good day", tmp_path, template=None) as (llm, _):
        assert answers(llm, {"prompt": "a"})[0]["text"] == "Good day"
        with pytest.raises(NotSupported, match="test has no chat template; give one"):
            answers(llm, {"prompt": "a"}, {"messages": HELLO})
        (tmp_path / "other.jinja").write_text("{{ messages[0].content }}")
        (record,) = answers(llm, {"messages": HELLO}, chat_template=tmp_path / "other.jinja")
    assert record["n_input"] == len("Hello")
