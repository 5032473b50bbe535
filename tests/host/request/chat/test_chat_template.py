"""Chat templates: output equal to Hugging Face's, the files they come from, and their limits."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.errors import CorruptFile
from orca_jax.request.chat import chat_template
from orca_jax.request.chat.chat_template import (
    BadConversation,
    BadTemplateVariable,
    ChatTemplate,
    UnknownTemplate,
)
from orca_jax.request.chat.template_files import load_chat_template
from tests.places import ROOT

DEMO = ROOT / "orca_jax" / "demo_model"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Indented over several lines, as usual: blocks leave neither indentation nor newlines in the output.
INDENTED = """\
{{- bos_token }}
{%- if messages[0].role == "system" %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = "", messages %}
{%- endif %}
{%- set ns = namespace(turn=0) %}
{% for message in rest %}
    {% if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{ raise_exception("roles must alternate user/assistant/...") }}
    {% endif %}
    {% if message.role == "user" %}
        {% set ns.turn = ns.turn + 1 %}
[{{ ns.turn }}] {{ system + ": " if loop.first and system else "" }}{{ message.content | trim }}
    {% else %}
    -> {{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{{ "end" if not add_generation_prompt }}
{%- if tools is none and documents is none and not unk_token %} plain{% endif %}
"""
TURNS = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def turn(content: object, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": content}


# Output; each literal was compared once with transformers 5.23


def test_chatml_is_rendered() -> None:
    expected = (
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    template = ChatTemplate(CHATML)
    assert template.render(TURNS) == expected + "<|im_start|>assistant\n"
    assert template.render(TURNS, add_generation_prompt=False) == expected


def test_blocks_over_indented_lines() -> None:
    template = ChatTemplate(INDENTED, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    expected = "<s>[1] Be brief.: Hi\n    -> Hello.</s>\n[2] Bye\n"
    assert template.render(TURNS) == expected + " plain"
    assert template.render(TURNS, add_generation_prompt=False) == expected + "end plain"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é> \'&\'"}'),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}", '"<\\u00e9> \'&\'"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=True) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ messages[0].content }}", "<é> '&'"),  # no HTML escapes
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% if i == 4 %}{% break %}"
         "{% endif %}{% endfor %}", "0134"),
        ("{% for c in 'abc' if c != 'b' %}{{ [loop.index, c, loop.length, loop.last] }}{% endfor %}",
         "[1, 'a', 2, False][2, 'c', 2, True]"),
        ("{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for x in missing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ bos_token }}|{{ messages[0].name }}|", "||"),
        ("{% macro m(a) %}({{ a }}){% endmacro %}{{ m(1) }}{{ m('x') }}", "(1)(x)"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)  # fmt: skip
def test_features_that_templates_use(source: str, expected: str) -> None:
    assert ChatTemplate(source).render([turn("<é> '&'")]) == expected


SYNTAX = st.sampled_from(
    ["{{", "}}", "{%", "%}", "{#", "#}", "{{ 7 * 7 }}", "{% raw %}", "{%- endfor %}", "\n", " ", "# for", "'"]
)


@given(st.lists(st.lists(SYNTAX | st.text(max_size=5)).map("".join), min_size=1, max_size=4))
def test_messages_are_data(contents: list[str]) -> None:
    turns = [turn(content) for content in contents]
    assert load_demo().render(turns) == "\n".join(contents)
    marked = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}").render(turns)
    assert marked == "".join(f"<{content}>" for content in contents)


def load_demo() -> ChatTemplate:
    templates = load_chat_template(DEMO, None)
    assert templates is not None
    return templates.choose()


def test_the_demo_models_template_is_the_one_that_its_script_exports() -> None:
    exported = ROOT / "scripts" / "demo_model" / "chat_template.jinja"
    assert (DEMO / "chat_template.jinja").read_bytes() == exported.read_bytes()


# Failures


def test_a_template_that_raises_rejects_the_messages() -> None:
    template = ChatTemplate(INDENTED)
    with pytest.raises(BadConversation, match="refuses the messages: roles must alternate user") as caught:
        template.render([turn("a"), turn("b")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append' of 'list'"),
        ("{% set _ = messages[0].update(role='x') %}", "SecurityError: access to attribute 'update'"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "SecurityError: access to attribute '__class__'"),
        ("{{ raise_exception.__globals__.x }}", "SecurityError: access to attribute '__globals__'"),
        ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'other' %}", "no loader"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
        ("{{ range(1000000) }}", "Range too big"),
    ],
)  # fmt: skip
def test_a_template_that_fails_names_the_error(source: str, message: str) -> None:
    with pytest.raises(BadConversation, match=re.escape(message)):
        ChatTemplate(source).render([turn("a")])


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% for a in messages[0].content %}{% for b in messages[0].content %}{% endfor %}{% endfor %}",
        "{% for a in 'ab' recursive %}{% if loop.depth < 40 %}{{ loop('ab') }}{% endif %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
        "{% set n = namespace(s='') %}"
        "{% for c in messages[0].content %}{% set n.s = n.s + c * 999 %}{% endfor %}",
    ],
)
def test_an_endless_template_is_stopped(source: str) -> None:
    template = ChatTemplate(source, max_seconds=0.1)
    start = time.monotonic()
    with pytest.raises(BadConversation, match=r"more than 0\.1 seconds"):
        template.render([turn("a" * 1_000_000)])
    assert time.monotonic() - start < 10


def test_a_long_output_is_rejected_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 1000)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(template.render([turn("x" * 100)] * 10)) == 1000
    with pytest.raises(BadConversation, match="more than 1000 characters"):
        template.render([turn("x" * 100)] * 11)
    forever = ChatTemplate(
        "{% for i in range(100000) %}{% for i in range(100000) %}a{% endfor %}{% endfor %}"
    )
    with pytest.raises(BadConversation, match="more than 1000 characters"):
        forever.render([turn("a")])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "the template, line 2: "),
        ("{{ x", "the template, line 1: "),
        ("{% for x in y %}", "the template, line 1: Unexpected end of template"),
        ("{{ x | no_such_filter }}", "the template, line 1: No filter named 'no_such_filter'"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "the template is not a usable template: SyntaxError"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "the template is not a usable template: RecursionError"),
        ("x" * 1_000_001, "the template has 1000001 characters; at most 1000000 are allowed"),
    ],
)
def test_an_invalid_template(source: str, message: str) -> None:
    with pytest.raises(CorruptFile, match=re.escape(message)):
        ChatTemplate(source, origin="the template")


# Files


def checkpoint(directory: Path, **files: Any) -> Path:
    """A directory with these files: text as .jinja, bytes as they are, anything else as .json."""
    for name, value in files.items():
        if isinstance(value, str):
            (directory / f"{name}.jinja").write_text(value, encoding="utf-8")
        else:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            (directory / f"{name}.json").write_bytes(data)
    return directory


def rendered(directory: Path | None, file: Path | None = None) -> str | None:
    templates = load_chat_template(directory, file)
    return None if templates is None else templates.choose().render([turn("x")])


def test_where_the_template_is_found(tmp_path: Path) -> None:
    assert rendered(None) is None
    assert rendered(tmp_path) is None
    checkpoint(tmp_path, tokenizer_config={"chat_template": None, "model_max_length": int(1e30)})
    assert rendered(tmp_path) is None
    checkpoint(tmp_path, tokenizer_config={"chat_template": "config {{ messages[0].content }}"})
    assert rendered(tmp_path) == "config x"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    checkpoint(tmp_path, tokenizer_config={"chat_template": several})
    assert rendered(tmp_path) == "default"
    checkpoint(tmp_path, chat_template="own\n")
    assert rendered(tmp_path) == "own"
    (tmp_path / "mine").write_text("{{ messages[0].role }}")
    assert rendered(tmp_path, tmp_path / "mine") == "user"
    assert rendered(None, tmp_path / "mine") == "user"


def test_a_template_is_chosen_by_name(tmp_path: Path) -> None:
    several = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    checkpoint(tmp_path, tokenizer_config={"chat_template": several})

    def shown(name: str | None = None, *, has_tools: bool = False) -> str:
        templates = load_chat_template(tmp_path, None)
        assert templates is not None
        return templates.choose(name, has_tools=has_tools).render([turn("x")])

    assert [shown(), shown(has_tools=True), shown("rag")] == ["default", "tool_use", "rag"]
    assert shown("rag", has_tools=True) == "rag"
    with pytest.raises(UnknownTemplate, match="'other'; chat_template must be one of default, rag, tool_use"):
        shown("other")
    # Files replace what tokenizer_config.json has.
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("rag in a file")
    assert shown("rag") == "rag in a file"
    with pytest.raises(UnknownTemplate, match="'default'; chat_template must be one of rag"):
        shown()
    checkpoint(tmp_path, chat_template="own")
    assert [shown(), shown(has_tools=True), shown("rag")] == ["own", "own", "rag in a file"]
    (more / "rag.jinja").write_text("{{")
    with pytest.raises(CorruptFile, match=r"additional_chat_templates/rag\.jinja, line 1"):
        load_chat_template(tmp_path, None)
    for i in range(65):
        (more / f"{i}.jinja").write_text("")
    with pytest.raises(CorruptFile, match="66 additional chat templates; 64 are allowed"):
        load_chat_template(tmp_path, None)


def test_a_template_names_its_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ style }}{% set x = 1 %}{{ x }}{{ namespace(a=tone).a }}")
    assert template.render([turn("a")], variables={"style": "s", "tone": None}) == "s1None"
    with pytest.raises(
        BadTemplateVariable, match=r"has 'mood', .*; its variables: bos_token, style, tone"
    ) as caught:
        template.render([turn("a")], variables={"mood": 1})
    assert caught.value.param == "chat_template_kwargs.mood"
    for name in ("x", "namespace", "messages", "add_generation_prompt", "chat_template", "each step", "self"):
        with pytest.raises(BadTemplateVariable):
            template.render([turn("a")], variables={name: 1})


def test_a_template_knows_the_special_tokens(tmp_path: Path) -> None:
    checkpoint(
        tmp_path,
        chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": None,
        },
        special_tokens_map={"bos_token": "other", "unk_token": {"content": "<unk>"}, "additional": ["x"]},
    )
    assert rendered(tmp_path) == "<s>|</s>||<unk>"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": b"{"}, "tokenizer_config.json is not usable JSON"),
        ({"tokenizer_config": b"\xff"}, "tokenizer_config.json is not UTF-8: a wrong byte at 0"),
        ({"tokenizer_config": b"[" * 100_000}, "tokenizer_config.json is not usable JSON: RecursionError"),
        ({"tokenizer_config": b"9" * 5000}, "tokenizer_config.json is not usable JSON"),
        ({"tokenizer_config": ["a"]}, "tokenizer_config.json holds list, not a JSON object"),
        ({"tokenizer_config": b" " * 16_000_001}, "tokenizer_config.json has more than 16000000 bytes"),
        ({"tokenizer_config": {"chat_template": 5}}, "tokenizer_config.json: chat_template must be a text"),
        ({"tokenizer_config": {"chat_template": ["a"]}}, "chat_template must be a text, or a list"),
        ({"tokenizer_config": {"chat_template": [{"name": "a"}]}}, "chat_template must be a text, or a list"),
        ({"tokenizer_config": {"chat_template": 2 * [{"name": "a", "template": "b"}]}}, "the name 'a' twice"),
        ({"tokenizer_config": {"chat_template": "{{"}}, "tokenizer_config.json, line 1: "),
        ({"tokenizer_config": {"bos_token": 5}}, "tokenizer_config.json: bos_token must be a text"),
        ({"special_tokens_map": {"eos_token": {}}}, "special_tokens_map.json: eos_token must be a text"),
        ({"chat_template": "{{"}, "chat_template.jinja, line 1: "),
        ({"chat_template": "x" * 1_000_001}, "chat_template.jinja has more than 1000000 bytes"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, **files)
    with pytest.raises(CorruptFile, match=re.escape(message)) as caught:
        load_chat_template(tmp_path, None)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="nowhere cannot be read: No such file or directory"):
        load_chat_template(DEMO, tmp_path / "nowhere")
    with pytest.raises(CorruptFile, match="cannot be read: Is a directory"):
        load_chat_template(DEMO, tmp_path)
