"""Conversations as OpenAI's clients send them, with the templates of 36 families.

Contents are texts, parts or null, and arguments of tool calls are text. `golden_openai.json` has
transformers' renderings, also with arguments as objects where that differs. If ours is neither, transformers'
rendering has one of the faults of `fault_of`, or the pair is in `DIFFERENCES` with its reason.
"""

import json
from collections import Counter
from datetime import datetime
from typing import Any

import pytest

from orca_jax.errors import InvalidRequest
from orca_jax.request.chat import template_sandbox
from orca_jax.request.chat.chat_template import ChatTemplate, NamedTemplates, Templates
from server.http.fields.conversation import ConversationFields
from server.http.generation.prepared_reply import rendered
from tests.endpoint.harness import DATA

FOLDER = DATA / "chat_templates"


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


CONVERSATIONS: dict[str, Any] = {each["name"]: each for each in read("openai_conversations.json")}
SPECIAL_TOKENS: dict[str, dict[str, str]] = read("special_tokens.json")
GOLDEN: dict[str, dict[str, Any]] = read("golden_openai.json")
DIFFERENCES = {
    (
        "gemma-4",
        "one part each",
    ): "after a part of a system message the template writes a space, after a text none",
    ("falcon", "developer message"): "the template writes only the content of a role that it does not know",
    ("falcon", "developer after system"): "the same",
    ("falcon", "developer message later"): "the same",
    (
        "starcoder2",
        "developer message",
    ): "refused as any system message is; the template takes it for a reply",
}


COUNTS = {
    "equal": 317,
    "transformers: fails": 176,
    "transformers: loses a text": 71,
    "transformers: shows parts as source text": 31,
    "transformers: names a role that the model does not know": 25,
    "transformers: loses a call": 6,
    "transformers: None": 4,  # DIFFERENCES
    "refused; transformers: fails": 115,
    "refused; transformers: loses a text": 10,
    "refused; transformers: None": 1,  # DIFFERENCES
}


class StoppedClock(datetime):
    """The day on which the golden renderings were made."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return datetime(2026, 11, 22, 12, 0)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "datetime", StoppedClock)


@pytest.fixture(scope="module")
def templates() -> dict[str, Templates]:
    return {family: load(family) for family in GOLDEN}


def load(family: str) -> Templates:
    def template(name: str) -> ChatTemplate:
        source = (FOLDER / f"{name}.jinja").read_text("utf-8")
        return ChatTemplate(source, special_tokens=SPECIAL_TOKENS[family])

    if not (FOLDER / family).is_dir():
        return template(family)
    names = [path.stem for path in sorted((FOLDER / family).glob("*.jinja"))]
    return NamedTemplates({name: template(f"{family}/{name}") for name in names})


def outcome(family: str, name: str, templates: dict[str, Templates]) -> str | InvalidRequest:
    fields = {key: value for key, value in CONVERSATIONS[name].items() if key != "name"}
    try:
        body = ConversationFields.model_validate(fields)
        return rendered(templates[family].choose(body.chat_template, has_tools=bool(body.tools)), body)
    except InvalidRequest as error:
        return error


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def lost_texts(conversation: dict[str, Any], prompt: str) -> list[str]:
    """The texts of the client that are missing in the prompt, except text next to calls."""
    messages = [message for message in conversation["messages"] if not message.get("tool_calls")]
    return [text for message in messages for text in texts_of(message) if text not in prompt]


def lost_names(conversation: dict[str, Any], prompt: str) -> set[str]:
    """Names of tools that occur in the prompt less often than they are offered and called."""
    calls = [call for message in conversation["messages"] for call in message.get("tool_calls") or ()]
    named = Counter(each["function"]["name"] for each in (*calls, *conversation.get("tools", ())))
    return {name for name, n in named.items() if prompt.count(name) < n}


def fault_of(golden: dict[str, Any], conversation: dict[str, Any]) -> str | None:
    """The fault in transformers' rendering; None if there is none."""
    prompts = [each["text"] for each in (golden, golden.get("objects", {})) if "text" in each]
    if not prompts:
        return "fails"
    faults = [_fault_of(prompt, conversation) for prompt in prompts]
    return None if None in faults else faults[-1]


def _fault_of(prompt: str, conversation: dict[str, Any]) -> str | None:
    if lost_texts(conversation, prompt):
        return "loses a text"
    if lost_names(conversation, prompt):
        return "loses a call"
    if any(source in prompt for source in ("'type': 'text'", '"type": "text"')):
        return "shows parts as source text"
    if "None" in prompt:
        return "says None"
    if '\\"city\\": \\"Köln' in prompt:
        return "escapes arguments"
    if "developer" in prompt.lower():
        return "names a role that the model does not know"
    return None


@pytest.mark.parametrize("family", GOLDEN)
def test_a_conversation_is_rendered_as_by_transformers_or_better(
    family: str, templates: dict[str, Templates]
) -> None:
    for name, golden in GOLDEN[family].items():
        ours = outcome(family, name, templates)
        fault = fault_of(golden, CONVERSATIONS[name])
        known = (family, name) in DIFFERENCES
        if isinstance(ours, InvalidRequest):
            assert fault in ("fails", "loses a text") or known, (name, ours)
        elif ours not in (golden.get("text"), golden.get("objects", {}).get("text")):
            assert fault or known, name


@pytest.mark.parametrize("family", GOLDEN)
def test_no_text_is_lost(family: str, templates: dict[str, Templates]) -> None:
    for name, conversation in CONVERSATIONS.items():
        ours = outcome(family, name, templates)
        if isinstance(ours, InvalidRequest):
            assert ours.param, name
            continue
        assert not lost_texts(conversation, ours), name
        assert "None" not in ours and "'type'" not in ours and '"type": "text"' not in ours, name
        template = templates[family].choose(None, has_tools="tools" in conversation)
        # The server refuses tools that the template does not read before it renders.
        if template.reads("tools") and not template.reading(has_tools="tools" in conversation).hides_calls:
            assert not lost_names(conversation, ours), name
            cut = [each for each in conversation["messages"] if "bad JSON" in str(each["content"])]
            assert not cut or "Kö" in ours


def test_how_many_are_equal(templates: dict[str, Templates]) -> None:
    """The numbers in the README of the data."""
    found = Counter[str]()
    for family, cases in GOLDEN.items():
        for name, golden in cases.items():
            ours = outcome(family, name, templates)
            fault = fault_of(golden, CONVERSATIONS[name])
            if isinstance(ours, InvalidRequest):
                found[f"refused; transformers: {fault}"] += 1
            elif ours in (golden.get("text"), golden.get("objects", {}).get("text")):
                found["equal"] += 1
            else:
                found[f"transformers: {fault}"] += 1
    assert found == COUNTS, dict(found)
