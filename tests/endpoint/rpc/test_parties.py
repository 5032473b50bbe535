"""A request belongs to an API key, or without keys to a connection. Nobody else can find, end or block it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import httpx2
import pytest

from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.api_keys import ApiKeys
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.rpc_client import client
from tests.host.engines import SOON, GatedEngine, writing

KEYS = ("keyaaaaaaaa1", "keybbbbbbbb2")


def named(request_id: str, n: int = 100) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="Go", request_id=request_id, sampling=pb.SamplingParams(max_tokens=n, ignore_eos=True)
    )


@contextmanager
def parties(server: Server, keys: bool) -> Iterator[list[tuple[GenerationStub, list[tuple[str, str]]]]]:
    """Two parties, with separate connections, and separate keys if the server has keys."""
    with ExitStack() as stack:
        yield [
            (
                stack.enter_context(client(server, [("grpc.use_local_subchannel_pool", 1)])),
                [("authorization", f"Bearer {key}")] if keys else [],
            )
            for key in KEYS
        ]


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "connections"])
def test_the_same_id_of_two_parties(keys: bool) -> None:
    """Both requests run at once under one id, and each party can end only its request."""
    engine = GatedEngine(writing("abcdef"))
    with (
        serving(engine=engine, keys=ApiKeys(KEYS) if keys else None) as server,
        parties(server, keys) as ((first, first_key), (second, second_key)),
    ):
        calls = [
            stub.Generate(named("order-17"), metadata=key, timeout=SOON)
            for stub, key in ((first, first_key), (second, second_key))
        ]
        for call in calls:
            assert dict(call.initial_metadata())["x-request-id"] == "order-17"
        until(lambda: server.gateway.n_live == 2, "two live requests of one id")
        with pytest.raises(grpc.RpcError) as caught:  # its own id twice
            list(first.Generate(named("order-17"), metadata=first_key, timeout=SOON))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS  # pyright: ignore[reportAttributeAccessIssue]
        cancel = pb.CancelRequest(request_id="order-17")
        assert second.Cancel(cancel, metadata=second_key, timeout=SOON).found
        engine.let(2)
        with pytest.raises(grpc.RpcError):
            list(calls[1])
        until(lambda: server.gateway.n_live == 1, "the end of the second")
        assert not second.Cancel(cancel, metadata=second_key, timeout=SOON).found
        assert next(calls[0]).text
        assert first.Cancel(cancel, metadata=first_key, timeout=SOON).found
        engine.let(2)
        with pytest.raises(grpc.RpcError):
            list(calls[0])


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "connections"])
def test_a_stranger_finds_nothing(keys: bool) -> None:
    engine = GatedEngine(writing("abcdef"))
    with (
        serving(engine=engine, keys=ApiKeys(KEYS) if keys else None) as server,
        parties(server, keys) as ((owner, owner_key), (stranger, stranger_key)),
    ):
        call = owner.Generate(named("order-17", 3), metadata=owner_key, timeout=SOON)
        call.initial_metadata()
        until(lambda: server.gateway.n_live == 1, "the live request")
        cancel = pb.CancelRequest(request_id="order-17")
        assert not stranger.Cancel(cancel, metadata=stranger_key, timeout=SOON).found
        engine.let(3)
        assert [message.finish_reason for message in call][-1] == pb.FINISH_REASON_LENGTH


def test_an_http_request_is_ended_by_its_own_key_alone() -> None:
    engine = GatedEngine(writing("abcdef"))
    with (
        serving(engine=engine, keys=ApiKeys(KEYS)) as server,
        parties(server, True) as ((owner, owner_key), (stranger, stranger_key)),
        httpx2.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS[0]}"}) as http,
    ):
        body = {"prompt": "Go", "max_tokens": 100, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            until(lambda: server.gateway.n_live == 1, "the live request")
            (request,) = server.service.pool.live()
            cancel = pb.CancelRequest(request_id=request.request_id)
            assert not stranger.Cancel(cancel, metadata=stranger_key, timeout=SOON).found
            assert owner.Cancel(cancel, metadata=owner_key, timeout=SOON).found
            engine.let(2)
            assert "cancelled" in response.read().decode()
