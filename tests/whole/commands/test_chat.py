"""`LLM.chat` equals `generate` on the prompt that the template renders."""

from typing import Any

import pytest

from examples import chat
from orca_jax import LLM, SamplingParams
from orca_jax.errors import NotSupported, PromptTooLong

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
BYE = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_a_chat_is_generate_on_the_rendered_text(tiny: LLM) -> None:
    texts = ["u:hello;", "u:hello;a:hi;u:bye;"]
    wanted = tiny.generate(texts, GREEDY)
    got: list[Any] = []
    results = tiny.chat(
        [HELLO, BYE], GREEDY, chat_template=TEMPLATE, on_result=lambda i, result: got.append((i, result))
    )
    assert [(result.text, result.n_input) for result in results] == [
        (result.text, len(text)) for result, text in zip(wanted, texts, strict=True)
    ]
    assert got == list(enumerate(results))
    (one,) = tiny.chat(HELLO, [GREEDY], chat_template=TEMPLATE)
    assert one.text == wanted[0].text


def test_a_reply_without_a_limit_is_as_long_as_the_model_allows(tiny: LLM) -> None:
    (result,) = tiny.chat(HELLO, chat_template="{{ messages[0].content }}")
    assert result.finish_reason == "stop" or result.n_input + len(result.token_ids) == 64
    assert result.n_input == 5
    with pytest.raises(PromptTooLong, match="64"):
        tiny.chat([{"role": "user", "content": "x" * 64}], chat_template="{{ messages[0].content }}")


def test_a_model_without_a_template(tiny: LLM) -> None:
    with pytest.raises(NotSupported, match=r"has no chat template; give one as chat_template") as caught:
        tiny.chat(HELLO)
    assert caught.value.param == "messages"


def test_the_example_holds_three_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    conversations = chat.main([])
    assert [len(conversation) for conversation in conversations] == [4, 2, 2]
    assert all(message["content"] for conversation in conversations for message in conversation)
    assert capsys.readouterr().out.startswith(
        f"user: The king\nassistant: {conversations[0][1]['content']}\n"
    )
