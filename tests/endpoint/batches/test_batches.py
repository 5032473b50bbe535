"""/v1/files and /v1/batches with OpenAI's client, over an engine without a device."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from orca_jax.config import QueueOrder, SchedulingConfig
from server.batches import service
from server.http.batches import batches as batch_routes
from server.http.batches import files as file_routes
from server.http.bodies import lists
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, ENDPOINT_THREAD, Server, serving, until
from tests.endpoint.openai_client import by_seed, client_of
from tests.endpoint.tenants.party import HeldEngine
from tests.host.engines import SOON, GatedEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"


def options_of(folder: Path, **more: Any) -> EndpointOptions:
    return EndpointOptions(port=0, grpc_port=None, access_log="off", batch_dir=folder, **more)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(by_seed, options=options_of(tmp_path)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def lines_of(endpoint: str, bodies: Sequence[dict[str, Any]]) -> bytes:
    lines = [
        {"custom_id": f"line {i}", "method": "POST", "url": endpoint, "body": body}
        for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def begun(client: OpenAI, endpoint: Any, content: bytes, **more: Any) -> str:
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)
    assert batch.status == "validating"
    return batch.id


def ended(client: OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + SOON
    while (batch := client.batches.retrieve(batch_id)).status not in (
        *("completed", "failed", "cancelled", "expired"),
    ):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def n_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def results(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_files_are_uploaded_listed_read_and_deleted(client: OpenAI) -> None:
    content = b'{"a": 1}\n' * 100_000
    file = client.files.create(file=("some name.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.object) == (
        *("some name.jsonl", len(content), "batch", "file"),
    )
    second = client.files.create(file=("b.jsonl", b""), purpose="batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert client.files.content(second.id).read() == b""
    assert {one.id for one in client.files.list()} == {file.id, second.id}
    first_page = client.files.list(limit=1)
    assert first_page.has_more and len(list(first_page)) == 2
    assert list(client.files.list(purpose="batch_output")) == []
    deleted = client.files.delete(file.id)
    assert deleted.deleted and [one.id for one in client.files.list()] == [second.id]
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(file.id)


def test_a_batch_gets_the_same_answers_as_separate_requests(client: OpenAI) -> None:
    bodies: list[Any] = [
        {"model": "test", "prompt": f"prompt {i}", "max_tokens": 3 + i, "seed": i, "temperature": 0}
        for i in range(20)
    ]
    bodies.append({"prompt": "x", "max_tokens": -1})
    bodies.append({"prompt": "x", "stream": True})
    bodies.append({"prompt": "x", "priority": 4})
    batch = ended(client, begun(client, COMPLETIONS, lines_of(COMPLETIONS, bodies), metadata={"a": "b"}))
    assert batch.status == "completed" and batch.metadata == {"a": "b"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (23, 20, 3)
    found = results(client, batch.output_file_id)
    for i, body in enumerate(bodies[:20]):
        answered = found[f"line {i}"]["response"]
        direct: Any = client.completions.create(**body)
        assert answered["status_code"] == 200
        assert answered["body"]["choices"][0]["text"] == direct.choices[0].text
        assert answered["body"]["usage"] == direct.usage.model_dump(exclude_unset=True)
    wrong = results(client, batch.error_file_id)
    assert [wrong[f"line {i}"]["response"]["status_code"] for i in (20, 21, 22)] == [400] * 3
    messages = [wrong[f"line {i}"]["response"]["body"]["error"]["message"] for i in (20, 21, 22)]
    assert "max_tokens is -1" in messages[0] and "stream is true" in messages[1]
    assert "lowest priority" in messages[2]
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1}),
        (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64"}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 5, "store": False}),
    ],
)
def test_lines_of_every_endpoint_are_answered_as_over_http(
    client: OpenAI, server: Server, endpoint: str, body: dict[str, Any]
) -> None:
    batch = ended(client, begun(client, endpoint, lines_of(endpoint, [body])))
    assert batch.error_file_id is None
    (line,) = results(client, batch.output_file_id).values()
    direct = httpx2.post(f"{server.url}{endpoint}", json=body).json()
    part = {EMBEDDINGS: "data", CHAT: "choices", RESPONSES: "status"}[endpoint]
    assert line["response"]["body"][part] == direct[part]


@pytest.mark.parametrize(
    ("content", "code", "line", "message"),
    [
        (b"", "empty_file", None, "has no line"),
        (b"{\n", "invalid_json_line", 1, "it ends before the JSON object does"),
        (lines_of(COMPLETIONS, [{}]) + b"[]\n", "invalid_json_line", 2, "it is not a JSON object"),
        (lines_of(CHAT, [{}]), "mismatched_endpoint", 1, "the batch's endpoint is '/v1/completions'"),
        (lines_of(COMPLETIONS, [{}]) * 2, "duplicate_custom_id", 2, "two lines have the custom_id"),
        (lines_of(COMPLETIONS, [{}]).replace(b"POST", b"GET"), "invalid_method", 1, "POST"),
        (lines_of(COMPLETIONS, [{}]).replace(b"body", b"data"), "invalid_request", 1, "'data' is not known"),
        (
            lines_of(COMPLETIONS, [{}]).replace(b'"line 0"', b"7"),
            "missing_required_parameter",
            1,
            "custom_id",
        ),
        (b"x" * ((4 << 20) + 2), "line_too_large", 1, "4194304 bytes"),
        # The limits of a body that is sent directly.
        (lines_of(COMPLETIONS, [{"prompt": [1] * 1_100_000}]), "invalid_json_line", 1, "1000000 values"),
        (lines_of(COMPLETIONS, [{"x": [[]] * 50_000}]), "invalid_json_line", 1, "lists and objects in"),
    ],
)
def test_a_wrong_input_fails_the_batch_before_anything_runs(
    client: OpenAI, server: Server, content: bytes, code: str, line: int | None, message: str
) -> None:
    batch = ended(client, begun(client, COMPLETIONS, content))
    assert batch.status == "failed" and batch.output_file_id is None
    first = batch.errors.data[0]
    assert (first.code, first.line, message in first.message) == (code, line, True), first
    assert not server.service.timeline.iterations


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_listing_is_made_off_the_event_loop(
    server: Server, client: OpenAI, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may have thousands of entries, with names of up to 255 characters."""
    ended(client, begun(client, COMPLETIONS, lines_of(COMPLETIONS, [{"prompt": "a", "max_tokens": 1}])))
    names = set[str]()

    def noted(*arguments: Any) -> bytes:
        names.add(threading.current_thread().name)
        return lists.listing(*arguments)

    for module in (batch_routes, file_routes):
        monkeypatch.setattr(module, "listing", noted)
    assert httpx2.get(f"{server.url}{path}").json()["data"]
    assert len(names) == 1 and not any(name.startswith(ENDPOINT_THREAD) for name in names)


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_person_s_request_does_not_wait_for_a_batch(tmp_path: Path, order: QueueOrder) -> None:
    """Checked by what ran in each iteration: a batch of lines uses at most half of the rows."""
    engine = GatedEngine(by_seed)
    config = replace(CONFIG, max_batch_size=4, scheduling=SchedulingConfig(scheduling_policy=order))
    with (
        serving(engine=engine, config=config, options=options_of(tmp_path)) as server,
        client_of(server) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        service = server.service
        records = service.timeline.iterations
        body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True}
        batch_id = begun(client, COMPLETIONS, lines_of(COMPLETIONS, [body] * 12))

        def step() -> None:
            """Let the iteration in flight return, and wait for the next one."""
            n = len(records)
            engine.let(1)
            until(lambda: len(records) > n, "an iteration")

        # On a busy machine the first line could end before the second is there, and so on to the last.
        until(lambda: len(records) == 1 and len(service.pool) == 2, "both lines")
        while len(records[-1].request_ids) < 2:
            step()
        asked: Any = {"prompt": "x", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
        answer: Any = thread.submit(lambda: client.completions.create(model="test", **asked))
        until(lambda: service.pool.n_waiting == 1, "the person's request")
        n_before = len(records)
        (person,) = [live for live in service.pool.live() if live.row < 0]
        for _ in range(5):
            step()
        assert answer.result(SOON).usage.completion_tokens == 4
        own = [i for i, record in enumerate(records) if person.request_id in record.request_ids]
        assert own == list(range(n_before, n_before + 4)), "it had to wait for a line"
        for record in records:
            assert len(set(record.request_ids) - {person.request_id}) <= 2
        engine.let(10_000)
        assert ended(client, batch_id).request_counts.completed == 12
        engine.gate = threading.Semaphore(0)


def test_no_line_begins_while_requests_wait(tmp_path: Path) -> None:
    """If more users wait than there are rows, running lines end and no other begins until nobody waits."""
    engine = GatedEngine(by_seed)
    config = replace(CONFIG, max_batch_size=4)
    with (
        serving(engine=engine, config=config, options=options_of(tmp_path)) as server,
        client_of(server) as client,
        ThreadPoolExecutor(9) as threads,
    ):
        service = server.service
        records = service.timeline.iterations
        body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
        batch_id = begun(client, COMPLETIONS, lines_of(COMPLETIONS, [body] * 12))
        until(lambda: len(records) == 1 and len(service.pool) == 2, "both lines")
        asked: Any = {"prompt": "x", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
        answers = [threads.submit(lambda: client.completions.create(model="test", **asked)) for _ in range(9)]
        until(lambda: len(service.pool) == 2 + 9, "the people's requests")
        people = {live.request_id for live in service.pool.live() if live.prompt_ids == tuple(b"x")}
        lines = {live.request_id for live in service.pool.live()} - people
        assert (len(people), len(lines)) == (9, 2)
        while not all(answer.done() for answer in answers):
            n = len(records)
            waits = any(live.row < 0 and live.request_id in people for live in service.pool.live())
            engine.let(1)
            until(lambda n=n: len(records) > n or all(a.done() for a in answers), "an iteration")
            if waits:
                assert set(records[n - 1].request_ids) <= lines | people, "a line began while people waited"
        engine.let(10_000)
        assert ended(client, batch_id).request_counts.completed == 12
        engine.gate = threading.Semaphore(0)


def test_a_batch_can_be_cancelled_and_keeps_what_is_answered(tmp_path: Path) -> None:
    with serving(by_seed, seconds=0.01, options=options_of(tmp_path)) as server, client_of(server) as client:
        body = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True}
        batch_id = begun(client, COMPLETIONS, lines_of(COMPLETIONS, [body] * 500))
        until(lambda: n_completed(client, batch_id) > 3, "some lines")
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            client.files.delete(client.batches.retrieve(batch_id).input_file_id)
        assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
        batch = ended(client, batch_id)
        assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
        assert 3 < len(results(client, batch.output_file_id)) == batch.request_counts.completed < 500
        until(server.at_rest, "rest")
        with pytest.raises(openai.BadRequestError, match="the batch has ended: it is cancelled"):
            client.batches.cancel(batch_id)


def test_a_batch_continues_after_a_restart(tmp_path: Path) -> None:
    body = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True, "seed": 5}
    options = options_of(tmp_path)
    with serving(by_seed, seconds=0.02, options=options) as server, client_of(server) as client:
        batch_id = begun(client, COMPLETIONS, lines_of(COMPLETIONS, [body] * 150))
        until(lambda: n_completed(client, batch_id) > 3, "some lines")
        n_before = n_completed(client, batch_id)
        # As SIGTERM does: the lines that run end at once, and are no answered ones.
        drained = asyncio.run_coroutine_threadsafe(server.gateway.drain(SOON), server.loop)
        assert drained.result(SOON) == 0
        assert client.batches.retrieve(batch_id).status == "in_progress"
    (growing,) = (tmp_path / "batches").glob("*.results")
    with growing.open("ab") as file:
        file.write(b'{"custom_id": "line 149", "resp')  # cut off, as by a crash
    with serving(by_seed, options=options) as server, client_of(server) as client:
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 150)
        found = results(client, batch.output_file_id)
        assert len(found) == 150
        texts = {one["response"]["body"]["choices"][0]["text"] for one in found.values()}
        assert len(texts) == 1
        n_here = len({name for record in server.service.timeline.iterations for name in record.request_ids})
        assert n_here <= 150 - n_before
        assert list((tmp_path / "batches").iterdir()) == []
        assert {path.suffix for path in (tmp_path / "files").iterdir()} == {".data"}
        assert list(found) == [f"line {i}" for i in range(150)], "it is not the input's order"


def test_each_api_key_sees_its_own_and_fills_its_share(tmp_path: Path) -> None:
    keys = ApiKeys(["first-key", "second-key"])
    options = options_of(tmp_path, batch_bytes=1 << 20)
    with serving(by_seed, options=options, keys=keys) as server:
        url = f"{server.url}/v1"
        first, second = (
            OpenAI(base_url=url, api_key=key, max_retries=0) for key in ("first-key", "second-key")
        )
        with first, second:
            batch_id = begun(first, COMPLETIONS, lines_of(COMPLETIONS, [{"prompt": "a", "max_tokens": 2}]))
            batch = ended(first, batch_id)
            assert batch.status == "completed"
            for file_id in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    second.files.content(file_id)
            for call in (second.batches.retrieve, second.batches.cancel):
                with pytest.raises(openai.NotFoundError, match="there is no batch"):
                    call(batch_id)
            with pytest.raises(openai.NotFoundError):
                second.batches.create(
                    input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
                )
            assert list(second.batches.list()) == [] == list(second.files.list())
            assert [one.id for one in first.batches.list()] == [batch_id]
            with pytest.raises(openai.RateLimitError, match="524288 are allowed"):
                first.files.create(file=("a", b"x" * 600_000), purpose="batch")
            assert len(list(first.files.list())) == 2  # nothing is left of it
            second.files.create(file=("a", b"x" * 500_000), purpose="batch")
            with pytest.raises(openai.RateLimitError, match="your API key's files have 500000 bytes"):
                second.files.create(file=("a", b"x" * 100_000), purpose="batch")
    # The same keys in another order are still the same clients.
    with (
        serving(by_seed, options=options, keys=ApiKeys(["second-key", "first-key"])) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="first-key") as first,
    ):
        assert [one.id for one in first.batches.list()] == [batch_id]


def test_a_refusal_does_not_reveal_other_clients_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_EACH", 2)
    monkeypatch.setattr(service, "MAX_BATCHES", 3)
    engine = HeldEngine()
    keys = ApiKeys(["first-key", "second-key"])
    content = lines_of(COMPLETIONS, [{"prompt": "a", "max_tokens": 2}])
    with serving(engine=engine, options=options_of(tmp_path), keys=keys) as server:
        url = f"{server.url}/v1"
        first, second = (
            OpenAI(base_url=url, api_key=key, max_retries=0) for key in ("first-key", "second-key")
        )
        with first, second:
            engine.gate.clear()
            try:
                made = [begun(one, COMPLETIONS, content) for one in (second, first, first)]
                with pytest.raises(
                    openai.RateLimitError, match="2 of your batches are unfinished, and 2 are"
                ):
                    begun(first, COMPLETIONS, content)
                with pytest.raises(openai.RateLimitError, match="3 batches of all clients are unfinished"):
                    begun(second, COMPLETIONS, content)
            finally:
                engine.gate.set()
            for batch_id, one in zip(made, (second, first, first), strict=True):
                assert ended(one, batch_id).status == "completed"


@pytest.mark.parametrize(
    ("data", "files", "param", "message"),
    [
        ({"purpose": "batch"}, {}, None, "multipart/form-data"),
        ({}, {"file": b"x"}, "purpose", "purpose is missing"),
        ({"purpose": "fine-tune"}, {"file": b"x"}, "purpose", "purpose is 'fine-tune'"),
        ({"purpose": "batch", "size": "5"}, {"file": b"x"}, "size", "'size' is not known here"),
        ({"purpose": "batch"}, {"other": b"x"}, "file", "'other' is not known here"),
        ({"purpose": "b" * 5000}, {"file": b"x"}, "purpose", "has more than 4096 bytes"),
    ],
)
def test_mistakes_in_a_form_are_named(
    server: Server, data: Any, files: Any, param: str | None, message: str
) -> None:
    answer = httpx2.post(f"{server.url}/v1/files", data=data, files=files)
    assert answer.status_code in (400, 415)
    error = answer.json()["error"]
    assert message in error["message"] and error["param"] == param, error
    until(lambda: not list(server.gateway._live), "rest")


def test_a_form_has_few_parts_and_short_headers(server: Server, tmp_path: Path) -> None:
    field = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    long_header = b"--b\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n"
    many_headers = b"--b\r\n" + b"X: x\r\n" * 20 + b"\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    for body, words in (
        (field * 20, "over 16 parts"),
        (long_header, "header size exceeded"),
        (many_headers, "header count exceeded"),
    ):
        answer = httpx2.post(f"{server.url}/v1/files", content=body + b"--b--", headers=headers)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert list((tmp_path / "files").iterdir()) == []


def test_a_form_that_breaks_off_leaves_nothing(server: Server, tmp_path: Path) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nsome'
    for body in (head, head + b"\r\n--b\r\n", b"junk", b""):
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        answer = httpx2.post(f"{server.url}/v1/files", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/x/content", "/v1/batches", "/v1/batches/x/cancel"])
def test_without_a_folder_the_flag_is_named(path: str) -> None:
    with serving() as server:
        answer = httpx2.get(f"{server.url}{path}")
    assert answer.status_code == 404
    assert "orca serve --batch-dir FOLDER turns them on" in answer.json()["error"]["message"]
