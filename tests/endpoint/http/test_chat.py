"""POST /v1/chat/completions, called with OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers
from openai import OpenAI
from tokenizers import decoders, models, pre_tokenizers, processors

from orca_jax.request.request import Request
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from orca_jax.request.tokenizer import Tokenizer
from tests.endpoint.harness import CONFIG, MODEL, Server, serving, serving_model
from tests.endpoint.http_client import connected
from tests.endpoint.openai_client import by_seed, client_of, letters_by_seed
from tests.host.engines import orca, simulated

USER = {"role": "user", "content": "Hi"}


class Prompts:
    """An engine's tokens by seed; it records the prompts' texts."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, request: Request, index: int) -> int:
        self.last = bytes(request.prompt_ids).decode()
        return by_seed(request, index)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture(scope="module")
def server(prompts: Prompts) -> Iterator[Server]:
    with serving(prompts) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def ask(client: OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="test", messages=messages, **{"max_tokens": 4, **fields})


def test_a_chat_response(client: OpenAI) -> None:
    answer = ask(client, [USER], seed=2)
    prompt = b"<user>Hi<assistant>"
    assert answer.id.startswith("chatcmpl-") and len(answer.id) == len("chatcmpl-") + 32
    assert (answer.object, answer.model) == ("chat.completion", "test")
    assert answer.system_fingerprint.startswith("orca_jax-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.content) == ("assistant", letters_by_seed(prompt, 2, 4))
    assert (choice.message.tool_calls, choice.message.refusal) == (None, None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (19, 4, 23)


@pytest.mark.parametrize(
    "messages, prompt",
    [
        ([USER], "<user>Hi<assistant>"),
        (
            [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "é"}, USER],
            "<system>Be brief.<user>Hi<assistant>é<user>Hi<assistant>",
        ),
        ([{"role": "developer", "content": "Be brief."}, USER], "<system>Be brief.<user>Hi<assistant>"),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}],
            "<user>one\ntwo<assistant>",
        ),
        ([{"role": "user", "content": "{{ 7 * 7 }}\x00"}], "<user>{{ 7 * 7 }}\x00<assistant>"),
        ([{"role": "user", "content": ""}], "<user><assistant>"),
        ([{"role": "user", "content": []}], "<user><assistant>"),
    ],
)
def test_the_chat_template_makes_the_prompt(
    client: OpenAI, prompts: Prompts, messages: list[Any], prompt: str
) -> None:
    answer = ask(client, messages)
    assert prompts.last == prompt
    assert answer.usage.prompt_tokens == len(prompt.encode())


def test_a_reply_can_be_sent_back_as_a_message(client: OpenAI, prompts: Prompts) -> None:
    first = ask(client, [USER], seed=0)
    reply = first.choices[0].message
    ask(client, [USER, reply.model_dump(), USER])
    assert prompts.last == f"<user>Hi<assistant>{reply.content}<user>Hi<assistant>"


def test_only_the_template_adds_special_tokens() -> None:
    """The tokenizer could prepend a special token, and the template writes one."""
    library = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>"])
    start = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    given: list[tuple[int, ...]] = []

    def token(request: Request, index: int) -> int:
        given.append(request.prompt_ids)
        return ord("x")

    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(library)
    with (
        orca(simulated(token), config=CONFIG, model=MODEL, tokenizer=tokenizer) as service,
        serving_model(service, MODEL, CONFIG, tokenizer=tokenizer, chat_template=template) as server,
        client_of(server) as client,
    ):
        ask(client, [USER], max_tokens=1)
        client.completions.create(model="test", prompt="Hi", max_tokens=1)
    assert given == [(start, ord("H"), ord("i"))] * 2


def test_the_template_sees_message_names() -> None:
    template = (
        "{% for m in messages %}{{ m.name if m.name is defined else '?' }}:{{ m.content }};{% endfor %}"
    )
    prompts = Prompts()
    with serving(prompts, chat_template=template) as server, client_of(server) as client:
        ask(client, [{**USER, "name": "Ann"}, USER])
    assert prompts.last == "Ann:Hi;?:Hi;"


def test_n_replies_have_consecutive_seeds(client: OpenAI) -> None:
    answer = ask(client, [USER], n=3, seed=5)
    prompt = b"<user>Hi<assistant>"
    texts = [letters_by_seed(prompt, seed, 4) for seed in (5, 6, 7)]
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(texts))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 12)


def test_without_max_tokens_a_reply_is_as_long_as_the_model_allows(client: OpenAI) -> None:
    for max_tokens in None, openai.omit:
        answer = ask(client, [USER], max_tokens=max_tokens)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == MODEL.n_positions


def test_max_tokens_has_an_alias(client: OpenAI) -> None:
    for limits in (
        {"max_tokens": 7},
        {"max_tokens": None, "max_completion_tokens": 7},
        {"max_tokens": 7, "max_completion_tokens": 7},
    ):
        assert ask(client, [USER], **limits).usage.completion_tokens == 7


@pytest.mark.parametrize(
    "fault, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [USER, {"role": "user", "content": None}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages.1.content"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "Hi", "name": 5}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
        ({"max_tokens": 494}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 494}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"n": 129}, "n"),
        ({"temperature": 1e9}, "temperature"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_an_invalid_field_is_rejected_by_name(
    client: OpenAI, server: Server, fault: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [USER], extra_body=fault)
    assert caught.value.param == param
    assert server.gateway.n_live == 0


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
RENDERED = """\
{%- if tools %}{{ tools | tojson }}{% endif %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}
{%- for m in messages %}<{{ m.role }}>
    {%- if m.content is string %}{{ m.content }}{% else %}
        {%- for part in m.content %}({{ part.text }}){% endfor %}{% endif %}
    {%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}
    {%- if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}{{ m.tool_call_id or "" }}
{%- endfor %}{% if add_generation_prompt %}<reply{{ " style=" + style if style }}>{% endif %}"""
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"b": 1, "a": "é"}'}}


@pytest.mark.parametrize(
    "messages, fields, prompt",
    [
        ([USER], {}, "<user>Hi<reply>"),
        ([USER], {"chat_template_kwargs": {"style": "calm"}}, "<user>Hi<reply style=calm>"),
        ([USER], {"add_generation_prompt": False}, "<user>Hi"),
        ([USER], {"chat_template": "default", "add_generation_prompt": None}, "<user>Hi<reply>"),
        (
            [USER, {"role": "assistant", "content": "Yes, "}],
            {"continue_final_message": True},
            "<user>Hi<assistant>Yes, ",
        ),
        ([USER], {"documents": [{"text": "one"}, {"text": "two"}]}, "[one][two]<user>Hi<reply>"),
        (
            [USER],
            {"tools": [TOOL]},
            '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
            "<user>Hi<reply>",
        ),
        ([USER], {"tools": [TOOL], "tool_choice": "none"}, "<user>Hi<reply>"),
        ([USER], {"tools": []}, "<user>Hi<reply>"),
        (
            [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "sunny", "tool_call_id": "1"},
            ],
            {},
            '<assistant>[{"id": "1", "type": "function", "function": {"name": "weather", '
            '"arguments": {"b": 1, "a": "é"}}}]<tool>sunny1<reply>',
        ),
        ([{"role": "assistant", "content": "a", "reasoning_content": "b"}], {}, "<assistant>a~b<reply>"),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}],
            {},
            "<user>(one)(two)<reply>",
        ),
        (
            [{"role": "assistant"}, {"role": "assistant", "content": None}],
            {},
            "<assistant><assistant><reply>",
        ),
        *[
            (
                [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}],
                {},
                '<assistant>[{"type": "function", "function": {"name": "a", "arguments": '
                f"{json.dumps(arguments)}}}}}]<reply>",
            )
            for arguments in ("[]", '{"a": 1', "5", "[" * 99)  # a call that max_tokens cut is taken as text
        ],
    ],
)
def test_fields_of_the_template(messages: list[Any], fields: dict[str, Any], prompt: str) -> None:
    prompts = Prompts()
    with serving(prompts, chat_template=RENDERED) as server, client_of(server) as client:
        ask(client, messages, extra_body=fields)
        assert prompts.last == prompt
        tokenized = {key: value for key, value in fields.items() if key != "tool_choice"}
        if tokenized == fields:
            with connected(server) as http:
                answer = http.post("/tokenize", json={"messages": messages, **fields})
            assert bytes(answer.json()["tokens"]).decode() == prompt


@pytest.mark.parametrize(
    "messages, fields, param, message",
    [
        ([USER], {"chat_template": "rag"}, "chat_template", "no chat template 'rag'.*one of default"),
        ([USER], {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood", "its variables: style"),
        (
            [USER],
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "is a field of the request",
        ),
        ([USER], {"chat_template_kwargs": {"style": 5}}, "messages", "template fails .* TypeError"),
        (
            [USER],
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both true",
        ),
        (
            [{"role": "assistant", "tool_calls": [CALL]}],
            {"continue_final_message": True},
            "continue_final_message",
            "no content to continue",
        ),
        ([USER], {"tools": [{"type": "function"}]}, "tools.0.function", "it must be an object"),
        ([USER], {"tools": [{"type": "code", "function": {"name": "a"}}]}, "tools.0.type", "'function'"),
        ([USER], {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "a text"),
        ([USER], {"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "no known format"),
        ([{"role": "user"}], {}, "messages.0.content", "content is missing"),
        (
            [{"role": "user", "content": "a", "tool_calls": [CALL]}],
            {},
            "messages.0.tool_calls",
            "this message's role is user",
        ),
        ([{"role": "user", "content": "a", "tool_call_id": "1"}], {}, "messages.0.tool_call_id", "role tool"),
    ],
)
def test_bad_fields_of_the_template(
    messages: list[Any], fields: dict[str, Any], param: str, message: str
) -> None:
    with serving(chat_template=RENDERED) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            ask(client, messages, extra_body=fields)
        assert caught.value.param == param


def test_messages_that_the_template_rejects_are_a_client_error() -> None:
    template = "{{ raise_exception('two users in a row') }}"
    with serving(chat_template=template) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="two users in a row") as caught:
            ask(client, [USER, USER])
        assert caught.value.param == "messages"


def test_without_a_template_the_error_says_what_to_do() -> None:
    with serving(chat_template=None) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as caught:
            ask(client, [USER])
        assert caught.value.param == "messages"


def test_without_a_tokenizer_messages_are_rejected() -> None:
    with serving(tokenizer=False) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="no tokenizer") as caught:
            ask(client, [USER])
        assert caught.value.param == "messages"


def test_another_models_name_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "Hi"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
