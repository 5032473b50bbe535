"""Several choices of one gRPC call: submitted together, streamed interleaved and ended together."""

import json
import logging
from typing import Any, cast

import grpc
import pytest

from orca_jax.config import ServingConfig
from orca_jax.errors import OutputFailed
from orca_jax.request.request import FinishReason, Request
from server.rpc import generation_pb2 as pb
from server.settings.endpoint_options import EndpointOptions
from server.statuses import meaning
from tests.endpoint.harness import END, Server, serving, until
from tests.endpoint.log_lines import Lines
from tests.endpoint.rpc_client import answer, asking, client, connect, refusal
from tests.host.engines import SOON, GatedEngine, PacedEngine, writing


def seeded(request: Request, index: int) -> int:
    """Tokens that identify their choice: one with seed 65 writes ABC..."""
    return (request.seed + index) % 256


def by_index(messages: list[pb.GenerateResponse]) -> dict[int, list[pb.GenerateResponse]]:
    result: dict[int, list[pb.GenerateResponse]] = {}
    for message in messages:
        result.setdefault(message.index, []).append(message)
    return result


def tokens(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


def reasons(server: Server) -> list[FinishReason | None]:
    return [record.finish_reason for record in server.service.timeline.requests]


def test_each_choice_has_its_own_seed_tokens_text_and_end() -> None:
    request = asking("Go", n=3, seed=65, max_tokens=6, stop=["G"], logprobs=1)
    request.request_id = "mine"
    with serving(seeded) as server, client(server) as stub:
        got = answer(stub, request)
    assert got.metadata["x-request-id"] == "mine"
    assert {message.request_id for message in got.messages} == {"mine"}
    choices = by_index(got.messages)
    assert sorted(choices) == [0, 1, 2]
    expected = [
        (b"ABCDEF", "ABCDEF", pb.FINISH_REASON_LENGTH),
        (b"BCDEFG", "BCDEF", pb.FINISH_REASON_STOP),
        (b"CDEFG", "CDEF", pb.FINISH_REASON_STOP),
    ]
    for index, (data, text, reason) in enumerate(expected):
        messages = choices[index]
        assert bytes(tokens(messages)) == data
        assert "".join(message.text for message in messages) == text
        assert [one.token_id for message in messages for one in message.logprobs] == list(data)
        assert messages[0].seed == 65 + index
        assert not any(message.HasField("seed") for message in messages[1:])
        assert messages[-1].finish_reason == reason
        assert messages[-1].usage == pb.Usage(prompt_tokens=2, completion_tokens=len(data))
        for message in messages[:-1]:
            assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED and not message.HasField("usage")


def test_random_seeds_differ_and_reproduce_their_tokens() -> None:
    with serving(seeded) as server, client(server) as stub:
        choices = by_index(answer(stub, asking(n=8, max_tokens=4)).messages)
        seeds = [choices[i][0].seed for i in range(8)]
        assert len(set(seeds)) == 8
        for i, seed in enumerate(seeds):
            assert answer(stub, asking(max_tokens=4, seed=seed)).token_ids == tokens(choices[i])


def test_each_iteration_sends_one_token_of_each_choice() -> None:
    engine = GatedEngine(seeded)
    with serving(engine=engine) as server, client(server) as stub:
        call = stub.Generate(asking(n=3, seed=0, max_tokens=3), timeout=SOON)
        call.initial_metadata()
        until(lambda: len(server.service.pool) == 3, "all three")
        engine.let(1)  # some of them may have started
        have = [0, 0, 0]
        have[next(call).index] += 1
        for _ in range(10):
            engine.let(1)
        for message in call:
            have[message.index] += len(message.token_ids)
            assert max(have) <= 3
        assert have == [3, 3, 3]


def test_prompt_logprobs_are_computed_and_sent_once() -> None:
    asked: list[int | None] = []

    def listening(request: Request, index: int) -> int:
        if index == 0:
            asked.append(request.sampling.prompt_logprobs)
        return ord("a")

    with serving(listening) as server, client(server) as stub:
        got = answer(stub, asking("ABC", n=3, max_tokens=5, prompt_logprobs=1))
    assert sorted(asked, key=str) == [1, None, None]
    having = [message for message in got.messages if message.prompt_logprobs]
    assert [message.index for message in having] == [0]
    assert by_index(got.messages)[0][0] is having[0]
    assert [one.token_id for one in having[0].prompt_logprobs] == [*b"BC"]


def test_the_number_of_choices_is_limited() -> None:
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", max_choices=5)
    with serving(seeded, options=options) as server, client(server) as stub:
        assert len(by_index(answer(stub, asking(n=5, max_tokens=2)).messages)) == 5
        error = refusal(stub, asking(n=6, max_tokens=2))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["orca-param"] == "n"
    assert error.details() == "n is 6; one request may ask for 5 choices"


def test_all_choices_are_accepted_or_none() -> None:
    engine = GatedEngine(writing("ab"))
    config = ServingConfig(max_batch_size=1, n_slots=1024, max_batch_tokens=512, block_size=16, max_queue=3)
    with serving(engine=engine, config=config) as server, client(server) as stub:
        assert refusal(stub, asking(n=4)).code() is grpc.StatusCode.INVALID_ARGUMENT  # never
        running = stub.Generate(asking(max_tokens=1), timeout=SOON)
        running.initial_metadata()
        assert engine.waited_for.wait(SOON)
        waiting = stub.Generate(asking(max_tokens=1), timeout=SOON)
        waiting.initial_metadata()
        assert refusal(stub, asking(n=3)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # not now
        until(lambda: server.gateway.n_live == 2, "the end of those that were taken")
        engine.let(2)
        assert [message.text for call in (running, waiting) for message in call] == ["a", "a"]


def test_the_id_is_taken_until_all_choices_have_ended() -> None:
    engine = GatedEngine(seeded)
    request = asking(n=2, seed=65, max_tokens=4, stop=["A"])  # choice 0 ends at once
    request.request_id = "one"
    with serving(engine=engine) as server, client(server) as stub:
        first = stub.Generate(request, timeout=SOON)
        engine.let(2)
        messages = [next(first)]
        while messages[-1].finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            messages.append(next(first))
        assert messages[-1].index == 0
        for other in (request, pb.GenerateRequest(request_id="one", text="Go")):
            assert refusal(stub, other).code() is grpc.StatusCode.ALREADY_EXISTS
        other = pb.GenerateRequest(request_id="one-1", text="Go", sampling=pb.SamplingParams(max_tokens=1))
        nobodys = stub.Generate(other, timeout=SOON)
        assert dict(nobodys.initial_metadata())["x-request-id"] == "one-1"
        engine.let(20)
        assert len(tokens(list(nobodys))) == 1
        assert tokens(by_index([*messages, *first])[1]) == [66, 67, 68, 69]


# Early ends


def test_cancel_ends_all_choices_after_their_output_so_far() -> None:
    engine = GatedEngine(seeded)
    with serving(engine=engine) as server, client(server) as stub:
        call = stub.Generate(asking(n=3, seed=65, max_tokens=100), timeout=SOON)
        request_id = dict(call.initial_metadata())["x-request-id"]
        until(lambda: len(server.service.pool) == 3, "all three")
        engine.let(3)
        messages = [next(call) for _ in range(3)]
        until(lambda: len(server.service.timeline.iterations) == 4, "the return of three iterations")
        assert stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=SOON).found
        engine.let(1)  # the iteration in progress
        with pytest.raises(grpc.RpcError) as caught:
            messages.extend(call)
        error = cast(Any, caught.value)
        assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "the request was cancelled")
        for index, came in by_index(messages).items():
            assert tokens(came) == list(range(65 + index, 65 + index + len(tokens(came))))
        assert len(tokens(messages)) >= 7, "three iterations, of which the first may have had one of them"
        until(server.at_rest, "rest")
        assert reasons(server) == [FinishReason.CANCELLED] * 3
        assert not stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=SOON).found


def test_cancel_after_choice_0_is_complete_ends_the_others() -> None:
    def ending(request: Request, index: int) -> int:
        return END if request.seed == 0 else ord("a")

    with serving(ending, seconds=0.01) as server, client(server) as stub:
        call = stub.Generate(asking(n=2, seed=0, max_tokens=500), timeout=SOON)
        while next(call).finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            pass
        request_id = dict(call.initial_metadata())["x-request-id"]
        assert stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=SOON).found
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert cast(Any, caught.value).code() is grpc.StatusCode.CANCELLED
        until(server.at_rest, "rest")
        assert sorted(map(str, reasons(server))) == ["cancelled", "stop"]


def test_a_client_that_cancels_or_disconnects_ends_all_choices() -> None:
    with serving(writing("ab"), seconds=0.02) as server:
        with client(server) as stub:
            call = stub.Generate(asking(n=4, max_tokens=500), timeout=SOON)
            next(call)
            call.cancel()
            until(server.at_rest, "rest after a cancelled call")
            next(stub.Generate(asking(n=4, max_tokens=500), timeout=SOON))
        until(server.at_rest, "rest after a closed channel")
        assert reasons(server) == [FinishReason.CANCELLED] * 8


def test_the_deadline_ends_all_choices_as_timed_out() -> None:
    with serving(writing("ab"), seconds=0.02) as server, client(server) as stub:
        connect(stub)
        error = refusal(stub, asking(n=3, max_tokens=500), timeout=0.4)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(server.at_rest, "rest")
        assert reasons(server) == [FinishReason.TIMEOUT] * 3


def test_the_servers_time_limit_ends_all_choices() -> None:
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", request_timeout=0.2)
    with serving(writing("ab"), seconds=0.02, options=options) as server, client(server) as stub:
        error = refusal(stub, asking(n=3, max_tokens=500))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "the request was ended after 0.2 seconds, before it was complete"
        until(server.at_rest, "rest")


def test_a_failed_choice_ends_the_call_and_the_other_choices() -> None:
    """This engine ignores the grammar: choice 1 violates it at its fifth token."""

    def breaking(request: Request, index: int) -> int:
        return ord("x") if (request.seed, index) == (1, 4) else ord("a")

    with serving(engine=PacedEngine(breaking, seconds=0.002)) as server, client(server) as stub:
        call = stub.Generate(asking(n=3, seed=0, max_tokens=400, guided_regex="a+"), timeout=SOON)
        messages: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.RpcError) as caught:
            messages.extend(call)
        error = cast(Any, caught.value)
        assert error.code() is meaning(OutputFailed("")).grpc
        assert sorted(by_index(messages)) == [0, 1, 2]
        assert set(tokens(by_index(messages)[0])) == {ord("a")}
        until(server.at_rest, "rest")
        assert sorted(map(str, reasons(server))) == ["cancelled", "cancelled", "error"]


def test_a_failed_engine_ends_the_call() -> None:
    engine = PacedEngine(writing("ab"), seconds=0.005)
    with serving(engine=engine) as server, client(server) as stub:
        call = stub.Generate(asking(n=3, max_tokens=500), timeout=SOON)
        next(call)
        engine.error = RuntimeError("the device is gone")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        error = cast(Any, caught.value)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the device is gone" in error.details()


def test_a_slow_reader_gets_everything_and_delays_no_other_client() -> None:
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # maximum bytes in transit
    with (
        serving(seeded, seconds=0.0005) as server,
        client(server) as stub,
        client(server, options=narrow) as slow_stub,
    ):
        request = asking("A", n=4, seed=0, max_tokens=150)
        request.request_id = "r" * 128  # each message repeats the id
        slow = slow_stub.Generate(request, timeout=SOON)
        until(lambda: reasons(server) == [FinishReason.LENGTH] * 4, "the end of what nobody reads")
        assert server.gateway.n_live == 4  # its client has not received everything
        assert answer(stub, asking("B", seed=66, max_tokens=2)).token_ids == [66, 67]
        choices = by_index(list(slow))
    for index in range(4):
        assert tokens(choices[index]) == list(range(index, index + 150))
        assert max(len(message.token_ids) for message in choices[index]) > 50  # output accumulated


def test_an_access_log_line_counts_all_choices() -> None:
    options = EndpointOptions(port=0, grpc_port=0, access_log="json")
    logger, log = logging.getLogger("orca.access"), Lines()
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        with serving(seeded, options=options) as server, client(server) as stub:
            answer(stub, asking(n=3, seed=65, max_tokens=3, stop=["C"]))
            until(lambda: len(log.lines) == 1, "the line")
    finally:
        logger.removeHandler(log)
        logger.setLevel(logging.NOTSET)
    (record,) = map(json.loads, log.lines)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (2, 3 + 2 + 1)
    assert record["finish_reasons"] == ["stop", "stop", "stop"]
