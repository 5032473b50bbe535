"""Clients that disconnect while queued, read nothing or read late; and the time limit of a stream."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from orca_jax.config import ServingConfig
from orca_jax.request.request import FinishReason, Request
from server.http import state
from server.http.connections.caller import Caller
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import END, MODEL, Server, serving, until
from tests.endpoint.http_client import post_head, raw, small_send_buffers, unread
from tests.endpoint.openai_client import client_of
from tests.host.engines import writing

HI: Any = [{"role": "user", "content": "Hi"}]


def echoing(request: Request, index: int) -> int:
    """An engine's tokens: the prompt repeated, then end of sequence."""
    ids = request.prompt_ids
    return ids[index] if index < len(ids) else END


def reasons(server: Server) -> list[FinishReason | None]:
    """The finish reasons of the requests that have ended."""
    return [record.finish_reason for record in server.service.timeline.requests]


def test_a_stream_that_takes_too_long() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.5)
    with serving(writing("text"), seconds=0.01, options=options) as server, client_of(server) as client:
        stream = client.chat.completions.create(model="test", messages=HI, stream=True)
        assert next(stream).choices[0].delta.content
        with pytest.raises(openai.APIError, match=r"after 0\.5 seconds") as caught:
            list(stream)
        assert (caught.value.type, caught.value.code) == ("timeout_error", "timeout")
        assert reasons(server) == [FinishReason.TIMEOUT]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_caller", [True, False])
def test_a_client_that_disconnects_while_queued(
    stream: bool, has_caller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a server that makes no Caller, as Ray's."""
    if not has_caller:
        monkeypatch.setattr(state, "caller_of", lambda scope: None)
    config = ServingConfig(max_batch_size=1, n_slots=1024, max_batch_tokens=512, block_size=16)
    body = json.dumps({"prompt": "bb", "max_tokens": 400, "stream": stream}).encode()
    head = post_head("/v1/completions", f"Content-Length: {len(body)}")
    with serving(writing("text"), seconds=0.05, config=config) as server, client_of(server) as client:
        first = client.completions.create(model="test", prompt="a", max_tokens=400, stream=True)
        next(first)
        with raw(server, head, body):
            until(lambda: server.service.pool.n_waiting == 1, "the second request")
        until(lambda: server.gateway.n_live == 1, "the second request's end")
        assert reasons(server) == [FinishReason.CANCELLED], "the first one goes on"
        assert next(first).choices[0].text
        first.close()


def test_who_asks_after_the_client_has_left_is_called_at_once_and_who_asked_no_more_never() -> None:
    caller, calls = Caller(), list[str]()
    caller.on_departure(lambda: calls.append("no more"))
    caller.on_departure(lambda: calls.append("first"))
    caller.leave()
    caller.on_departure(lambda: calls.append("later"))
    caller.on_departure(None)
    assert calls == ["first", "later"] and caller.has_left and not caller.has_sent_all


def test_a_client_that_does_not_read_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    small_send_buffers(monkeypatch)
    model = replace(MODEL, n_positions=1 << 13)
    config = ServingConfig(max_batch_size=8, n_slots=1 << 16, max_batch_tokens=1 << 13)
    # A NUL is six characters in JSON: 144 kB of text, in any number of chunks.
    body = json.dumps({"prompt": [0] * 3000, "n": 8, "max_tokens": 3001, "stream": True}).encode()
    head = post_head("/v1/completions", f"Content-Length: {len(body)}")
    # Slow enough for the connection to be full long before the text is whole.
    with (
        serving(echoing, seconds=0.0002, model=model, config=config) as server,
        client_of(server) as client,
    ):
        with unread(server, head, body):
            until(lambda: len(reasons(server)) == 8, "the end of its requests in the engine")
            assert reasons(server) == [FinishReason.STOP] * 8
            for _ in range(5):
                stream = client.completions.create(model="test", prompt="others", stream=True)
                assert "".join(chunk.choices[0].text for chunk in stream) == "others"
            assert server.gateway.n_live == 8, "it is still not read"
        until(server.at_rest, "rest")


def test_a_client_that_reads_late_gets_everything() -> None:
    """Unread output arrives in larger pieces."""
    text = "abcdefghij" * 20
    with serving(echoing) as server, client_of(server) as client:
        stream = client.completions.create(model="test", prompt=text, max_tokens=250, stream=True)
        until(lambda: len(reasons(server)) == 1, "the end of its request in the engine")
        assert "".join(chunk.choices[0].text for chunk in stream) == text
