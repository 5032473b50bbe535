"""The playground keeps its state over a reload, within a bound, and never a key."""

import json
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from server.settings.api_keys import ApiKeys
from tests.browser.chromium import watched
from tests.browser.playground import Playground
from tests.endpoint.harness import serving
from tests.host.engines import writing

KEY = "orca-playground"


def reloaded(playground: Playground) -> None:
    playground.page.reload()
    playground.until_there()


def stored(page: Page) -> str:
    return page.evaluate(f"sessionStorage['{KEY}'] ?? ''")


def test_a_conversation_continues_after_a_reload(browser: Browser) -> None:
    with serving(writing("*ok*")) as server, watched(browser, server.url) as (page, _):
        playground = Playground(page)
        playground.chat()
        playground.fill(max_tokens=4, temperature=0.5)
        page.get_by_label("System message").fill("be short")
        page.get_by_label("Seed").fill("7")
        playground.send("one")
        playground.finish("length")
        page.get_by_role("textbox", name="Message", exact=True).fill("two")
        reloaded(playground)
        expect(page.get_by_role("radio", name="Chat")).to_be_checked()
        assert playground.turns() == [("user", "one"), ("assistant", "ok")]
        expect(page.locator(".markdown em")).to_have_text("ok")
        expect(page.get_by_label("System message")).to_have_value("be short")
        expect(page.get_by_role("textbox", name="Message", exact=True)).to_have_value("two")
        expect(playground.setting("temperature")).to_have_value("0.5")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send", exact=True).click()
        playground.finish("length")
        body = json.loads(request.value.post_data or "")
        assert body["messages"] == [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "*ok*"},
            {"role": "user", "content": "two"},
        ]
        assert (body["seed"], body["temperature"], body["max_tokens"]) == (7, 0.5, 4)


def test_panes_and_the_other_mode_are_kept(browser: Browser) -> None:
    with serving() as server, watched(browser, server.url) as (page, _):
        playground = Playground(page)
        playground.fill(prompt="left", max_tokens=3)
        page.get_by_role("button", name="Add pane").click()
        playground.fill(prompt="right", pane=2, seed=2)
        page.get_by_text("more parameters").click()
        playground.setting("ignore_eos").check()
        page.get_by_role("navigation").get_by_role("link", name="Live").click()
        page.get_by_role("navigation").get_by_role("link", name="Playground").click()
        playground.until_there()
        expect(page.get_by_role("radio", name="Completion")).to_be_checked()
        for pane, prompt in ((1, "left"), (2, "right")):
            expect(playground.pane(pane).get_by_role("textbox", name="Prompt")).to_have_value(prompt)
        expect(playground.pane(2).get_by_label("Seed")).to_have_value("2")
        expect(playground.setting("ignore_eos")).to_be_checked()


def test_an_answer_cut_off_by_a_reload_is_kept(browser: Browser) -> None:
    with serving(writing("abcdefghij"), seconds=0.02) as server, watched(browser, server.url) as (page, _):
        playground = Playground(page)
        playground.chat()
        playground.fill(max_tokens=400)
        playground.send("a")
        expect(page.locator(".choice")).to_contain_text("abcde")
        reloaded(playground)
        (_, (role, text)) = playground.turns()
        assert role == "assistant" and text.startswith("abcde") and ("abcdefghij" * 40).startswith(text)


def test_clear_forgets_what_is_shown(browser: Browser) -> None:
    with serving(writing("answer")) as server, watched(browser, server.url) as (page, _):
        playground = Playground(page)
        playground.fill(prompt="a prompt of the other mode")
        playground.chat()
        playground.fill(max_tokens=6)
        page.get_by_label("System message").fill("a secret")
        playground.send("a secret")
        playground.finish("length")
        assert "a secret" in stored(page)
        page.get_by_role("button", name="Clear").click()
        expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
        assert playground.turns() == [] and "secret" not in stored(page) and "answer" not in stored(page)
        reloaded(playground)
        assert playground.turns() == []
        expect(page.get_by_label("System message")).to_have_value("")
        assert "a prompt of the other mode" in stored(page)


BOUNDED = """async ([state, most]) => {
    const { bounded } = await import("/static/playground/kept.js");
    return bounded(state, most);
}"""


def test_the_oldest_messages_go_first(browser: Browser) -> None:
    with serving() as server, watched(browser, server.url) as (page, _):
        page.goto("/docs")
        the_oldest_go_first(page)


def the_oldest_go_first(page: Page) -> None:
    long = [{"role": "user", "content": f"{i:02}" + "é" * 98} for i in range(40)]
    short = [{"role": "user", "content": "short"}]
    state = {
        "mode": "chat",
        "chat": [{"messages": short}, {"messages": long}],
        "completion": [{"prompt": "p"}],
    }
    whole = json.loads(page.evaluate(BOUNDED, [state, 100_000]))
    assert whole == state
    text = page.evaluate(BOUNDED, [state, 2000])
    kept = json.loads(text)
    assert len(text) <= 2000
    assert kept["chat"][0] == {"messages": short}
    messages, n_left_out = kept["chat"][1]["messages"], kept["chat"][1]["nLeftOut"]
    assert messages == long[n_left_out:] and len(messages) > 10
    with pytest.raises(Exception, match="characters are too many to keep"):
        page.evaluate(BOUNDED, [state | {"completion": [{"prompt": "p" * 3000}]}, 2000])


def test_a_conversation_that_is_too_long_says_so(browser: Browser) -> None:
    with serving() as server, watched(browser, server.url) as (page, _):
        pane = {"messages": [{"role": "user", "content": str(i) * 600_000} for i in range(2)]}
        playground = opened_with(page, {"chat": [pane], "completion": [{}]})
        assert [text[:1] for _, text in playground.turns()] == ["0", "1"], (
            "as long as it is shown it is whole"
        )
        reloaded(playground)
        assert [text[:1] for _, text in playground.turns()] == ["1"]
        expect(page.get_by_text("too long to be kept over the reload")).to_contain_text(
            "The first message was"
        )
        assert len(stored(page)) < 1 << 20


def opened_with(page: Page, state: dict[str, Any] | str) -> Playground:
    """Open the page in a tab whose session storage has this state."""
    whole = {"version": 1, "mode": "chat", "parameters": {}}
    text = state if isinstance(state, str) else json.dumps(whole | state)
    page.goto("/docs")
    page.evaluate("([key, text]) => { sessionStorage[key] = text; }", [KEY, text])
    return Playground(page, as_it_opens=True)


@pytest.mark.parametrize(
    "text", ["", "{", "null", "7", '{"version": 0}', '{"version": 1, "chat": [{}], "completion": [{}]}']
)
def test_unknown_contents_of_the_storage_are_ignored(browser: Browser, text: str) -> None:
    with serving() as server, watched(browser, server.url) as (page, _):
        playground = opened_with(page, text)
        expect(page.get_by_role("radio", name="Chat")).to_be_checked()
        assert playground.turns() == []


def test_a_kept_conversation_and_a_model_without_chat(browser: Browser) -> None:
    with serving(chat_template=None) as server, watched(browser, server.url) as (page, _):
        messages = [{"role": "user", "content": "hello"}]
        opened_with(page, {"chat": [{"messages": messages}], "completion": [{}]})
        expect(page.get_by_role("radio", name="Completion")).to_be_checked()
        page.reload()
        assert "hello" in stored(page), "it is there when the model of before is served again"


def test_no_api_key_is_kept(browser: Browser) -> None:
    with serving(keys=ApiKeys(["a-secret-key"])) as server, watched(browser, server.url) as (page, faults):
        faults.expected_statuses.add(401)
        page.goto("/")
        page.get_by_label("Key", exact=True).fill("a-secret-key")
        page.keyboard.press("Enter")
        playground = Playground(page)
        playground.fill(prompt="a", max_tokens=3)
        playground.run()
        playground.finish("length")
        reloaded(playground)
        assert '"prompt":"a"' in stored(page)
        kept = page.evaluate("[sessionStorage['orca-playground'], JSON.stringify(localStorage)]")
        assert not any("secret" in text for text in kept)
