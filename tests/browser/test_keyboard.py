"""The playground without a pointer, and what a screen reader hears."""

from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import serious_faults, watched
from tests.browser.playground import Playground
from tests.endpoint.harness import Server


def focused(page: Page) -> str:
    """The label or text of the element with the focus."""
    return page.evaluate(
        "(document.activeElement.labels?.[0] ?? document.activeElement).textContent"
        " || document.activeElement.getAttribute('aria-label')"
    )


def tab_to(page: Page, name: str, key: str = "Tab") -> list[str]:
    """Press `key` until this element has the focus; return those that had it on the way."""
    passed = list[str]()
    while not passed or passed[-1] != name:
        page.keyboard.press(key)
        passed.append(focused(page))
        assert len(passed) < 20, passed
    return passed


def test_a_run_with_the_keyboard_only(page: Page) -> None:
    page.goto("/")
    page.get_by_label("max_tokens", exact=True).wait_for()
    assert tab_to(page, "Chat")[0] == "Skip to the content"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "Completion"
    tab_to(page, "Probabilities of tokens")
    page.keyboard.press("Space")
    tab_to(page, "Seed", "Shift+Tab")
    page.keyboard.type("5")  # of an output that does not end by itself
    page.keyboard.press("Tab")
    assert focused(page) == "Prompt"
    page.keyboard.type("In the beginning")
    page.keyboard.press("Tab")
    assert focused(page) == "Run"
    page.keyboard.press("Enter")
    expect(page.locator(".finish")).to_have_text("length")
    assert focused(page) == "Run"  # the button that was Stop meanwhile
    for name in ("curl", "Python"):
        page.keyboard.press("Tab")
        assert focused(page) == name
    page.keyboard.press("Tab")
    expect(page.locator(".token").first).to_be_focused()
    page.keyboard.press("Tab")  # one stop for all tokens
    assert focused(page) == "Probabilities of tokens"
    expect(page.get_by_role("status")).to_have_text("Answer: reached its length, 128 tokens")


def test_control_and_enter_run_the_prompt(page: Page) -> None:
    playground = Playground(page)
    playground.fill(prompt="a", max_tokens=3, temperature=0)
    expect(page.locator(".shortcut").first).to_have_text("Ctrl Enter")
    page.get_by_role("textbox", name="Prompt").press("Control+Enter")
    playground.finish("length")


def test_axe_finds_nothing_serious_with_answers(browser: Browser, server: Server) -> None:
    for scheme in ("light", "dark"):
        with watched(browser, server.url, color_scheme=scheme) as (page, _):
            playground = Playground(page)
            playground.show_probabilities()
            page.get_by_text("more parameters").click()
            playground.fill(prompt="In the beginning", seed=1, max_tokens=48)
            page.get_by_role("button", name="Add pane").click()
            page.get_by_role("button", name="Run all").click()
            for pane in (1, 2):
                playground.finish("length", pane)
            page.locator(".token").first.focus()
            assert serious_faults(page) == []
            playground.chat()
            playground.fill(max_tokens=8)
            playground.send("In the beginning")
            playground.finish("length")
            page.get_by_role("button", name="Edit").first.click()
            assert serious_faults(page) == []
