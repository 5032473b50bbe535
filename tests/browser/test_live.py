"""The live view: every cell is the timeline's, and every wait has its reason."""

import pytest
from playwright.sync_api import Browser, Page, expect

from orca_jax.config import ServingConfig
from tests.browser.chromium import serious_faults, watched
from tests.browser.live_page import (
    CHUNKED,
    cells_of,
    complete,
    complete_all,
    connected_to,
    live_page,
    mixed,
    read,
    shown_cells,
    until,
    until_ended,
)
from tests.endpoint.harness import serving
from tests.endpoint.http_client import connected
from tests.host.engines import counting


def test_every_cell_equals_the_timeline(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete_all(server, mixed(30))
        shown = until_ended(page, 30)
        timeline = server.service.timeline
        cells = cells_of(timeline)
        assert {phase for one in cells for _, _, phase in one["cells"]} == {"prefill", "chunk", "decode"}
        assert any(one["bucket"] > sum(n for _, n, _ in one["cells"]) for one in cells), "some are padded"
        assert shown_cells(page) == cells
        prefilled = {  # the return of the iteration with the end of its prompt
            request_id: one["returned"]
            for one in cells
            for request_id, _, phase in one["cells"]
            if phase != "decode"
        }
        records = {record.request_id: record for record in timeline.requests}
        assert len(shown) == len(records) == 30
        for request in shown:
            record = records[request["id"]]
            assert (request["arrived"], request["scheduled"], request["finished"]) == (
                record.arrived,
                record.scheduled,
                record.finished,
            )
            assert (request["nInput"], request["nOutput"], request["nCached"], request["reason"]) == (
                record.n_input,
                record.n_output,
                record.n_cached,
                record.finish_reason,
            )
            assert request["firstToken"] == prefilled[record.request_id]
        assert read(page, "counts")["iterations"] == len(cells)
        expect(page.locator("#summary")).to_contain_text(f"Iteration {len(cells) - 1:,}:")


def reasons(request: dict) -> set[tuple[str, int | None]]:
    return {(part["why"], part["first"]) for wait in request["waits"] for part in wait["reasons"]}


def test_a_request_waits_for_a_place_in_the_batch(browser: Browser) -> None:
    one = ServingConfig(max_batch_size=1, n_slots=512, max_batch_tokens=512, block_size=16, max_queue=256)
    with live_page(browser, config=one, seconds=0.05) as (server, page), connected(server) as client:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 3, "stream": True}
        with client.stream("POST", "/v1/completions", json=body):
            options = page.locator("#list > li")
            expect(options.nth(1)).to_have_text("#1waits: batch full")
            expect(options.nth(2)).to_have_text("#2waits: behind #1: batch full")
            first, second, third = read(page, "requests")
            assert (first["state"], second["state"], third["state"]) == ("decode", "waiting", "waiting")
            assert second["why"]["full"] == "the batch has no row left"
            assert third["why"]["full"] == "request #1 is before it and waits: the batch has no row left"
            expect(page.locator("[data-tile=waiting]")).to_have_text("2")
            options.nth(1).click()
            expect(page.locator("#details")).to_contain_text("the batch has no row left")
        _, second, third = until_ended(page, 3)
        assert ("batch", None) in reasons(second) and ("batch", 1) in reasons(third)
        assert {request["reason"] for request in read(page, "requests")} == {"cancelled"}


def test_a_request_waits_for_slots(browser: Browser) -> None:
    few = ServingConfig(max_batch_size=4, n_slots=48, max_batch_tokens=64, block_size=16, max_queue=256)
    with live_page(browser, config=few, seconds=0.01) as (server, page):
        complete(server, ["a" * 20, "b" * 20], 12)
        _, second = until_ended(page, 2)
        assert ("slots", None) in reasons(second) and ("batch", None) not in reasons(second)
        slots = [one["slots"] for one in read(page, "iterations")]
        assert all(used <= held <= 48 - cached for held, used, cached in slots)


def test_a_request_waits_for_room_for_its_tokens(browser: Browser) -> None:
    with live_page(browser, seconds=0.03) as (server, page):
        complete(server, ["a" * 100, "b" * 100], 2)
        _, second = until_ended(page, 2)
        assert ("tokens", None) in reasons(second)


def test_a_request_waits_while_the_engine_is_paused(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        server.service.interludes.pause(running="continue", timeout=5)
        try:
            expect(page.locator("#phase")).to_have_text("paused")
            with connected(server) as client:
                body = {"prompt": "a", "max_tokens": 2, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as stream:
                    expect(page.locator("#list > li")).to_have_text("#0waits: paused")
                    server.service.interludes.resume()
                    stream.read()
        finally:
            server.service.interludes.resume()
        (request,) = until_ended(page, 1)
        assert ("paused", None) in reasons(request) and request["reason"] == "length"


def test_an_open_request_is_known_to_a_new_page(browser: Browser) -> None:
    with serving(counting, seconds=0.05, config=CHUNKED) as server, connected(server) as client:
        body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with watched(browser, server.url) as (page, _):
            with client.stream("POST", "/v1/completions", json=body) as stream:
                chunks = stream.iter_bytes()
                next(chunks)
                connected_to(page)
                (before,) = read(page, "requests")
                page.get_by_role("button", name="Fit").click()
                (unknown,) = read(page, "unknown")
                assert unknown["why"] == "before this page opened"
                assert unknown["to"] > before["firstToken"] > before["arrived"] > unknown["from"]
            (after,) = until_ended(page, 1)
        record = server.service.timeline.requests[-1]
        assert before["state"] == "decode" and before["firstToken"] == record.token_times[0]
        assert (after["nOutput"], after["reason"]) == (record.n_output, "cancelled")
        assert (after["scheduled"], after["finished"]) == (record.scheduled, record.finished)


def test_iterations_during_a_pause_of_the_view_are_counted(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete(server, "first", 4)
        until_ended(page, 1)
        n_before = len(server.service.timeline.iterations)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#phase")).to_have_text("view paused")
        until(page, "the viewer's end", lambda: not server.watchers)
        complete(server, "unseen", 7)
        n_unseen = len(server.service.timeline.iterations) - n_before
        page.get_by_role("button", name="Pause").click()
        page.locator("#phase", has_text="ready").wait_for()
        complete(server, "second", 3)
        shown = until_ended(page, 2)
        assert [request["number"] for request in shown] == [0, 2]
        assert read(page, "counts")["unseen"] == n_unseen > 0
        expect(page.locator("#notice")).to_contain_text(
            f"{n_unseen} iterations passed while the page was not"
        )


def test_the_page_reconnects(browser: Browser) -> None:
    with serving(counting, config=CHUNKED) as server, watched(browser, server.url) as (page, faults):
        faults.expected_statuses.add(503)
        n_tries = 0

        def refuse(route) -> None:
            nonlocal n_tries
            n_tries += 1
            if n_tries > 2:
                route.continue_()
            else:
                route.fulfill(status=503, json={"error": {"message": "not now"}})

        page.route("**/live/events", refuse)
        page.goto("/live")
        expect(page.locator("#reason")).to_contain_text("not now; trying again in")
        page.locator("#phase", has_text="ready").wait_for()
        assert n_tries == 3


def test_the_keys_choose_move_and_zoom(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete_all(server, mixed(5))
        until_ended(page, 5)
        expect(page.locator("#list > li")).to_have_count(5)
        page.get_by_role("listbox", name="Requests").focus()
        for _ in range(3):
            page.keyboard.press("ArrowDown")
        chosen = page.locator("[aria-selected=true]")
        expect(chosen).to_have_attribute("data-number", "2")
        assert page.get_by_role("listbox").get_attribute("aria-activedescendant") == "request-2"
        details = page.get_by_role("complementary", name="Request #2")
        request = read(page, "requests")[2]
        expect(details).to_contain_text(request["id"])
        expect(details.locator("tbody tr")).to_have_count(len(request["iterations"]))
        page.keyboard.press("Escape")
        expect(details).to_be_hidden()
        page.get_by_role("group", name="Charts on a common time axis").focus()
        before = read(page, "view")
        page.keyboard.press("+")
        nearer = read(page, "view")
        assert nearer["to"] - nearer["from"] == pytest.approx((before["to"] - before["from"]) / 1.5)
        page.keyboard.press("ArrowLeft")
        assert read(page, "view")["from"] < nearer["from"] and not read(page, "view")["follows"]
        page.keyboard.press("0")
        whole = read(page, "view")
        iterations = read(page, "iterations")
        assert whole["from"] < iterations[0]["issued"] and whole["to"] > iterations[-1]["returned"]
        page.keyboard.press("f")
        assert read(page, "view")["follows"]
        page.locator("#slots").hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, 300)
        page.keyboard.up("Control")
        until(page, "a wider view", lambda: span(read(page, "view")) > span(whole))


def span(view: dict[str, float]) -> float:
    return view["to"] - view["from"]


def test_the_pointer_shows_numbers_and_chooses_a_request(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete(server, "a" * 20, 3)
        until_ended(page, 1)
        page.get_by_role("button", name="Fit").click()
        one = read(page, "iterations")[0]
        view = read(page, "view")
        box = page.locator("#iterations").bounding_box()
        assert box is not None
        share = ((one["issued"] + one["returned"]) / 2 - view["from"]) / span(view)
        x = box["x"] + 46 + share * (box["width"] - 46 - 10)
        y = box["y"] + box["height"] - 12
        page.mouse.move(x, y)
        tooltip = page.locator("#tooltip")
        expect(tooltip).to_contain_text("Iteration 0")
        expect(tooltip).to_contain_text("#0 prefill: 20 tokens")
        expect(tooltip).to_contain_text("20 tokens, bucket of 32, 12 padding")
        page.mouse.click(x, y)
        expect(page.get_by_role("complementary", name="Request #0")).to_be_visible()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "light"),
        (1280, "dark"),
        pytest.param(390, "dark", marks=pytest.mark.long),
        pytest.param(1280, "light", marks=pytest.mark.long),
    ],
)
def test_axe_finds_nothing_serious(browser: Browser, scheme: str, width: int) -> None:
    with live_page(browser, width=width, color_scheme=scheme) as (server, page):
        complete_all(server, mixed(12))
        until_ended(page, 12)
        page.get_by_text("The last iterations as a table").click()
        expect(page.locator("#last-iterations tr")).to_have_count(15)
        page.locator("#list > li").last.click()
        page.get_by_role("complementary").wait_for()
        assert serious_faults(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def until_still(page: Page) -> int:
    """The number of frames drawn, once none is drawn for 0.6 seconds."""
    n_frames = -1

    def is_still() -> bool:
        nonlocal n_frames
        before, n_frames = n_frames, read(page, "nFrames")
        page.wait_for_timeout(600)
        return n_frames == before

    until(page, "a still page", is_still)
    return n_frames


def test_nothing_is_drawn_while_nothing_happens(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete(server, "a", 3)
        until_ended(page, 1)
        n_frames = until_still(page)
        complete(server, "b", 3)
        until_ended(page, 2)
        assert read(page, "nFrames") > n_frames
