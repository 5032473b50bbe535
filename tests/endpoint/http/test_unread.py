"""A client that requests much and reads nothing: its request completes and its connection is closed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orca_jax.config import ServingConfig
from orca_jax.request.request import FinishReason
from server.commands import endpoints
from tests.endpoint.harness import MODEL, Server, serving, until
from tests.endpoint.http_client import post_head, small_send_buffers, unread

N_TOKENS = 4_000
BODY = {
    "prompt": "a",
    "max_tokens": N_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


MODEL_OF_LONG_TEXTS = replace(MODEL, n_positions=1 << 13)
CONFIG = ServingConfig(max_batch_size=4, n_slots=1 << 14, max_batch_tokens=1 << 13)


@contextmanager
def unread_stream() -> Iterator[Server]:
    """A server with a stream that is more than its connection holds, and that nobody reads."""
    body = json.dumps(BODY).encode()
    head = post_head("/v1/completions", f"Content-Length: {len(body)}")
    with serving(model=MODEL_OF_LONG_TEXTS, config=CONFIG) as server, unread(server, head, body):
        yield server


def test_the_engine_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    small_send_buffers(monkeypatch)
    with unread_stream() as server:
        until(lambda: len(server.service.timeline.requests) == 1, "the end of the request in the engine")
        assert server.service.timeline.requests[0].finish_reason is FinishReason.LENGTH
        assert server.service.timeline.requests[0].n_output == N_TOKENS
        assert server.gateway.n_live == 1, "unread output stays in the request's own Output"


def test_the_kernel_closes_the_connection_of_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_send_buffers(monkeypatch)
    monkeypatch.setattr(endpoints, "_UNREAD_SECONDS", 1)
    with unread_stream() as server:
        until(lambda: bool(server.gateway.n_live or server.service.timeline.requests), "the request")
        until(server.at_rest, "the end of the connection")
