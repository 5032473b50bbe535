"""Completions in the playground, from a real model and from engines that write what the test says."""

import json
import math
from typing import Any

import httpx2
from playwright.sync_api import Browser, Page, Request, expect

import orca_jax
from tests.browser.chromium import Faults, watched
from tests.browser.playground import Playground
from tests.endpoint.harness import Server, serving, until
from tests.host.engines import writing


def post(server: Server, path: str, **body: Any) -> Any:
    return httpx2.post(server.url + path, json=body, timeout=30).json()


def test_the_text_equals_that_of_the_api(page: Page, server: Server) -> None:
    playground = Playground(page)
    playground.fill(prompt="In the beginning", seed=7, max_tokens=40, temperature=0.8)
    playground.run()
    answer = post(
        server, "/v1/completions", prompt="In the beginning", seed=7, max_tokens=40, temperature=0.8
    )
    assert playground.finish("length") == answer["choices"][0]["text"]
    expect(page.locator(".facts")).to_contain_text("40 tokens")


def test_an_answer_streams_and_can_be_stopped(browser: Browser) -> None:
    with (
        serving(writing("abcdefghij"), seconds=0.03) as server,
        watched(browser, server.url) as (page, _),
    ):
        playground = Playground(page)
        playground.fill(prompt="x", max_tokens=400)
        playground.run()
        lengths = set[int]()
        until(lambda: bool(lengths.add(len(playground.text()))) or len(lengths) >= 4, "text in four parts")
        page.get_by_role("button", name="Stop", exact=True).click()
        text = playground.finish("cancelled")
        assert 0 < len(text) < 400 and ("abcdefghij" * 40).startswith(text)
        until(server.at_rest, "the request's end on the server")
        page.wait_for_timeout(100)
        assert playground.text() == text
        expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible()


def test_the_server_s_own_message_is_shown(page: Page, server: Server, faults: Faults) -> None:
    faults.expected_statuses.add(400)
    playground = Playground(page)
    playground.fill(prompt="a", temperature=-1)
    playground.run()
    refused = post(server, "/v1/completions", prompt="a", temperature=-1)["error"]["message"]
    expect(page.get_by_role("alert")).to_have_text(refused)
    page.get_by_text("more parameters").click()
    playground.fill(temperature=0, max_tokens=8, logit_bias="{1: 2")
    playground.run()
    expect(page.get_by_role("alert")).to_contain_text("logit_bias is not JSON")
    playground.fill(logit_bias="")
    playground.run()
    expect(page.get_by_role("alert")).to_be_hidden()
    playground.finish("length")


def test_every_parameter_of_the_schema_is_there(page: Page, server: Server) -> None:
    playground = Playground(page)
    document = httpx2.get(server.url + "/openapi.json").json()
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    built = {name for name, field in fields.items() if "Not built" not in field.get("description", "")}
    shown = {row.get_attribute("data-name") for row in page.locator("#route-settings .setting").all()}
    assert built - shown == {"prompt", "model", "stream", "stream_options", "seed", "logprobs"}
    assert shown <= built
    for name in ("temperature", "top_p", "n"):
        setting = playground.setting(name)
        assert float(setting.get_attribute("min") or "nan") == fields[name]["minimum"]
        assert float(setting.get_attribute("max") or "nan") == fields[name]["maximum"]
    temperature = page.locator(".setting[data-name=temperature]")
    expect(temperature.locator(".about")).to_have_text(fields["temperature"]["description"])
    expect(playground.setting("max_tokens")).to_have_attribute("placeholder", "16")


def test_a_new_parameter_needs_no_edit(page: Page, server: Server) -> None:
    document = httpx2.get(server.url + "/openapi.json").json()
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    properties["warmth"] = {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "minimum": 0,
        "description": "new",
    }
    properties["shape"] = {"type": "object", "description": "newer; default: none"}
    page.route("**/openapi.json", lambda route: route.fulfill(json=document))
    playground = Playground(page)
    page.get_by_text("more parameters").click()
    playground.fill(prompt="a", warmth=0.5, shape='{"a": [1]}')
    body = sent(page, playground)
    assert body["warmth"] == 0.5 and body["shape"] == {"a": [1]}


def test_values_are_sent_as_their_types(page: Page) -> None:
    playground = Playground(page)
    page.get_by_text("more parameters").click()
    playground.fill(prompt="a", seed=2**62 + 1, max_tokens=3, stop="END", bad_words='["a", "b"]')
    playground.setting("ignore_eos").check()
    playground.setting("add_special_tokens").uncheck()
    body = sent(page, playground)
    assert body == {
        "model": "demo",
        "prompt": "a",
        "seed": 2**62 + 1,
        "max_tokens": 3,
        "stop": "END",
        "bad_words": ["a", "b"],
        "ignore_eos": True,
        "add_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def sent(page: Page, playground: Playground) -> dict[str, Any]:
    """The body that Run sends; the server does not get it."""
    bodies = list[Request]()
    chunk = 'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    def answer(route: Any) -> None:
        bodies.append(route.request)
        route.fulfill(body=chunk, content_type="text/event-stream")

    page.route("**/v1/completions", answer)
    playground.run()
    playground.finish("stop")
    (request,) = bodies
    return json.loads(request.post_data or "")


def test_probabilities_on_hover_and_focus(page: Page, server: Server) -> None:
    playground = Playground(page)
    playground.show_probabilities()
    playground.fill(prompt="In the beginning", seed=1, max_tokens=6)
    playground.run()
    playground.finish("length")
    body = {"prompt": "In the beginning", "seed": 1, "max_tokens": 6, "logprobs": 5}
    logprobs = post(server, "/v1/completions", **body)["choices"][0]["logprobs"]
    tokens, tip = page.locator(".token"), page.get_by_role("tooltip")
    assert tokens.all_text_contents() == logprobs["tokens"]

    def shows(index: int) -> None:
        share = 100 * math.exp(logprobs["token_logprobs"][index])
        expect(tip.locator("strong")).to_have_text(f"{share:.1f} %" if share >= 0.1 else "< 0.1 %")
        rows = tip.locator("tr").all_text_contents()
        top = sorted(logprobs["top_logprobs"][index].items(), key=lambda pair: -pair[1])
        assert len(rows) == len(top) >= 5
        assert rows[0].startswith(top[0][0].replace(" ", "␣", 1)), rows

    tokens.nth(2).hover()
    shows(2)
    page.mouse.move(5, 400)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    shows(0)
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    shows(1)
    page.keyboard.press("End")
    shows(5)
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_probabilities_only_when_asked(page: Page) -> None:
    playground = Playground(page)
    playground.fill(prompt="In the beginning", seed=1, max_tokens=6)
    assert "logprobs" not in sent(page, playground)
    page.unroute("**/v1/completions")
    playground.run()
    text = playground.finish("length")
    expect(page.locator(".token")).to_have_count(0)
    playground.show_probabilities()
    page.get_by_label("alternatives").fill("2")
    page.get_by_label("alternatives").press("Tab")
    playground.run()
    expect(page.locator(".token")).to_have_count(6)
    assert playground.finish("length") == text
    playground.show_probabilities(False)
    expect(page.locator(".token")).to_have_count(0)
    assert playground.text() == text
    playground.show_probabilities()
    expect(page.locator(".token")).to_have_count(6)
    page.reload()
    playground.until_there()
    assert sent(page, playground)["logprobs"] == 2, "the browser remembers the choice"


def test_panes_side_by_side(page: Page) -> None:
    playground = Playground(page)
    playground.fill(prompt="And he said", seed=3, max_tokens=24)
    page.get_by_role("button", name="Add pane").click()
    expect(playground.pane(2).get_by_label("Seed")).to_have_value("4")
    page.get_by_role("button", name="Add pane").click()
    playground.fill(pane=3, seed=3)
    page.get_by_role("button", name="Run all").click()
    first, second, third = (playground.finish("length", pane) for pane in (1, 2, 3))
    assert first == third != second
    page.get_by_role("button", name="Remove Prompt 2").click()
    assert playground.text(2) == third
    page.get_by_role("button", name="Remove Prompt 2").click()
    expect(page.get_by_role("button", name="Run all")).to_be_hidden()


def test_several_choices_and_beams(page: Page, server: Server) -> None:
    playground = Playground(page)
    page.get_by_text("more parameters").click()
    playground.fill(prompt="And he said", seed=3, max_tokens=8, n=2)
    playground.run()
    playground.finish("length")
    body = {"prompt": "And he said", "max_tokens": 8, "n": 2}
    choices = post(server, "/v1/completions", **body, seed=3)["choices"]
    assert page.locator(".choice").all_text_contents() == [choice["text"] for choice in choices]
    playground.setting("use_beam_search").check()
    playground.run()
    expect(page.locator(".choice")).to_have_count(2)
    best = post(server, "/v1/completions", **body, use_beam_search=True)["choices"]
    assert page.locator(".choice").all_text_contents() == [choice["text"] for choice in best]


def test_the_model_card(page: Page) -> None:
    Playground(page)
    card = page.locator("#model-card")
    expect(card.get_by_role("heading")).to_have_text("demo")
    for fact in ("512 tokens", "32 requests", "default, fcfs", orca_jax.__version__):
        expect(card).to_contain_text(fact)


def test_the_page_waits_while_the_model_loads(browser: Browser) -> None:
    with serving(ready=False) as server, watched(browser, server.url) as (page, faults):
        faults.expected_statuses.add(503)
        page.goto("/")
        expect(page.locator(".server-status")).to_have_text("loading")
        expect(page.locator("#model-card")).to_contain_text("load")
        server.call(lambda: server.gateway.open(server.model))
        expect(page.locator("#model-card").get_by_role("heading")).to_have_text("test")
