"""Untrusted text in prompts, answers, names, errors and ids is shown as text and never runs."""

import json

from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.chromium import watched
from tests.browser.playground import Playground
from tests.endpoint.harness import serving
from tests.host.engines import writing

HOSTILE = "<script>window.harm = 1</script><img src=x onerror='window.harm = 1'><b>bold</b>"


def unharmed(page: Page) -> bool:
    return page.evaluate(
        "window.harm === undefined && !document.querySelector('main b, main img, main script')"
    )


def test_in_prompts_answers_and_the_model_s_name(browser: Browser) -> None:
    with (
        serving(writing(HOSTILE), name=HOSTILE) as server,
        watched(browser, server.url) as (page, _),
    ):
        playground = Playground(page)
        expect(page.locator("#model-card h2")).to_have_text(HOSTILE)
        playground.fill(prompt=HOSTILE, max_tokens=len(HOSTILE))
        playground.show_probabilities()
        playground.run()
        assert playground.finish("length") == HOSTILE
        page.locator(".token").first.hover()
        playground.show_probabilities(False)
        playground.run()
        assert playground.finish("length") == HOSTILE
        playground.chat()
        playground.fill(max_tokens=len(HOSTILE))
        playground.send(HOSTILE)
        playground.finish("length")
        assert playground.turns() == [("user", HOSTILE), ("assistant", HOSTILE)]
        assert unharmed(page)


def test_in_errors_ids_and_the_schema(page: Page) -> None:
    def refuse(route: Route) -> None:
        error = {"error": {"message": HOSTILE, "type": HOSTILE, "param": HOSTILE, "code": HOSTILE}}
        route.fulfill(status=200, headers={"X-Request-Id": HOSTILE}, body=f"data: {json.dumps(error)}\n\n")

    def schema(route: Route) -> None:
        document = route.fetch().json()
        properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
        properties[HOSTILE] = {"type": "string", "description": HOSTILE, "title": HOSTILE}
        document["info"]["description"] = HOSTILE
        route.fulfill(json=document)

    page.route("**/v1/completions", refuse)
    page.route("**/openapi.json", schema)
    playground = Playground(page)
    playground.fill(prompt="a")
    playground.run()
    expect(page.get_by_role("alert")).to_have_text(HOSTILE)
    assert unharmed(page)
    page.goto("/docs")
    expect(page.locator("#about")).to_contain_text(HOSTILE)
    assert unharmed(page)
