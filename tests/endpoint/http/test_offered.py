"""Params of a transfer that are sent while the prompt is computed: the first line of the answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from orca_jax.errors import EngineError
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.leases import Leases
from tests.endpoint.harness import Server, serving, until
from tests.host.engines import GatedEngine, writing
from tests.host.scheduling.test_leases import Packed, leases_of

PROMPT = [*range(40)]
WISH = {"do_remote_decode": True, "offer_early": True}


@contextmanager
def leasing(engine: GatedEngine) -> Iterator[tuple[Server, Leases]]:
    with serving(engine=engine) as server:
        kv = server.service.scheduler.kv
        kv.leases = leases = leases_of(kv, Packed)
        yield server, leases


@contextmanager
def asked(server: Server, route: str = "completions", **more: Any) -> Iterator[requests.Response]:
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "kv_transfer_params": WISH}
    prompt = (
        {"prompt": PROMPT}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "a" * 20}]}
    )
    with requests.post(
        f"{server.url}/v1/{route}", json=body | prompt | more, stream=True, timeout=30
    ) as answer:
        yield answer


def lines_of(answer: requests.Response) -> Iterator[str]:
    assert answer.status_code == 200 and answer.headers["x-orca-offered"] == "1"
    return (line.decode() for line in answer.iter_lines(chunk_size=1))


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_first_line_comes_before_the_prompt_is_computed(route: str) -> None:
    engine = GatedEngine(writing("ab"))
    with leasing(engine) as (server, leases), asked(server, route) as answer:
        lines = lines_of(answer)
        line = next(lines)
        assert line.endswith(",") and len(leases) == 1
        params = json.loads(line[:-1] + "}")["kv_transfer_params"]
        assert params["do_remote_prefill"] is True and params["remote_port"] == 7
        if route == "completions":
            assert params["remote_block_ids"] == [*range(40 // server.model.serving.block_size)]
        assert "first_token_id" not in params
        engine.let(1)
        whole = json.loads(line + "".join(lines))
        assert whole["kv_transfer_params"] == params and whole["usage"]["completion_tokens"] == 1
        assert whole["choices"][0]["finish_reason"] == "length"


def test_an_answer_without_an_early_offer_is_an_ordinary_one() -> None:
    """The wish of vLLM's proxies, a prompt without a full block, and several choices."""
    engine = GatedEngine(writing("ab"))
    engine.let(9)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"kv_transfer_params": {"do_remote_decode": True}}, True),
        ({"prompt": [1, 2, 3]}, False),
        ({"n": 2}, True),
    ]
    with leasing(engine) as (server, leases):
        for more, has_lease in cases:
            with asked(server, **more) as answer:
                assert answer.status_code == 200 and "x-orca-offered" not in answer.headers
                assert ("kv_transfer_params" in answer.json()) == has_lease
            leases.end_all()
        with asked(server, prompt=[-1]) as answer:
            assert answer.status_code == 400


def test_a_failure_after_the_first_line_is_in_the_object() -> None:
    engine = GatedEngine(writing("ab"))
    with leasing(engine) as (server, leases), asked(server) as answer:
        lines = lines_of(answer)
        line = next(lines)
        engine.error = EngineError("the device is lost")
        engine.let(1)
        whole = json.loads(line + "".join(lines))
        assert "the device is lost" in whole["error"]["message"] and "choices" not in whole
        until(lambda: not leases.n_bytes, "the end of the lease")


def test_a_client_that_leaves_after_the_first_line_ends_the_lease() -> None:
    engine = GatedEngine(writing("ab"))
    with leasing(engine) as (server, leases):
        with asked(server) as answer:
            next(lines_of(answer))
        (request,) = server.service.pool.live()
        until(lambda: request.ending is not None, "the client's departure")  # before the iteration returns
        engine.let(1)
        until(lambda: not leases.n_bytes and not leases._growing, "the end of the lease")
        (record,) = server.service.timeline.requests
        assert record.finish_reason is FinishReason.CANCELLED
