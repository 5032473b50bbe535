"""Generate and Cancel over gRPC, with an engine whose tokens are known in advance."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from orca_jax.config import ServingConfig
from orca_jax.request.request import FinishReason, Request
from orca_jax.service.orca import Orca
from server.gateway.gateway import Gateway, retry_after_seconds
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, END, MODEL, Server, serving, until
from tests.endpoint.rpc_client import answer, asking, client, connect, refusal
from tests.host.engines import LETTERS, SOON, GatedEngine, PacedEngine, counting, writing

Token = Callable[[Request, int], int]

ROOMY = replace(MODEL, n_positions=4096)
ROOMY_CONFIG = replace(CONFIG, n_slots=8192, max_batch_tokens=4096)


def spelling(text: str) -> Token:
    """Tokens that are the bytes of `text`, repeated."""
    data = text.encode()
    return lambda _, index: data[index % len(data)]


def reasons(server: Server) -> list[FinishReason | None]:
    return [record.finish_reason for record in server.service.timeline.requests]


# Output


def test_a_text_prompt_gives_text() -> None:
    with serving(writing("Hello, world! ")) as server, client(server) as stub:
        got = answer(stub, asking("Once", max_tokens=19))
    assert got.text == "Hello, world! Hello"
    assert bytes(got.token_ids) == b"Hello, world! Hello"
    assert got.last.finish_reason == pb.FINISH_REASON_LENGTH
    assert (got.last.usage.prompt_tokens, got.last.usage.completion_tokens) == (4, 19)
    request_id = got.metadata["x-request-id"]
    assert request_id and {message.request_id for message in got.messages} == {request_id}
    for message in got.messages[:-1]:
        assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED and not message.HasField("usage")
    assert [message.HasField("seed") for message in got.messages] == [True] + [False] * len(got.messages[1:])


def test_a_prompt_of_token_ids_with_the_clients_request_id() -> None:
    request = pb.GenerateRequest(
        request_id="mine-1",
        model="test",
        token_ids=pb.TokenIds(ids=[65, 7, 9]),
        sampling=pb.SamplingParams(max_tokens=5),
    )
    with serving(counting) as server, client(server) as stub:
        got = answer(stub, request)
    assert got.token_ids == [65, 66, 67, 68, 69]
    assert got.text == "ABCDE"
    assert got.metadata["x-request-id"] == got.last.request_id == "mine-1"
    assert got.last.usage.prompt_tokens == 3


def test_end_of_sequence_and_ignoring_it() -> None:
    def ending(_: Request, index: int) -> int:
        return [*b"Bye", END][index] if index < 4 else ord("!")

    with serving(ending) as server, client(server) as stub:
        ended = answer(stub, asking(max_tokens=8))
        went_on = answer(stub, asking(max_tokens=8, ignore_eos=True))
    assert (ended.text, ended.token_ids) == ("Bye", [*b"Bye", END])
    assert ended.last.finish_reason == pb.FINISH_REASON_STOP
    assert ended.last.usage.completion_tokens == 4
    assert (went_on.text, went_on.last.finish_reason) == ("Bye!!!!", pb.FINISH_REASON_LENGTH)


def test_characters_of_several_tokens_are_not_split() -> None:
    text = "naïve café 🎉 "
    with serving(spelling(text)) as server, client(server) as stub:
        got = answer(stub, asking(max_tokens=2 * len(text.encode())))
    assert got.text == 2 * text
    assert "\ufffd" not in "".join(message.text for message in got.messages)


def test_a_stop_string_is_never_returned() -> None:
    with serving(writing("one two three ")) as server, client(server) as stub:
        got = answer(stub, asking(max_tokens=40, stop=["ee", "two"]))
    assert got.text == "one "
    assert bytes(got.token_ids) == b"one two"
    assert got.last.finish_reason == pb.FINISH_REASON_STOP


def test_a_seed_determines_the_tokens() -> None:
    def seeded(request: Request, index: int) -> int:
        return (request.seed + index) % 256

    with serving(seeded) as server, client(server) as stub:
        own = answer(stub, asking(max_tokens=4, seed=-(1 << 63)))
        drawn = answer(stub, asking(max_tokens=4))
        again = answer(stub, asking(max_tokens=4, seed=drawn.messages[0].seed))
    assert own.messages[0].seed == -(1 << 63)
    assert own.token_ids == [0, 1, 2, 3]
    first = drawn.messages[0].seed % 256
    assert drawn.token_ids == again.token_ids == [(first + i) % 256 for i in range(4)]


def test_concurrent_streams_each_get_their_own_output() -> None:
    def ask(stub: GenerationStub, first: int) -> list[int]:
        prompt = pb.TokenIds(ids=[first, 1])
        request = pb.GenerateRequest(token_ids=prompt, sampling=pb.SamplingParams(max_tokens=40))
        return answer(stub, request).token_ids

    with serving(counting) as server, client(server) as stub, ThreadPoolExecutor(32) as threads:
        got = list(threads.map(lambda first: ask(stub, first), range(32)))
        assert got == [list(range(first, first + 40)) for first in range(32)]
        until(server.at_rest, "rest")


def test_a_long_text_is_not_truncated() -> None:
    with serving(writing("x"), model=ROOMY, config=ROOMY_CONFIG) as server, client(server) as stub:
        assert answer(stub, asking("y" * 4000, max_tokens=1)).last.usage.prompt_tokens == 4000
        error = refusal(stub, asking("y" * 5000, max_tokens=1))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["orca-param"] == "prompt"


def test_a_slow_reader_gets_everything_and_delays_no_other_client() -> None:
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # maximum bytes in transit
    with (
        serving(counting, seconds=0.0005) as server,
        client(server) as stub,
        grpc.insecure_channel(server.grpc_address, options=narrow) as channel,
    ):
        request = asking("A", max_tokens=180)
        request.request_id = "r" * 128  # each message repeats the id
        slow = GenerationStub(channel).Generate(request, timeout=SOON)
        until(lambda: reasons(server) == [FinishReason.LENGTH], "the end of what nobody reads")
        assert server.gateway.n_live == 1  # its client has not received everything
        assert answer(stub, asking("B", max_tokens=2)).token_ids == [66, 67]
        messages = list(slow)
    assert [token_id for message in messages for token_id in message.token_ids] == list(range(65, 245))
    assert max(len(message.token_ids) for message in messages) > 100  # output accumulated


# Early ends


def test_cancel_ends_a_request_after_its_output_so_far() -> None:
    engine = GatedEngine(writing("abcdef"))
    with serving(engine=engine) as server, client(server) as stub:
        call = stub.Generate(asking(max_tokens=100), timeout=SOON)
        request_id = dict(call.initial_metadata())["x-request-id"]  # sent before the first token
        engine.let(2)
        texts = [next(call).text]
        assert stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=SOON).found
        engine.let(1)  # the iteration in progress
        with pytest.raises(grpc.RpcError) as caught:
            texts.extend(message.text for message in call)
        error = cast(Any, caught.value)
        assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "the request was cancelled")
        assert "abc".startswith("".join(texts))
        until(server.at_rest, "rest")
        assert reasons(server) == [FinishReason.CANCELLED]
        assert not stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=SOON).found


def test_a_client_that_cancels_or_disconnects_frees_its_slots() -> None:
    with serving(writing("ab"), seconds=0.02) as server:
        with client(server) as stub:
            call = stub.Generate(asking(max_tokens=500), timeout=SOON)
            next(call)
            call.cancel()
            until(server.at_rest, "rest after a cancelled call")
            next(stub.Generate(asking(max_tokens=500), timeout=SOON))
        until(server.at_rest, "rest after a closed channel")
        assert reasons(server) == [FinishReason.CANCELLED] * 2


def test_cancel_while_queued() -> None:
    engine = GatedEngine(writing("ab"))
    config = ServingConfig(max_batch_size=1, n_slots=1024, max_batch_tokens=512, block_size=16)
    with serving(engine=engine, config=config) as server, client(server) as stub:
        first = stub.Generate(asking(max_tokens=2), timeout=SOON)
        first.initial_metadata()
        second = stub.Generate(asking(max_tokens=2), timeout=SOON)
        second.initial_metadata()
        second.cancel()
        until(lambda: server.gateway.n_live == 1, "the end of the call")
        engine.let(2)
        assert "".join(message.text for message in first) == "ab"


@pytest.mark.parametrize("seconds", [0.4, 1.015])  # gRPC rounds the second one up when it sends it
def test_the_calls_deadline_ends_the_request_as_timed_out(seconds: float) -> None:
    with serving(writing("ab"), seconds=0.02) as server, client(server) as stub:
        connect(stub)
        error = refusal(stub, asking(max_tokens=500), timeout=seconds)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(server.at_rest, "rest")
        assert reasons(server) == [FinishReason.TIMEOUT]


def test_the_servers_time_limit() -> None:
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", request_timeout=0.2)
    with serving(writing("ab"), seconds=0.02, options=options) as server, client(server) as stub:
        error = refusal(stub, asking(max_tokens=500))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "the request was ended after 0.2 seconds, before it was complete"
        until(server.at_rest, "rest")
        assert reasons(server) == [FinishReason.TIMEOUT]


def test_a_missed_deadline_does_not_affect_other_requests() -> None:
    with serving(counting, seconds=0.002) as server, client(server) as stub:
        lasting = stub.Generate(asking("A", max_tokens=100), timeout=SOON)
        assert refusal(stub, asking("B", max_tokens=400), timeout=0.1).code().name == "DEADLINE_EXCEEDED"
        assert [token for message in lasting for token in message.token_ids] == list(range(65, 165))


def test_a_failed_engine_reports_its_reason_to_all() -> None:
    engine = PacedEngine(writing("ab"), seconds=0.005)
    with serving(engine=engine) as server, client(server) as stub:
        call = stub.Generate(asking(max_tokens=500), timeout=SOON)
        next(call)
        engine.error = RuntimeError("the device is gone")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        for error in (cast(Any, caught.value), refusal(stub, asking())):
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "the device is gone" in error.details()


def test_a_request_cut_off_by_a_drain_gets_the_reason() -> None:
    with serving(writing("ab"), seconds=0.02) as server, client(server) as stub:
        call = stub.Generate(asking(max_tokens=500), timeout=SOON)
        next(call)
        drain = asyncio.run_coroutine_threadsafe(server.gateway.drain(0.1), server.loop)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert drain.result(SOON) == 1
    error = cast(Any, caught.value)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert "the server is shutting down" in error.details()


# Rejected calls

INVALID = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (asking(""), "prompt"),
    "no tokens": (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
    "token too high": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300])), "prompt"),
    "token below 0": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, -1])), "prompt"),
    "prompt too long": (asking("y" * 512), "prompt"),
    "space in the id": (pb.GenerateRequest(text="Go", request_id="a b"), "request_id"),
    "id not ASCII": (pb.GenerateRequest(text="Go", request_id="ä"), "request_id"),
    "long id": (pb.GenerateRequest(text="Go", request_id="a" * 129), "request_id"),
    "unknown field": (pb.GenerateRequest.FromString(b"\x1a\x02Go" + b"\xf8\x06\x01"), "111"),
}


def test_each_error_names_its_field_and_does_not_affect_other_requests() -> None:
    with serving(counting, seconds=0.002) as server, client(server) as stub:
        lasting = stub.Generate(asking("A", max_tokens=100), timeout=SOON)
        for mistake, (request, param) in INVALID.items():
            error = refusal(stub, request)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, mistake
            assert dict(error.trailing_metadata())["orca-param"] == param, mistake
            assert 10 < len(error.details()) < 1000, mistake
        assert [token for message in lasting for token in message.token_ids] == list(range(65, 165))


def test_a_long_error_message_still_arrives() -> None:
    with serving() as server, client(server) as stub:
        error = refusal(stub, pb.GenerateRequest(text="Go", model="ö" * 100_000))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details().endswith("'test' is served")


def test_a_live_id_is_taken() -> None:
    engine = GatedEngine(writing("ab"))
    with serving(engine=engine) as server, client(server) as stub:
        request = pb.GenerateRequest(request_id="one", text="Go", sampling=pb.SamplingParams(max_tokens=2))
        first = stub.Generate(request, timeout=SOON)
        first.initial_metadata()
        assert refusal(stub, request).code() is grpc.StatusCode.ALREADY_EXISTS
        engine.let(2)
        assert "".join(message.text for message in first) == "ab"
        engine.let(2)
        assert answer(stub, request).text == "ab"  # free again


def test_a_full_queue_says_when_to_retry() -> None:
    engine = GatedEngine(writing("ab"))
    config = ServingConfig(max_batch_size=1, n_slots=1024, max_batch_tokens=512, block_size=16, max_queue=1)
    with serving(engine=engine, config=config) as server, client(server) as stub:
        running = stub.Generate(asking(max_tokens=1), timeout=SOON)
        running.initial_metadata()
        assert engine.waited_for.wait(SOON)
        waiting = stub.Generate(asking(max_tokens=1), timeout=SOON)
        waiting.initial_metadata()
        error = refusal(stub, asking(max_tokens=1))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after"] == "1"
        engine.let(2)
        assert [message.text for call in (running, waiting) for message in call] == ["a", "a"]


@pytest.mark.parametrize(
    ("interval", "n_waiting", "seconds"),
    [(None, 9, 1), (0.5, 7, 4), (0.01, 3, 1), (2.0, 0, 1), (20.0, 3, 60), (30.0, 4, 60)],
)
def test_retry_after_follows_from_the_queue(interval: float | None, n_waiting: int, seconds: int) -> None:
    timeline = SimpleNamespace(recent_finish_interval=lambda: interval)
    orca = cast(Orca, SimpleNamespace(timeline=timeline, pool=SimpleNamespace(n_waiting=n_waiting)))
    wait = Orca.expected_wait.__get__(orca)
    service = SimpleNamespace(expected_wait=wait)
    gateway = SimpleNamespace(served=SimpleNamespace(service=service))
    assert retry_after_seconds(cast(Gateway, gateway)) == seconds


def test_an_internal_error_is_reported_without_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> list[int]:
        raise KeyError("inside")

    with serving() as server, client(server) as stub:
        monkeypatch.setattr(LETTERS, "encode", fail)
        error = refusal(stub, pb.GenerateRequest(request_id="unlucky", text="Go"))
        monkeypatch.undo()
        assert answer(stub, asking()).last.usage.completion_tokens == 16
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "the server failed in an unexpected way; its log has more"
    assert "unlucky" in caplog.text and "KeyError: 'inside'" in caplog.text
