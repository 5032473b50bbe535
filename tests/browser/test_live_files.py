"""Files in the live view: recordings, what it saves, traces for Perfetto, and files of strangers."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from orca_jax.service.orca import Orca
from orca_jax.service.recorder import Recorder
from tests.browser.chromium import watched
from tests.browser.live_page import (
    BUCKETS,
    CHUNKED,
    as_file,
    complete_all,
    connected_to,
    live_page,
    mixed,
    read,
    until,
    until_ended,
)
from tests.endpoint.harness import MODEL, Server, serving, serving_model
from tests.host.engines import LETTERS, PacedEngine, orca

HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[Server]:
    with serving() as server:
        yield server


@contextmanager
def recorded(path: Path) -> Iterator[Server]:
    """A server that is recorded."""
    recorder = Recorder(path, max_bytes=1 << 24)
    engine = PacedEngine(seconds=0.002)
    recorder.begin(
        {"model": "test", "n_workers": 1, "serving": {"n_slots": CHUNKED.n_slots, "max_batch_size": 4}}
    )
    kv = orca(engine, config=CHUNKED, model=MODEL).scheduler.kv
    service = Orca(
        engine, kv, config=CHUNKED, model=MODEL, tokenizer=LETTERS, bucket_sizes=BUCKETS, recorder=recorder
    )
    with service, serving_model(service, MODEL, CHUNKED, tokenizer=LETTERS, recording=path) as server:
        yield server


def test_a_recording_shows_what_was_live(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with recorded(path) as server, watched(browser, server.url) as (page, _):
        connected_to(page)
        begun = time.monotonic()
        complete_all(server, mixed(20))
        live = until_ended(page, 20)
        iterations = read(page, "iterations")
        until(page, "the whole file", lambda: path.read_text().count('"finished"') == 20)
        page.goto("/live?file=traffic.jsonl")
        expect(page.locator("#phase")).to_have_text("a recorded file")
        assert read(page, "iterations") == iterations and len(iterations) > 20
        for shown, before in zip(read(page, "requests"), live, strict=True):
            # A recording has the moment of the call; the live view another one near it.
            for request in (shown, before):
                assert begun <= request.pop("arrived") <= before["scheduled"]
            shown["waits"][0].pop("from")
            before["waits"][0].pop("from")
            assert [part.pop("from") for part in shown["waits"][0]["reasons"][:1]]
            assert [part.pop("from") for part in before["waits"][0]["reasons"][:1]]
            assert shown == before
        expect(page.get_by_role("link", name="Back to live")).to_be_visible()
        assert server.watchers == [], "a file needs no feed"


def test_a_saved_file_opens_again(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete_all(server, mixed(20))
        before = until_ended(page, 20), read(page, "iterations"), read(page, "stages")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save").click()
        assert download.value.suggested_filename == "orca-live.jsonl"
        page.locator("#file").set_input_files(download.value.path())
        expect(page.locator("#phase")).to_have_text("a recorded file")
        assert (read(page, "requests"), read(page, "iterations"), read(page, "stages")) == before


def test_a_saved_part_opens_as_the_same_part(browser: Browser) -> None:
    """The page no longer has the beginning, and a request still runs."""
    with live_page(browser, path="/live?keep=100", seconds=0.001) as (server, page):
        complete_all(server, [("a", 150), ("b", 100), ("c", 20)])
        shown, iterations = until_ended(page, 3), read(page, "iterations")
        assert len(iterations) == 100 and read(page, "counts")["forgotten"] > 0
        expect(page.locator("#notice")).to_contain_text("older iterations no longer kept")
        page.locator("#file").set_input_files(as_file(read(page, "saved")))
        expect(page.locator("#phase")).to_have_text("a recorded file")
        assert read(page, "iterations") == iterations
        for after, before in zip(read(page, "requests"), shown, strict=True):
            for name in ("number", "arrived", "scheduled", "firstToken", "finished", "nOutput", "iterations"):
                assert after[name] == before[name], name


def opened(page: Page, lines: list[dict[str, Any]]) -> None:
    page.goto("/live?file")
    page.locator("#file").set_input_files(as_file(lines))


def two_stages() -> list[dict[str, Any]]:
    """Two stages, two iterations in flight, a gap, an iteration that was lost, and a worker's loss."""

    def iteration(
        number: int, issued: float, returned: float, rows: list[list[int]], **more: Any
    ) -> dict[str, Any]:
        line = {"iteration": number, "issued": issued, "returned": returned, "rows": rows, "bucket": 8}
        usual = {"prefill": [], "starts": [], "partial": [], "slots": [32, 9, 0], "waiting": 0, "held": None}
        return line | usual | {"preempted": []} | more

    return [
        {
            "orca_live": 1,
            "model": "two",
            "n_workers": 2,
            "n_slots": 64,
            "now": 10.0,
            "status": "ready",
            "requests": [],
        },
        {"arrived": 0, "time": 10.0, "id": "first", "n_input": 5, "max_tokens": 8, "priority": 0},
        {"arrived": 1, "time": 10.1, "id": "second", "n_input": 2, "max_tokens": 8, "priority": 0},
        iteration(
            0, 10.2, 10.6, [[0, 4]], prefill=[0], starts=[0], partial=[0], waiting=1, held=[1, "slots"]
        ),
        iteration(1, 10.4, 10.8, [[0, 1], [1, 2]], prefill=[0, 1], starts=[4, 0]),
        {"stages": [[0, 0, 10.2, 10.4], [0, 1, 10.4, None], [1, 0, 10.4, 10.6], [1, 1, 10.5, None]]},
        {"skipped": 2},
        iteration(4, 11.0, 11.2, [[0, 1], [1, 1]]),
        {"status": "recovering", "reason": "stage 2 was lost", "time": 11.5},
        {"status": "ready", "reason": None, "time": 12.0},
        iteration(
            6, 12.0, 12.2, [[0, 6]], prefill=[0], starts=[0], preempted=[1], waiting=1, held=[1, "batch"]
        ),
        {"finished": 0, "time": 12.2, "reason": "length", "n_output": 3, "n_cached": 0},
        {"finished": 1, "time": 12.4, "reason": "cancelled", "n_output": 2, "n_cached": 0},
    ]


def test_stages_losses_and_gaps(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (page, _):
        opened(page, two_stages())
        expect(page.locator("#phase")).to_have_text("a recorded file")
        counts = read(page, "counts")
        assert (counts["skipped"], counts["lost"], counts["unseen"]) == (2, 1, 0)
        expect(page.locator("#notice")).to_contain_text("2 iterations skipped by the server")
        first, second = read(page, "requests")
        assert [wait["reasons"] for wait in second["waits"]] == [
            [
                {"why": "next", "first": None, "from": 10.1, "to": 10.2},
                {"why": "slots", "first": None, "from": 10.2, "to": 10.4},
            ],
            [{"why": "batch", "first": None, "from": 12.0, "to": 12.4}],
        ]
        assert [cell["phase"] for one in read(page, "iterations") for cell in one["cells"]] == [
            *("prefill", "chunk", "prefill", "decode", "decode", "prefill"),
        ]
        assert (first["nPreempted"], second["nPreempted"], first["firstToken"]) == (0, 1, 10.8)
        label = page.locator("#stages").get_attribute("aria-label")
        assert label is not None and label.startswith("Stages, busy in view: 18 %, 18 %")  # 0.4 of 2.2 s


def opened_late() -> list[dict[str, Any]]:
    """The file of a page opened at 10 s, when one request had run for 4 s and another had waited for 1 s."""
    one = {"id": "", "n_input": 4, "max_tokens": 99, "priority": 0}
    usual = {"bucket": 2, "prefill": [], "starts": [], "partial": [], "slots": [32, 9, 0], "waiting": 1}
    usual |= {"held": [1, "batch"], "preempted": []}
    runs = {"n_computed": 4, "n_output": 9, "admitted": True, "scheduled": 6.0, "first_token": 6.5}
    waits = {"n_computed": 0, "n_output": 0, "admitted": False, "scheduled": None, "first_token": None}
    late = {"prefill": [1], "starts": [0], "waiting": 0, "held": None}
    return [
        {
            **{"orca_live": 1, "model": "one", "n_workers": 1, "n_slots": 64, "status": "ready"},
            **{"now": 5.0, "known_from": 10.0},
            "requests": [
                {"arrived": 0, "time": 5.0, **one, **runs},
                {"arrived": 1, "time": 9.0, **one, **waits},
            ],
        },
        {"iteration": 90, "issued": 10.2, "returned": 10.6, "rows": [[0, 1]], **usual},
        {"iteration": 91, "issued": 10.6, "returned": 10.8, "rows": [[0, 1]], **usual},
        {"skipped": 3},
        {"iteration": 95, "issued": 11.8, "returned": 12.0, "rows": [[0, 1], [1, 4]], **usual, **late},
    ]


def with_adapters() -> list[dict[str, Any]]:
    """A file in which request 1 waits for its adapter, while request 2 waits for a place in the batch."""
    hello = {"orca_live": 1, "model": "one", "n_workers": 1, "n_slots": 64, "status": "ready"}
    one = {"id": "", "n_input": 4, "max_tokens": 99, "priority": 0}
    usual = {"bucket": 4, "prefill": [0], "starts": [0], "partial": [], "slots": [32, 9, 0], "preempted": []}
    waiting = {"waiting": 2, "held": [2, "batch"], "adapters": [1]}
    return [
        hello | {"now": 9.0, "known_from": 9.0, "requests": []},
        *({"arrived": i, "time": 10.0, **one} for i in range(3)),
        {"iteration": 0, "issued": 10.2, "returned": 10.6, "rows": [[0, 4]], **usual, **waiting},
        {
            "iteration": 1,
            "issued": 10.6,
            "returned": 10.8,
            "rows": [[1, 4]],
            **usual,
            "waiting": 1,
            "held": None,
        },
    ]


def test_a_request_waits_for_its_adapter(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (page, _):
        opened(page, with_adapters())
        expect(page.locator("#list > li")).to_have_count(3)
        waits = [request["waits"][0]["reasons"] for request in read(page, "requests")]
        assert [[part["why"] for part in parts][:2] for parts in waits[1:]] == [
            ["next", "adapter"],
            ["next", "batch"],
        ]
        assert all(part["first"] is None for parts in waits for part in parts)


# The colour of a canvas at a time and a height in pixels, and the page's colour of that name.
PIXEL = """([id, share, y, name]) => {
    const canvas = document.getElementById(id);
    const x = 46 + share * (canvas.clientWidth - 56);
    const scale = canvas.width / canvas.clientWidth;
    const drawn = canvas.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data;
    const fill = new OffscreenCanvas(1, 1).getContext("2d");
    const probe = document.getElementById("probe");
    probe.style.color = `var(--${name})`;
    fill.fillStyle = getComputedStyle(probe).color;
    fill.fillRect(0, 0, 1, 1);
    return [[...drawn], [...fill.getImageData(0, 0, 1, 1).data]];
}"""


def test_time_without_data_counts_in_no_share(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (page, _):
        opened(page, opened_late())
        # 0.8 of the 1 s of which there is data
        expect(page.locator("#stages")).to_have_attribute("aria-label", "Stages, busy in view: 80 %")
        view, skipped = read(page, "view"), "skipped by the server"
        assert [(one["from"], one["to"], one["why"]) for one in read(page, "unknown")] == [
            (view["from"], 10.0, "not in this file"),
            (10.8, 11.8, skipped),
        ]
        expect(page.locator("[data-tile=iterations]")).to_have_text("4")  # 3 in 0.8 s
        for time, colour in ((7.0, "unknown"), (10.4, "busy"), (11.3, "unknown")):
            share = (time - view["from"]) / (view["to"] - view["from"])
            drawn, expected = page.evaluate(PIXEL, ["stages", share, 15, colour])
            assert drawn == expected, (time, colour)
        first, second = read(page, "requests")
        assert first["waits"][0]["to"] == 6.0
        assert [(part["why"], part["from"], part["to"]) for part in second["waits"][0]["reasons"]] == [
            ("unseen", 9.0, 10.0),
            ("next", 10.0, 10.2),
            ("batch", 10.2, 10.8),
            ("unseen", 10.8, 11.8),
        ]
        assert read(page, "saved")[0]["known_from"] == 10.0
        box = page.locator("#stages").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 46 + 0.3 * (box["width"] - 56), box["y"] + 15)
        expect(page.locator("#tooltip")).to_contain_text("no data: not in this file")
        assert {span["name"] for span in check_trace(read(page, "trace"))[3]} >= {"waits: not known"}


def check_trace(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The spans of a trace by process, after checks of what ui.perfetto.dev needs."""
    assert trace["displayTimeUnit"] == "ms"
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M", "C", "i") and isinstance(event["pid"], int), event
        assert event["name"] and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert set(tracks) <= named
    for events in tracks.values():  # in a track a span is inside another or apart from it
        open_ends: list[int] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)
    spans: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for (pid, _), events in tracks.items():
        spans[pid] += events
    return spans


def test_a_trace_for_perfetto(browser: Browser) -> None:
    with live_page(browser) as (server, page):
        complete_all(server, mixed(20))
        until_ended(page, 20)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download for Perfetto").click()
        trace = json.loads(Path(download.value.path()).read_text())
        assert trace == read(page, "trace")
        spans = check_trace(trace)
        iterations = read(page, "iterations")
        assert [span["name"] for span in sorted(spans[1], key=lambda span: span["ts"])] == [
            f"iteration {one['number']}" for one in iterations
        ]
        origin = iterations[0]["issued"] - min(span["ts"] for span in spans[1]) / 1e6
        for span in spans[1]:
            one = iterations[int(span["name"].removeprefix("iteration "))]
            assert span["ts"] == pytest.approx((one["issued"] - origin) * 1e6, abs=0.01)
            assert span["dur"] == pytest.approx((one["returned"] - one["issued"]) * 1e6, abs=0.01)
        assert sum(span["name"].startswith("#") for span in spans[3]) == 20
        assert {"prefill", "prefill, later chunk", "decode"} <= {span["name"] for span in spans[3]}


def test_a_trace_of_stages_and_waits(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (page, _):
        opened(page, two_stages())
        expect(page.locator("#phase")).to_have_text("a recorded file")
        trace = read(page, "trace")
        spans = check_trace(trace)
        assert sorted((span["tid"], span["name"], span["ts"], span["dur"]) for span in spans[2]) == [
            (1, "iteration 0", 200_000, 200_000),
            (1, "iteration 1", 400_000, 200_000),
            (2, "iteration 0", 400_000, 200_000),
            (2, "iteration 1", 600_000, 200_000),  # it came at 500, when the stage was busy
        ]
        assert {span["tid"] for span in spans[1]} == {1, 2}, "two in flight"
        second = [span for span in spans[3] if span["tid"] == 2]
        assert [(span["name"], span["ts"], span["dur"]) for span in second] == [
            ("#1", 100_000, 2_300_000),
            ("waits: next iteration", 100_000, 100_000),
            ("waits: slots", 200_000, 200_000),
            ("prefill", 400_000, 400_000),
            ("decode", 1_000_000, 200_000),
            ("waits: batch full", 2_000_000, 400_000),
        ]
        marks = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
        assert marks == [
            *("ready", "recovering: stage 2 was lost", "ready", "2 iterations skipped", "1 iterations lost"),
        ]


def test_texts_of_strangers_stay_texts(browser: Browser, server: Server) -> None:
    lines = two_stages()
    lines[0] |= {"model": HOSTILE, "policy": HOSTILE}
    lines[1]["id"] = HOSTILE
    lines[3]["held"] = [1, HOSTILE]
    lines[-1]["reason"] = HOSTILE
    with watched(browser, server.url) as (page, _):
        opened(page, lines)
        expect(page.locator("#engine")).to_contain_text(HOSTILE)
        for i in range(2):
            page.locator("#list > li").nth(i).click()
            expect(page.locator("#details")).to_contain_text(HOSTILE)
        page.get_by_text("The last iterations as a table").click()
        page.locator("#requests").hover()
        page.wait_for_timeout(300)
        assert page.locator("main img").count() == 0
        assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("hello\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 is not an object"),
        ('{"a": 1}\n', "neither a recording of orca serve --record nor a file that this page saved"),
        ('{"orca_live": 1}\n{"iteration": 1, "rows": 7}\n', "line 2 is not a line of a recording"),
    ],
)
def test_another_file_is_refused_in_words(browser: Browser, server: Server, text: str, message: str) -> None:
    with watched(browser, server.url) as (page, _):
        page.goto("/live?file")
        page.locator("#file").set_input_files(
            {"name": "x.jsonl", "mimeType": "application/jsonl", "buffer": text.encode()}
        )
        expect(page.get_by_role("alert")).to_contain_text(message)


def test_a_served_file_that_is_not_there(browser: Browser) -> None:
    with serving() as server, watched(browser, server.url) as (page, faults):
        faults.expected_statuses.add(404)
        page.goto("/live?file=x")
        expect(page.get_by_role("alert")).to_contain_text("start it with --record FILE")


def test_a_file_is_dropped_on_the_page(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (page, _):
        page.goto("/live?file")
        text = as_file(two_stages())["buffer"].decode()
        drop = """(text) => {
            const data = new DataTransfer();
            data.items.add(new File([text], "dropped.jsonl"));
            const event = new DragEvent("drop", { dataTransfer: data, bubbles: true });
            document.querySelector("#charts").dispatchEvent(event);
        }"""
        page.evaluate(drop, text)
        expect(page.locator("#list > li")).to_have_count(2)


def test_holds_of_the_server_are_marked_and_kept(browser: Browser, server: Server) -> None:
    held = [
        {"hold": "gil", "seconds": 0.06, "time": 2.5},
        {"hold": "event loop", "seconds": 0.25, "time": 3.0},
    ]
    with watched(browser, server.url) as (page, _):
        opened(page, [*two_stages(), *held])
        words = "The event loop or the GIL was held 2 times, for 250 ms at most: marked on the axis of time."
        expect(page.locator("#notice")).to_contain_text(words)
        holds = [{"what": "gil", "from": 2.44, "to": 2.5}, {"what": "event loop", "from": 2.75, "to": 3.0}]
        assert [{**hold, "from": round(hold["from"], 6)} for hold in read(page, "holds")] == holds
        assert [line for line in read(page, "saved") if "hold" in line] == [
            {**line, "seconds": pytest.approx(line["seconds"])} for line in held
        ]
