"""The harness itself: each kind of fault on a page is found."""

import pytest
from playwright.sync_api import Browser

from tests.browser.chromium import watched
from tests.endpoint.harness import Server

FAULTS = {
    "console.error('an error')": "console: an error",
    "setTimeout(() => { throw new Error('thrown') })": "uncaught: thrown",
    "Promise.reject(new Error('rejected')); 0": "uncaught: rejected",
    "fetch('/nowhere'); 0": "status of 404 ",
    "fetch('http://127.0.0.1:9/').catch(() => {}); 0": "console: policy: connect-src blocked",
    "setTimeout(() => { document.createElement('script').text = '0'; })": "requires 'TrustedScript'",
    "document.body.setAttribute('style', 'color: red')": "policy: style-src-attr blocked inline",
    "open('http://127.0.0.1:9/'); 0": "request to another host: http://127.0.0.1:9/",
}


@pytest.mark.parametrize("script", FAULTS)
def test_a_fault_is_found(browser: Browser, server: Server, script: str) -> None:
    """A script may be reported twice, once as an exception and once as a violation, in either order."""
    with pytest.raises(pytest.fail.Exception) as failure:
        run_faulty(browser, server.url, script)
    assert FAULTS[script] in str(failure.value)


def run_faulty(browser: Browser, url: str, script: str) -> None:
    with watched(browser, url) as (page, faults):
        page.goto("/docs")
        assert faults.found == []
        page.evaluate(script)
        for _ in range(100):
            if any(FAULTS[script] in fault for fault in faults.found):
                break
            page.wait_for_timeout(20)


def test_an_expected_status_is_no_fault(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (page, faults):
        faults.expected_statuses.add(404)
        page.goto("/docs")
        assert page.evaluate("fetch('/nowhere').then((response) => response.status)") == 404


def test_a_fault_fails_the_test(browser: Browser, server: Server) -> None:
    with pytest.raises(pytest.fail.Exception, match="console: an error"):
        tell_an_error(browser, server.url)


def tell_an_error(browser: Browser, url: str) -> None:
    with watched(browser, url) as (page, _):
        page.goto("/docs")
        page.evaluate("console.error('an error')")
