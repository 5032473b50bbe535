"""A client that asks for much and reads nothing: its request ends, and so does its connection."""

import json
import socket
from dataclasses import replace

import pytest

from orca_jax.config import ServingConfig
from orca_jax.request import FinishReason
from server import endpoints
from server.addresses import bound_socket
from tests.endpoint.harness import MODEL, serving, until

N_TOKENS = 20_000
BODY = {
    "prompt": "a",
    "max_tokens": N_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def test_the_engine_does_not_wait_for_a_reader_and_the_kernel_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def small(host: str, port: int, *, flag: str) -> socket.socket:
        bound = bound_socket(host, port, flag=flag)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr(endpoints, "bound_socket", small)  # or the system's buffers would hold it all
    monkeypatch.setattr(endpoints, "_UNREAD_SECONDS", 4)
    model = replace(MODEL, n_positions=1 << 16)
    config = ServingConfig(max_batch_size=4, n_slots=1 << 17, max_batch_tokens=1 << 16)
    with serving(model=model, config=config) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            body = json.dumps(BODY).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until(lambda: len(server.service.timeline.requests) == 1, "the end of the request in the engine")
            assert server.service.timeline.requests[0].finish_reason is FinishReason.LENGTH
            assert server.service.timeline.requests[0].n_output == N_TOKENS
            assert server.gateway.n_live == 1, "what was not read lies in the request's own mailbox"
            until(server.at_rest, "the end of the connection")
