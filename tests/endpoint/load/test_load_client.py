"""The load client against servers that answer in known ways, and its figures worked out by hand."""

import asyncio
import contextlib
import json
import math
import threading
from array import array
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from server.cli import main
from server.load.client import Outcome, Target, words
from server.load.figures import figures, spread, times
from server.load.player import Players, Run, n_processes, shares
from server.load.trace import TracedRequest
from server.load.workload import arrivals

Answer = Callable[[web.Request, dict[str, Any]], Coroutine[Any, Any, web.StreamResponse]]


@contextlib.contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve on a thread; yields the URL and the bodies that came."""
    bodies = list[dict[str, Any]]()
    started, stop = threading.Event(), threading.Event()
    port = list[int]()

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        return await answer(request, body)

    async def run() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", handle)
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.append(runner.addresses[0][1])
        started.set()
        await asyncio.to_thread(stop.wait, 120)
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{port[0]}/v1", bodies
    finally:
        stop.set()
        thread.join(60)


def target(url: str, **changes: Any) -> Target:
    fields: dict[str, Any] = {"url": url, "model": "m", "route": "completions", "headers": {}, "extra": {}}
    return Target(**{**fields, "timeout": 60.0, **changes})


async def streamed(
    request: web.Request, *events: str | dict[str, Any], done: bool = True
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {text}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def piece(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
}


def test_a_stream_s_tokens_times_and_usage_are_taken() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        # The last piece has a reason and no text, so it is no token. Servers may write spaces after colons.
        return await streamed(
            request,
            piece("a"),
            '{"choices":[{"text":"b","finish_reason":null}]}',
            piece("c"),
            piece("", "length"),
            USAGE,
        )

    with server(answer) as (url, bodies), Players(1) as players:
        run = players.play(
            (TracedRequest((1, 2, 3, 4, 5), 3),), target(url, extra={"top_k": 4}), concurrency=1
        )
    (one,) = run.outcomes
    assert (one.error, len(one.times), one.n_input, one.n_output, one.n_cached) == (None, 3, 5, 3, 2)
    assert one.sent <= one.times[0] <= one.times[-1] <= one.ended
    assert bodies == [
        {
            "model": "m",
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt": [1, 2, 3, 4, 5],
            "top_k": 4,
        }
    ]


def test_a_chat_s_first_event_with_a_role_is_no_token() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        def delta(**fields: Any) -> dict[str, Any]:
            return {"choices": [{"delta": fields, "finish_reason": None}]}

        events = (delta(role="assistant", content=""), delta(reasoning_content="x"), delta(content="y"))
        return await streamed(request, *events, USAGE)

    with server(answer) as (url, bodies), Players(1) as players:
        run = players.play((TracedRequest((7, 7), 3),), target(url, route="chat"), concurrency=1)
    assert len(run.outcomes[0].times) == 2
    assert bodies[0]["messages"] == [{"role": "user", "content": words((7, 7))}]


@pytest.mark.parametrize(
    ("events", "done", "message"),
    [
        ([piece("a")], False, r"the stream ended before \[DONE\]"),
        ([piece("a"), {"error": {"message": "no room"}}], True, "no room"),
        ([piece("a"), "{"], True, "JSONDecodeError"),
        ([piece("a", "stop"), "{ nonsense"], True, "JSONDecodeError"),
    ],
)
def test_a_stream_that_fails_is_an_error(events: list[Any], done: bool, message: str) -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await streamed(request, *events, done=done)

    with server(answer) as (url, _), Players(1) as players:
        run = players.play((TracedRequest((1,), 1),), target(url), concurrency=None)
    assert run.outcomes[0].error is not None
    assert np.char.find(run.outcomes[0].error, message.replace("\\", "")) >= 0


def test_a_refusal_is_an_error_with_its_status() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    with server(answer) as (url, _), Players(1) as players:
        run = players.play((TracedRequest((1,), 1),), target(url), concurrency=None)
    error = run.outcomes[0].error or ""
    assert error.startswith("status 400: ")
    assert "too long" in error


def test_an_answer_that_never_comes_is_given_up() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.02)  # until the client leaves
        return web.Response()

    with server(answer) as (url, _), Players(1) as players:
        run = players.play((TracedRequest((1,), 2),), target(url, timeout=0.3), concurrency=None)
    assert run.outcomes[0].error == "no complete answer within 0.3 seconds"


def test_a_closed_loop_has_never_more_than_its_requests_at_once_over_all_processes() -> None:
    at_once, most = 0, 0
    release = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 5:
            release.set()
        await asyncio.wait_for(release.wait(), 60)  # until all five places are taken
        at_once -= 1
        return await streamed(request, piece("a"), USAGE)

    with server(answer) as (url, bodies), Players(2) as players:
        progress = list[int]()
        run = players.play(
            tuple(TracedRequest((i,), 3) for i in range(23)),
            target(url),
            concurrency=5,
            on_progress=progress.append,
        )
    assert most == 5
    assert len(bodies) == 23
    assert [one.index for one in run.outcomes] == list(range(23))
    assert progress[-1] == 23


def test_the_next_turn_of_a_conversation_continues_what_the_server_said() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ids = [90, 91] if body.get("return_token_ids") else None
        more: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        return await streamed(request, piece("ab", **more), usage)

    with server(answer) as (url, bodies), Players(2) as players:
        trace = (
            TracedRequest((1, 2), 2),
            TracedRequest((5,), 2),
            TracedRequest((3,), 2, after=0),
            TracedRequest((4,), 2, after=2),
        )
        run = players.play(trace, target(url), concurrency=None)
    assert all(one.error is None for one in run.outcomes)
    prompts = sorted(body["prompt"] for body in bodies)
    assert prompts == [[1, 2], [1, 2, 90, 91, 3], [1, 2, 90, 91, 3, 90, 91, 4], [5]]
    assert {len(body["prompt"]): body.get("return_token_ids") for body in bodies} == {
        2: True,
        5: True,
        8: None,
        1: None,
    }


def test_turns_stay_in_one_process_and_the_rest_is_dealt_evenly() -> None:
    trace = tuple(TracedRequest((1,), 1, after=i - 3 if i >= 3 else None) for i in range(9))
    dealt = shares(trace, 2)
    assert [indices for indices, _ in dealt] == [[0, 2, 3, 5, 6, 8], [1, 4, 7]]
    assert n_processes(1) == 1


def test_figures_are_those_worked_out_by_hand() -> None:
    def outcome(index: int, sent: float, at: list[float], n_output: int, error: str | None = None) -> Outcome:
        return Outcome(
            index,
            sent,
            sent,
            at[-1] if at else sent + 9,
            array("d", at),
            n_input=10,
            n_output=n_output,
            error=error,
        )

    run = Run(
        [
            outcome(0, 100.0, [100.5, 100.6, 100.8], 3),
            outcome(1, 101.0, [101.1, 102.0], 4),
            outcome(2, 101.0, [], 0, error="status 500"),
        ],
        cpu=0.007,
        busiest=0.5,
        concurrency=None,
    )
    found = figures(run, {"ttft": 200.0})
    assert (found.n_completed, found.n_failed, found.n_output) == (2, 1, 7)
    assert found.seconds == pytest.approx(2.0)
    assert (found.requests_s, found.output_tokens_s) == pytest.approx((1.0, 3.5))
    assert found.first.mean == pytest.approx(0.3)  # 0.5 and 0.1
    assert found.per_token.mean == pytest.approx((0.15 + 0.3) / 2)
    assert found.between.mean == pytest.approx((0.1 + 0.2 + 0.9) / 3)
    assert found.normalized.mean == pytest.approx((0.8 / 3 + 1.0 / 4) / 2)
    assert found.goodput == pytest.approx(0.5)  # the second alone
    assert found.client_us_per_token == pytest.approx(1000.0)
    assert found.errors == {"status 500": 1}
    assert found.client_limit is None
    assert json.loads(json.dumps(found.record()))["errors"] == {"status 500": 1}


def test_a_percentile_s_interval_contains_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    truth = math.log(10)  # the 90th percentile of an exponential distribution
    hits = 0
    for _ in range(400):
        found = spread(np.sort(rng.exponential(size=200)), 0.9)
        assert found.low <= found.value <= found.high
        hits += found.low <= truth <= found.high
    assert 0.92 <= hits / 400 <= 0.995
    assert math.isnan(times([]).mean)


def test_the_client_is_named_where_it_was_the_limit() -> None:
    late = [Outcome(0, 1.0, 1.5)]
    assert "late" in (Run(late, 0.0, 0.1, None).limit or "")
    assert Run(late, 0.0, 0.1, 4).limit is None  # in a closed loop requests wait for others
    assert "core" in (Run([Outcome(0, 1.0, 1.0)], 0.0, 0.97, 4).limit or "")


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    n = 20_000
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(arrivals(n, 8.0, burstiness, seed=1))
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrivals(4, 2.0, math.inf, seed=1) == [0.0, 0.5, 1.0, 1.5]
    assert arrivals(2, None, 1.0, seed=1) == [0.0, 0.0]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "https://:80"]
)
def test_an_address_that_is_none_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", url, "--model", "m"]) == 2
    assert f"--url is {url!r}" in capsys.readouterr().err
