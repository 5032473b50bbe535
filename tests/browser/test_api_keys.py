"""A server with API keys: the pages ask for one, keep it in the tab, and go on."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from server.settings.api_keys import ApiKeys
from tests.browser.chromium import watched
from tests.browser.playground import Playground
from tests.endpoint.harness import serving


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with (
        serving(keys=ApiKeys(["a-secret-key"])) as server,
        watched(browser, server.url) as (page, faults),
    ):
        faults.expected_statuses.add(401)
        page.goto("/")
        yield page


def test_the_dialog_asks_until_the_key_is_right(page: Page) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog.get_by_label("Key", exact=True)).to_be_focused()
    dialog.get_by_label("Key", exact=True).fill("wrong")
    dialog.get_by_role("button", name="Use key").click()
    expect(dialog).to_be_visible()
    expect(dialog).to_have_count(1)
    dialog.get_by_label("Key", exact=True).fill("a-secret-key")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(page.locator("#model-card h2")).to_have_text("test")
    stored = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie, location.href]")
    assert stored[0].pop("orca-api-key") == "a-secret-key" and stored[1:] == [{}, "", page.url]
    assert stored[0].keys() == {"orca-playground"} and "secret" not in stored[0]["orca-playground"]
    playground = Playground(page)  # the key is there after a reload
    playground.fill(prompt="a", max_tokens=3)
    playground.run()
    assert playground.finish("length") == "abc"


def test_without_a_key_the_server_s_message_stays(page: Page) -> None:
    expect(page.get_by_label("Key", exact=True)).to_be_focused()  # a key pressed before closes nothing
    page.keyboard.press("Escape")
    expect(page.locator("#model-card").get_by_role("alert")).to_contain_text("API key")
    page.get_by_role("button", name="Try again").click()
    page.get_by_label("Key", exact=True).fill("a-secret-key")
    page.keyboard.press("Enter")
    expect(page.locator("#model-card h2")).to_have_text("test")


def test_the_button_replaces_and_forgets_the_key(page: Page) -> None:
    page.get_by_label("Key", exact=True).fill("a-secret-key")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="API key: given in this tab").click()
    page.keyboard.press("Enter")  # an empty one
    expect(page.get_by_role("button", name="API key: none")).to_be_focused()
    assert page.evaluate("sessionStorage['orca-api-key']") is None
