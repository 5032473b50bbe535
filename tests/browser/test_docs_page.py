"""The API page shows all of /openapi.json, and sends requests."""

import json

import httpx2
from playwright.sync_api import Locator, Page, expect

from tests.browser.chromium import Faults, serious_faults
from tests.endpoint.harness import Server


def route(page: Page, method: str, path: str) -> Locator:
    title = page.get_by_role("heading", name=f"{method} {path}", exact=True)
    return page.get_by_role("article").filter(has=title)


def test_the_api_page_has_every_route_and_field(page: Page, server: Server) -> None:
    document = httpx2.get(server.url + "/openapi.json").json()
    page.goto("/docs")
    links = page.get_by_role("navigation", name="Routes").get_by_role("link")
    links.first.wait_for()
    assert sorted(links.all_text_contents()) == sorted(
        f"{method}{path}" for path, methods in document["paths"].items() for method in methods
    )
    completions = route(page, "post", "/v1/completions")
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    names = (
        completions.locator("section", has_text="Body").first.locator(".property-name").all_text_contents()
    )
    assert sorted(names) == sorted(fields) and names[0] == "prompt"
    temperature = completions.locator(".property", has=page.get_by_text("temperature", exact=True))
    expect(temperature).to_contain_text(fields["temperature"]["description"])
    expect(temperature).to_contain_text("0 – 100")


def test_nested_schemas_open(page: Page) -> None:
    page.goto("/docs")
    chat = route(page, "post", "/v1/chat/completions")
    messages = chat.locator(".property", has=page.get_by_text("messages", exact=True)).first
    messages.get_by_text("ChatMessage", exact=True).last.click()
    messages.get_by_text("ContentPart", exact=True).last.click()
    expect(messages.get_by_text("image_url", exact=True)).to_have_count(1)
    assert serious_faults(page) == []


def test_the_example_is_sent(page: Page) -> None:
    page.goto("/docs")
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        section = route(page, "post", path)
        section.get_by_text("Try it").click()
        section.get_by_role("button", name="Send").click()
        expect(section.locator(".try .row")).to_contain_text("200 OK after")  # the whole body is there
        answer = json.loads(section.get_by_label("Answer").text_content() or "")
        assert {"choices", "tokens", "prompt"} & answer.keys()


def test_an_edited_body_is_sent(page: Page, faults: Faults) -> None:
    faults.expected_statuses |= {400, 404}
    page.goto("/docs")
    section = route(page, "post", "/v1/completions")
    section.get_by_text("Try it").click()
    section.get_by_label("Body", exact=True).fill('{"prompt": "a", "temperature": -1}')
    section.get_by_role("button", name="Send").click()
    expect(section.locator(".try .row")).to_contain_text("400 Bad Request")
    expect(section.get_by_label("Answer")).to_contain_text("temperature")
    section = route(page, "get", "/v1/models/{model_id}")
    section.get_by_text("Try it").click()
    section.get_by_label("model_id").fill("a/b?c")
    section.get_by_role("button", name="Send").click()
    expect(section.get_by_label("Answer")).to_contain_text("a/b?c")


def test_a_stream_shows_as_it_comes_and_can_be_stopped(page: Page, server: Server) -> None:
    page.goto("/docs")
    section = route(page, "get", "/live/events")
    section.get_by_text("Try it").click()
    section.get_by_role("button", name="Send").click()
    expect(section.get_by_label("Answer")).to_contain_text("event: hello")
    section.get_by_role("button", name="Stop").click()
    expect(section.locator(".try .row")).to_contain_text("stopped")
    expect(section.get_by_role("button", name="Send")).to_be_focused()
