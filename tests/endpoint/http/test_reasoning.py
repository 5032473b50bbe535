"""Reasoning, which a chat returns separately if the model's chat template shows its format."""

import json
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orca_jax.errors import ConfigError
from orca_jax.request.chat.chat_template import ChatTemplate
from orca_jax.request.request import Request
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from orca_jax.request.tokenizer import Tokenizer
from server.gateway.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS, reply_formats
from server.settings.endpoint_options import ReasoningFormatName, ToolFormatName
from tests.endpoint.harness import CONFIG, DATA, MODEL, serving, serving_model
from tests.endpoint.http_client import connected
from tests.endpoint.openai_client import client_of
from tests.host.engines import orca, simulated

USER: Any = {"role": "user", "content": "Hi"}
THINKS = "{# a reply has <think> and </think> #}{% for m in messages %}{{ m.content }}|{% endfor %}"
OPENS = THINKS + "<think>\n"
SWITCH = (
    THINKS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<think>\nBecause é.\n</think>\n\nYes.\n"


def said(text: str, template: str = THINKS, **more: Any) -> Any:
    data = text.encode()
    return serving(lambda _, i: data[i] if i < len(data) else 256, chat_template=template, **more)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "test", "messages": [USER], "max_tokens": 200, **fields}
    )


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, str, Any]:
    """Reasoning, content, finish reason and usage, put together."""
    reasoning, content, reason, usage = "", "", "", None
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return reasoning, content, reason, usage


@pytest.mark.parametrize(
    ("text", "template", "reasoning", "content", "n_reasoning"),
    [
        (THOUGHT, THINKS, "Because é.", "Yes.\n", len("<think>\nBecause é.\n</think>".encode())),
        (
            THOUGHT.removeprefix("<think>\n"),
            OPENS,
            "Because é.",
            "Yes.\n",
            len("Because é.\n</think>".encode()),
        ),
        ("Yes.", THINKS, None, "Yes.", 0),
        ("No end", OPENS, "No end", "", len("No end") + 1),
    ],
)
def test_reasoning_is_returned_separately(
    text: str, template: str, reasoning: str | None, content: str, n_reasoning: int
) -> None:
    with said(text, template) as server, client_of(server) as client:
        answer = ask(client)
        message = answer.choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
        assert answer.usage.completion_tokens_details.reasoning_tokens == n_reasoning
        parts = streamed(client)
        assert parts[:3] == (reasoning or "", content, "stop")
        assert parts[3].completion_tokens_details.reasoning_tokens == n_reasoning


def test_the_operator_can_turn_it_off_or_on() -> None:
    with said(THOUGHT, reasoning_format="none") as server, client_of(server) as client:
        answer = ask(client)
        assert answer.choices[0].message.content == THOUGHT
        assert answer.usage.completion_tokens_details is None
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with (
        said("[THINK]Hm.[/THINK]Yes.", plain, reasoning_format="mistral") as server,
        client_of(server) as client,
    ):
        assert ask(client).choices[0].message.reasoning_content == "Hm."


def test_effort_is_a_variable_of_the_template() -> None:
    prompts = list[str]()

    def token(request: Request, index: int) -> int:
        prompts.append(bytes(request.prompt_ids).decode())
        return 256

    with (
        serving(token, chat_template=THINKS + "{{ reasoning_effort }}") as server,
        client_of(server) as client,
    ):
        ask(client, reasoning_effort="low")
    with serving(token, chat_template=SWITCH) as server, client_of(server) as client:
        ask(client, reasoning_effort="none")
        ask(client)
        ask(client, reasoning_effort="high")
    assert prompts == ["Hi|low", "Hi|<think>\n\n</think>\n\n", "Hi|", "Hi|"]


def test_a_schema_is_for_what_comes_after_the_reasoning() -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
        },
    }
    for text, template in (('Hm {.\n</think>\n{"a":1}', OPENS), ('<think>Hm.</think>{"a":1}', THINKS)):
        with said(text, template) as server, client_of(server) as client:
            message = ask(client, response_format=form).choices[0].message
            assert message.reasoning_content.startswith("Hm") and json.loads(message.content) == {"a": 1}
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, extra_body={"guided_regex": "("})
            assert caught.value.param == "guided_regex"


def test_reasoning_comes_before_a_call_that_is_forced() -> None:
    text = 'Hm <tool_call>.\n</think>\n<tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>'
    template = OPENS + '{# <tool_call> "arguments" #}{{ "" if tools }}'
    with said(text, template) as server, client_of(server) as client:
        for choice in ("auto", "required"):
            message = (
                ask(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).choices[0].message
            )
            assert message.reasoning_content == "Hm <tool_call>."
            assert message.tool_calls[0].function.name == "note" and message.content is None


def test_markers_may_be_special_tokens() -> None:
    """Mistral's markers are: elsewhere they have no text, and only the format's grammar allows them."""
    library = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    names = ["<end>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]
    library.add_special_tokens(names)
    end, think, done, calls, args = map(library.get_vocab().__getitem__, names)
    tokenizer = Tokenizer(library)
    output = [think, *b"Hm.", done, *b"So. ", calls, *b"note", args, *b"{}", end]

    def token(request: Request, index: int) -> int:
        allowed = output[index] if index < len(output) else end
        constraint = request.constraint
        if constraint is not None:
            assert constraint_bits(constraint, request)[allowed], f"token {index}"
        return allowed

    template = "[TOOL_CALLS][ARGS][THINK]{{ '' if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with (
        orca(simulated(token), config=CONFIG, model=MODEL, tokenizer=tokenizer) as service,
        serving_model(service, MODEL, CONFIG, tokenizer=tokenizer, chat_template=template) as server,
        client_of(server) as client,
    ):
        assert server.model.tool_format is TOOL_FORMATS["mistral_v11"]
        answer = ask(client, tools=[TOOL], logprobs=True)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", "So.")
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("note", "{}")
        ]
        assert answer.usage.completion_tokens_details.reasoning_tokens == 5
        assert len(answer.choices[0].logprobs.content) == len(output) - 1, "but for the end"
        with connected(server) as http:  # elsewhere they have no text
            whole = http.post("/v1/completions", json={"prompt": "x", "max_tokens": len(output)}).json()
        assert whole["choices"][0]["text"] == "Hm.So. note{}"


def constraint_bits(constraint: Any, request: Request) -> Any:
    words = np.zeros(-(-MODEL.vocab_size // 32), np.int32)
    constraint.allowed(request.prompt_ids, request.output_ids, words)
    return np.unpackbits(words.view(np.uint8), bitorder="little")


@pytest.mark.parametrize(
    ("family", "tools", "reasoning"),
    [
        ("qwen2.5", "hermes", None),
        ("qwen3", "hermes", "think"),
        ("llama-3.2", "llama3", None),
        ("llama-3", None, None),
        ("mistral-v0.3", "mistral", None),
        ("mistral-v0.1", None, None),
        ("deepseek-r1-distill", None, "think"),
        ("gemma-3", None, None),
        ("phi-4", None, None),
    ],
)
def test_a_template_tells_the_format(family: str, tools: str | None, reasoning: str | None) -> None:
    template = ChatTemplate((DATA / "chat_templates" / f"{family}.jinja").read_text("utf-8"))
    found = reply_formats(template)
    assert tuple(None if each is None else each.name for each in found) == (tools, reasoning)
    assert reply_formats(template, "none", "none") == (None, None)


def test_names_of_formats() -> None:
    assert set(ToolFormatName.__args__) == {"auto", "none", *TOOL_FORMATS}
    assert set(ReasoningFormatName.__args__) == {"auto", "none", *REASONING_FORMATS}
    with pytest.raises(ConfigError, match="gpt_oss can be combined only with"):
        reply_formats(None, "gpt_oss", "think")
    with pytest.raises(ConfigError, match="must be one of auto, none, hermes"):
        reply_formats(None, "nonsense")
