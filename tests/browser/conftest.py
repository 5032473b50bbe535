"""One browser for all tests, the demo model behind a real server, and a page that allows no fault."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from orca_jax import LLM
from tests.browser.chromium import Faults, launch, watched
from tests.endpoint.harness import Server, serving_model


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The demo model."""
    with LLM() as llm:
        yield llm


@pytest.fixture(scope="session")
def server(browser: Browser, llm: LLM) -> Iterator[Server]:
    """The demo model behind both endpoints. It comes after the browser: without one nothing is loaded."""
    assert llm.directory is not None
    template = (llm.directory / "chat_template.jinja").read_text()
    with serving_model(
        llm.service, llm.config, llm.serving, name="demo", tokenizer=llm.tokenizer, chat_template=template
    ) as server:
        yield server


@pytest.fixture
def watched_page(browser: Browser, server: Server) -> Iterator[tuple[Page, Faults]]:
    with watched(browser, server.url) as both:
        yield both


@pytest.fixture
def page(watched_page: tuple[Page, Faults]) -> Page:
    """A page of the server. The test fails if the console shows an error or anything else goes wrong."""
    return watched_page[0]


@pytest.fixture
def faults(watched_page: tuple[Page, Faults]) -> Faults:
    """The faults of `page`, to say which statuses the test provokes."""
    return watched_page[1]
