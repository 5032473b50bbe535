"""The live feed: its messages, who may read them, and its bounds."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from server.errors import TooManyViewers
from server.settings.api_keys import ApiKeys
from server.web import feed as feed_module
from server.web import watch as watch_module
from server.web.feed import LiveFeed
from tests.endpoint.harness import CONFIG, Server, serving, until
from tests.endpoint.http_client import connected
from tests.host.engines import SOON, PacedEngine, counting, writing

Event = tuple[str, Any]
ONE = ServingConfig(max_batch_size=1, n_slots=512, max_batch_tokens=512, block_size=16, max_queue=256)


def parse(lines: Iterator[str]) -> Iterator[Event]:
    """The events of a stream; comments are left out."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextmanager
def watching(server: Server, **headers: str) -> Iterator[Iterator[Event]]:
    with connected(server) as client, client.stream("GET", "/live/events", headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield parse(response.iter_lines())


def until_finished(events: Iterator[Event], n: int) -> list[dict[str, Any]]:
    """The lines up to the n-th end of a request."""
    lines: list[dict[str, Any]] = []
    deadline = time.monotonic() + SOON
    for name, data in events:
        assert name == "lines" and time.monotonic() < deadline
        lines += data
        if sum("finished" in line for line in lines) == n:
            return lines
    raise AssertionError(f"the stream ended after {lines}")


def complete(server: Server, prompt: str, n_tokens: int, **more: Any) -> None:
    with connected(server) as client:
        body = {"prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True, **more}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_the_lines_equal_the_timeline() -> None:
    with serving(counting) as server, watching(server) as events:
        name, hello = next(events)
        assert name == "hello"
        assert (hello["orca_live"], hello["model"], hello["status"]) == (1, "test", "ready")
        assert (hello["max_batch_size"], hello["n_slots"], hello["block_size"]) == (8, 8192, 16)
        assert hello["n_states"] == 0
        assert hello["requests"] == []
        complete(server, "abcde", 3, n=2, priority=0)
        lines = until_finished(events, 2)
        timeline = server.service.timeline
        iterations = [line for line in lines if "iteration" in line]
        assert [
            (line["iteration"], line["issued"], line["returned"], line["bucket"]) for line in iterations
        ] == [(it.number, it.issued, it.returned, it.bucket) for it in timeline.iterations]
        assert [[n for _, n in line["rows"]] for line in iterations] == [
            list(it.input_lengths) for it in timeline.iterations
        ]
        assert [[i in line["prefill"] for i in range(len(line["rows"]))] for line in iterations] == [
            list(it.initiation) for it in timeline.iterations
        ]
        arrived = [line for line in lines if "arrived" in line]
        assert [(line["arrived"], line["n_input"], line["max_tokens"]) for line in arrived] == [
            (0, 5, 8),
            (1, 5, 8),
        ]
        assert [line["id"] for line in arrived] == [
            record.request_id for record in sorted(timeline.requests, key=lambda record: record.arrival)
        ]
        ends = {line["finished"]: line for line in lines if "finished" in line}
        assert {(n, end["reason"], end["n_output"]) for n, end in ends.items()} == {
            (0, "length", 3),
            (1, "length", 3),
        }


def test_the_first_waiting_request_and_its_reason() -> None:
    with serving(seconds=0.005, config=ONE) as server, watching(server) as events:
        next(events)
        complete(server, "a", 4, n=3)
        lines = until_finished(events, 3)
        held = [line["held"] for line in lines if "iteration" in line and line["waiting"]]
        assert held[0] == [1, "batch"] and held[-1] == [2, "batch"]


def test_a_new_viewer_learns_of_live_requests() -> None:
    engine = PacedEngine(seconds=0.1)
    with serving(engine=engine, config=ONE) as server, connected(server) as client:
        body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True, "stream": True, "n": 2}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            chunks = stream.iter_bytes()
            next(chunks)
            with watching(server) as events:
                first, second = next(events)[1]["requests"]
                engine.seconds = 0.001
                lines = until_finished(events, 2)
            for _ in chunks:
                pass
        assert (first["arrived"], first["admitted"], second["arrived"], second["admitted"]) == (
            0,
            True,
            1,
            False,
        )
        assert 0 < first["scheduled"] < first["first_token"] and second["scheduled"] is None
        assert first["n_computed"] >= 3 and second["n_computed"] == 0
        assert all("arrived" not in line for line in lines)


def test_the_feed_costs_nothing_without_viewers() -> None:
    with serving() as server:
        assert server.watchers == []
        with watching(server) as one, watching(server) as two:
            next(one)
            next(two)
            assert len(server.watchers) == 1
            complete(server, "ab", 2)
            assert until_finished(one, 1) == until_finished(two, 1)
        until(lambda: server.watchers == [], "the last viewer's end")


def test_a_key_is_needed_and_several_keys_hide_the_ids() -> None:
    keys = ApiKeys(["first-secret-key", "second-secret-key"])
    with serving(keys=keys) as server:
        with connected(server) as client:
            assert client.get("/live/events").status_code == 401
        with watching(server, Authorization="Bearer first-secret-key") as events:
            assert next(events)[1]["shows_ids"] is False
            with connected(server) as client:
                headers = {"Authorization": "Bearer second-secret-key"}
                body = {"prompt": "a", "max_tokens": 1}
                assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert [line["id"] for line in until_finished(events, 1) if "arrived" in line] == [""]


def test_from_loading_to_the_end() -> None:
    with serving(ready=False) as server, watching(server) as events:
        hello = next(events)[1]
        assert (hello["status"], hello["model"], hello["buckets"]) == ("loading", None, None)
        server.call(lambda: server.gateway.open(server.model))
        hello = next(data for name, data in events if name == "hello")
        assert (hello["status"], hello["model"]) == ("ready", "test")
        asyncio.run_coroutine_threadsafe(server.gateway.drain(0.1), server.loop).result(SOON)
        lines = next(data for name, data in events if any("status" in line for line in data))
        status = next(line for line in lines if "status" in line)
        assert (status["status"], status["reason"]) == ("draining", "the server is shutting down")


def test_the_stream_ends_with_the_server() -> None:
    with serving() as server:
        client = httpx2.Client(base_url=server.url)
        stream = client.stream("GET", "/live/events")
        events = parse(stream.__enter__().iter_lines())
        next(events)
    assert list(events) == [], "a whole response, without an error"
    stream.__exit__(None, None, None)
    client.close()


def test_too_many_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_MOST_VIEWERS", 1)
    with serving() as server, watching(server) as events, connected(server) as client:
        next(events)
        response = client.get("/live/events")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_viewers")


def test_the_65th_viewer_is_refused() -> None:
    with serving() as server:

        async def scenario() -> int:
            feed = LiveFeed(server.gateway)
            viewers = [feed.join() for _ in range(64)]
            with pytest.raises(TooManyViewers, match="64 people watch already"):
                feed.join()
            feed.leave(viewers[0])
            feed.join()
            n_viewers = feed.n_viewers
            await feed.close()
            return n_viewers

        assert asyncio.run_coroutine_threadsafe(scenario(), server.loop).result(SOON) == 64


def test_a_viewer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_MOST_UNREAD", 4096)
    with serving(counting) as server:

        async def scenario() -> tuple[list[bytes], bool, int]:
            feed = LiveFeed(server.gateway)
            idle, busy = feed.join(), feed.join()
            messages: list[bytes] = []

            async def read() -> None:
                async for message in busy:
                    messages.append(message)

            reader = asyncio.create_task(read())
            for _ in range(100):
                await asyncio.to_thread(complete, server, "abcdef", 8)
                await asyncio.sleep(0.06)
                if idle.ended:
                    break
            n_viewers = feed.n_viewers
            await feed.close()
            await reader
            return messages, idle.ended, n_viewers

        future = asyncio.run_coroutine_threadsafe(scenario(), server.loop)
        messages, is_dropped, n_viewers = future.result(2 * SOON)
        assert is_dropped and n_viewers == 1
        assert sum(map(len, messages)) > 4096


def test_iterations_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_MOST_NUMBERS", 200)
    with serving(counting) as server, watching(server) as events:
        next(events)
        complete(server, "ab", 200)
        lines: list[dict[str, Any]] = []
        for _, data in events:
            lines += data
            n_skipped = sum(line.get("skipped", 0) for line in lines)
            if n_skipped and n_skipped + sum("iteration" in line for line in lines) == 200:
                break
        assert len(server.service.timeline.iterations) == 200


def test_preempted_requests_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_MOST_NUMBERS", 200)
    waiting = [Request(str(i), (1,), 2, SamplingParams(max_tokens=1), seed=0) for i in range(300)]
    with serving(counting) as server, watching(server) as events:
        next(events)
        server.service.scheduler.waiting_again.update(waiting)
        complete(server, "ab", 1)
        server.service.scheduler.waiting_again.difference_update(waiting)
        lines = until_finished(events, 1)
    assert [line["skipped"] for line in lines if "skipped" in line] == [1]
    assert not any("iteration" in line for line in lines)


def test_no_line_has_an_iteration_that_was_lost() -> None:
    engine = PacedEngine(counting, seconds=0.001)
    with serving(engine=engine, config=CONFIG) as server, watching(server) as events:
        next(events)
        complete(server, "a", 3)
        assert [line["finished"] for line in until_finished(events, 1) if "finished" in line] == [0]


def test_the_recorded_file(tmp_path: Path) -> None:
    path = tmp_path / "bad minute.jsonl"
    path.write_text('{"orca_recording": 1}\n')
    path.with_name("bad minute.jsonl.old").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("secret")
    with serving(recording=path) as server, connected(server) as client:
        assert client.get("/live/files/bad%20minute.jsonl").text == '{"orca_recording": 1}\n'
        assert client.get("/live/files/bad%20minute.jsonl.old").text == "{}\n"
        for name in ("other.jsonl", "..%2Fother.jsonl", "%2Fetc%2Fpasswd", "x"):
            response = client.get(f"/live/files/{name}")
            assert response.status_code == 404 and "secret" not in response.text
        assert "'bad minute.jsonl'" in client.get("/live/files/x").json()["error"]["message"]
    with serving() as server, connected(server) as client:
        assert "start it with --record FILE" in client.get("/live/files/x").json()["error"]["message"]
    keys = ApiKeys(["first-secret-key", "second-secret-key"])
    with serving(recording=path, keys=keys) as server, connected(server) as client:
        response = client.get(
            "/live/files/bad%20minute.jsonl", headers={"Authorization": "Bearer first-secret-key"}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (403, "not_permitted")


class Half:
    """Drafts the next token of "abab..." and a wrong one."""

    def __init__(self, prompt_ids: Sequence[int]) -> None: ...

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return [ord("ab"[len(output_ids) % 2]), 0]


def test_a_line_tells_the_tokens_that_drafts_gave() -> None:
    scheduling = SchedulingConfig(speculative=f"{__name__}:Half")
    drafting = replace(CONFIG, overlap=False, scheduling=scheduling)
    with serving(writing("ab"), config=drafting) as server, watching(server) as events:
        next(events)
        complete(server, "xyz", 6)
        lines = until_finished(events, 1)
    iterations = [line for line in lines if "iteration" in line]
    # The first token, then two of three twice, then the last, for which no draft has room.
    assert [line["rows"] for line in iterations] == [[[0, n]] for n in (3, 3, 3, 1)]
    assert [line.get("kept") for line in iterations] == [None, [[0, 2]], [[0, 2]], None]
    assert lines.index(iterations[-1]) < lines.index(next(line for line in lines if "finished" in line))
