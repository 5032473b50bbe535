"""Chat templates of real families: the text that transformers renders, to the character."""

import json
from datetime import datetime
from typing import Any

import pytest

from orca_jax.errors import InvalidRequest
from orca_jax.request.chat import template_sandbox
from orca_jax.request.chat.chat_template import Templates
from orca_jax.request.chat.template_files import load_chat_template
from server.http.fields.conversation import ConversationFields
from server.http.generation.prepared_reply import rendered
from tests.endpoint.harness import DATA

FOLDER = DATA / "chat_templates"


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


CONVERSATIONS: dict[str, Any] = {each["name"]: each for each in read("conversations.json")}
SPECIAL_TOKENS: dict[str, dict[str, str]] = read("special_tokens.json")
GOLDEN: dict[str, dict[str, dict[str, str]]] = read("golden.json")
CASES = [(family, name) for family, cases in GOLDEN.items() for name in cases]


class StoppedClock(datetime):
    """The day on which the golden renderings were made."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return datetime(2026, 11, 22, 12, 0)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "datetime", StoppedClock)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Templates]:
    """Each family's templates, as checkpoints have them: half of them in tokenizer_config.json."""
    loaded = dict[str, Templates]()
    for i, family in enumerate(SPECIAL_TOKENS):
        directory = tmp_path_factory.mktemp(family)
        named = {path.stem: path.read_text("utf-8") for path in sorted((FOLDER / family).glob("*.jinja"))}
        config: dict[str, Any] = dict(SPECIAL_TOKENS[family])
        if named:
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        elif i % 2:
            config["chat_template"] = (FOLDER / f"{family}.jinja").read_text("utf-8")
        else:
            (directory / "chat_template.jinja").write_bytes((FOLDER / f"{family}.jinja").read_bytes())
        (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        found = load_chat_template(directory, None)
        assert found is not None
        loaded[family] = found
    return loaded


def render(templates: Templates, conversation: dict[str, Any]) -> str:
    tools = conversation.get("tools")
    template = templates.choose(conversation.get("chat_template"), has_tools=tools is not None)
    return template.render(
        conversation["messages"],
        tools=tools,
        documents=conversation.get("documents"),
        add_generation_prompt=conversation.get("add_generation_prompt", True),
        continue_final_message=conversation.get("continue_final_message", False),
        variables=conversation.get("variables"),
    )


@pytest.mark.parametrize(("family", "name"), CASES)
def test_rendering_is_transformers(family: str, name: str, templates: dict[str, Templates]) -> None:
    golden = GOLDEN[family][name]
    if "text" in golden:
        assert render(templates[family], CONVERSATIONS[name]) == golden["text"]
        return
    with pytest.raises(InvalidRequest) as caught:
        render(templates[family], CONVERSATIONS[name])
    if golden["error"].startswith("TemplateError: "):
        assert golden["error"].removeprefix("TemplateError: ") in str(caught.value)


def test_golden_covers_what_it_should() -> None:
    assert len(GOLDEN) >= 10
    assert GOLDEN.keys() == SPECIAL_TOKENS.keys()
    for name, conversation in CONVERSATIONS.items():
        families = conversation.get("families", list(GOLDEN))
        assert [family for family in GOLDEN if name in GOLDEN[family]] == families
        assert (
            any("text" in GOLDEN[family][name] for family in families) or name == "continue without content"
        )
    n_texts = sum("text" in case for cases in GOLDEN.values() for case in cases.values())
    assert n_texts > 300


@pytest.mark.parametrize("family", GOLDEN)
def test_a_conversation_over_http_renders_alike(family: str, templates: dict[str, Templates]) -> None:
    """The fields of a request hold every conversation, with arguments of tool calls as OpenAI has them.

    Conversations that the template does not show whole are rendered otherwise: test_openai_conversations.py.
    """
    for name, golden in GOLDEN[family].items():
        conversation = json.loads(json.dumps(CONVERSATIONS[name]))
        if not is_whole(conversation, golden.get("text", "")) or name in ("parts", "continue parts"):
            continue
        if (family, name) == ("gpt-oss", "two tool calls"):  # its template leaves the second out
            continue
        fields = {
            key: conversation.pop(key) for key in ("name", "families", "variables") if key in conversation
        }
        for message in conversation["messages"]:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        body = ConversationFields.model_validate(
            {**conversation, "chat_template_kwargs": fields.get("variables")}
        )
        assert (
            rendered(templates[family].choose(body.chat_template, has_tools=bool(body.tools)), body)
            == golden["text"]
        ), name


def is_whole(conversation: dict[str, Any], prompt: str) -> bool:
    """Whether the prompt has all texts but the model's, and the names of called tools."""
    texts = list[str]()
    for message in conversation["messages"]:
        texts += [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if message["role"] in ("system", "user", "tool"):
            texts.append(str(message["content"]))
    return all(text.strip() in prompt or json.dumps(text)[1:-1] in prompt for text in texts)
