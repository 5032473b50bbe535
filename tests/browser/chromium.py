"""Debian's Chromium without a window, and pages that fail a test for whatever goes wrong on them.

    with watched(browser, server.url) as (page, faults):
        page.goto(server.url)

Faults are errors on the console, uncaught exceptions, violations of the policy and requests to another host.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request, expect

CHROMIUM = Path("/usr/bin/chromium")
SOON = 30_000  # milliseconds that nothing here takes
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Playwright reads the page's console, where a violation is only a text; the event says what was blocked.
_TELL_VIOLATIONS = """addEventListener("securitypolicyviolation", (event) =>
    console.error(`policy: ${event.violatedDirective} blocked ${event.blockedURI}`))"""

expect.set_options(timeout=SOON)


def launch(playwright: Playwright) -> Browser:
    """Chromium; the test is skipped where there is none, and fails in CI."""
    if not CHROMIUM.exists():
        reason = f"{CHROMIUM} is missing: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return playwright.chromium.launch(executable_path=CHROMIUM, args=[*_FLAGS], timeout=2 * SOON)


@dataclass
class Faults:
    """Errors of a page; `expected_statuses` are statuses of responses that the test expects."""

    host: str
    expected_statuses: set[int] = field(default_factory=set[int])
    found: list[str] = field(default_factory=list[str])

    def on_console(self, message: ConsoleMessage) -> None:
        # Chromium itself writes a line for every response of status 400 and above.
        expected = (f"status of {status} " in message.text for status in self.expected_statuses)
        if message.type == "error" and not any(expected):
            self.found.append(f"console: {message.text} ({message.location.get('url', '')})")

    def on_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and url.netloc != self.host:
            self.found.append(f"request to another host: {request.url}")


@contextmanager
def watched(
    browser: Browser, url: str, *, width: int = 1280, height: int = 800, **options: Any
) -> Iterator[tuple[Page, Faults]]:
    """A page of a fresh profile, and its faults; fails at the end if there were any.

    `options` are those of playwright's `Browser.new_context`, such as `color_scheme="dark"`.
    """
    faults = Faults(urlsplit(url).netloc)
    options = {"base_url": url, "reduced_motion": "reduce"} | options
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(SOON)
    context.add_init_script(_TELL_VIOLATIONS)
    context.on("request", faults.on_request)
    context.on("console", faults.on_console)
    context.on("weberror", lambda error: faults.found.append(f"uncaught: {error.error}"))
    try:
        yield context.new_page(), faults
    finally:
        context.close()
    if faults.found:
        pytest.fail("on the page: " + "; ".join(faults.found))


def serious_faults(page: Page) -> list[str]:
    """The faults of accessibility that axe calls serious or critical, each with its first element."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{found['id']}: {found['help']}: {found['nodes'][0]['html']} ({found['nodes'][0]['failureSummary']})"
        for found in violations
        if found["impact"] in ("serious", "critical")
    ]
