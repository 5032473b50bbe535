"""Conversations in the playground, and models without a chat template."""

import json
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from orca_jax import LLM
from tests.browser.chromium import watched
from tests.browser.playground import Playground
from tests.device.model.golden_encoders import load_golden_encoder
from tests.endpoint.harness import Server, serving, serving_model
from tests.host.engines import LETTERS, writing


def reply(server: Server, messages: list[tuple[str, str]]) -> str:
    body = {
        "messages": [{"role": role, "content": content} for role, content in messages],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=30).json()
    return answer["choices"][0]["message"]["content"]


@pytest.fixture
def playground(page: Page) -> Playground:
    playground = Playground(page)
    playground.chat()
    playground.render_markdown(False)
    playground.fill(max_tokens=12, temperature=0)
    return playground


def test_a_conversation_shows_its_turns_and_is_sent_whole(
    playground: Playground, server: Server, page: Page
) -> None:
    page.get_by_label("System message").fill("Genesis 1")
    playground.send("In the beginning")
    playground.finish("length")
    system, first = ("system", "Genesis 1"), ("user", "In the beginning")
    one = ("assistant", reply(server, [system, first]))
    assert playground.turns() == [first, one]
    playground.send("And then")
    expect(page.locator(".finish")).to_have_count(2)
    playground.finish("length")
    second = ("user", "And then")
    two = ("assistant", reply(server, [system, first, one, second]))
    assert playground.turns() == [first, one, second, two]

    page.get_by_role("button", name="Edit").nth(1).click()  # the model's own words
    page.get_by_label("Message to edit").fill("was the Word")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Regenerate").last.click()
    playground.finish("length")
    one = ("assistant", "was the Word")
    assert playground.turns() == [
        first,
        one,
        second,
        ("assistant", reply(server, [system, first, one, second])),
    ]

    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Message to edit").fill("Thou shalt")
    page.get_by_role("button", name="Send again").click()
    playground.finish("length")
    first = ("user", "Thou shalt")
    assert playground.turns() == [first, ("assistant", reply(server, [system, first]))]


def test_an_edit_can_be_cancelled(playground: Playground, page: Page) -> None:
    playground.send("In the beginning")
    playground.finish("length")
    turns = playground.turns()
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Message to edit").fill("other")
    page.get_by_role("button", name="Cancel").click()
    assert playground.turns() == turns


def test_nothing_is_sent_without_a_message(playground: Playground, page: Page) -> None:
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("alert").first).to_have_text("Write a message first.")


def test_the_copy_has_the_whole_conversation(playground: Playground, page: Page) -> None:
    playground.send("In the beginning")
    playground.finish("length")
    page.get_by_role("textbox", name="Message", exact=True).fill("it's")
    command = playground.copied("Copy as curl")
    body = json.loads(command.partition("-d '")[2].rpartition("'")[0].replace("'\\''", "'"))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][2]["content"] == "it's" and "stream" not in body


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_chat_opens_first_for_a_model_with_a_template(browser: Browser, template: str | None) -> None:
    with (
        serving(writing("abc"), chat_template=template) as server,
        watched(browser, server.url) as (page, _),
    ):
        Playground(page, as_it_opens=True)
        chat = page.get_by_role("radio", name="Chat")
        note = page.get_by_text("cannot hold conversations")
        if template is None:
            expect(chat).to_be_disabled()
            expect(note).to_be_visible()
            expect(page.get_by_role("radio", name="Completion")).to_be_checked()
        else:
            expect(chat).to_be_checked()
            expect(note).to_be_hidden()


def test_a_model_without_a_tokenizer_takes_token_ids(browser: Browser) -> None:
    with serving(tokenizer=False) as server, watched(browser, server.url) as (page, _):
        playground = Playground(page)
        expect(page.get_by_text("This model has no tokenizer")).to_be_visible()
        expect(page.get_by_text("cannot hold conversations")).to_be_hidden()
        playground.fill(prompt="words", max_tokens=3)
        playground.run()
        expect(page.get_by_role("alert")).to_contain_text("as token ids, such as [1, 2, 3]")
        playground.fill(prompt="[5, 6]")
        playground.run()
        playground.finish("length")
        assert page.locator(".token").all_text_contents() == [f"token_id:{n}" for n in (5, 6, 7)]


def test_a_model_with_an_encoder_only_completes(browser: Browser) -> None:
    golden = load_golden_encoder("t5-gated")
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_batch_tokens": 64, "n_slots": 1024}
    with (
        LLM(golden.directory, **sizes) as llm,
        serving_model(
            llm.service, llm.config, llm.serving, tokenizer=LETTERS, chat_template="{{ 1 }}"
        ) as server,
        watched(browser, server.url) as (page, _),
    ):
        playground = Playground(page)
        expect(page.get_by_role("radio", name="Chat")).to_be_disabled()
        expect(page.get_by_text("cannot hold conversations")).to_be_visible()
        prompt = "".join(map(chr, range(32, 40)))
        playground.fill(prompt=prompt, max_tokens=4, temperature=0)
        page.get_by_text("more parameters").click()
        playground.setting("ignore_eos").check()
        playground.run()
        playground.finish("length")
        expect(page.locator(".facts")).to_contain_text("4 tokens")
