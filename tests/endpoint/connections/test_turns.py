"""Clients' work starts a few pieces at a time, round-robin over client networks."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import httpx2
from hypothesis import given
from hypothesis import strategies as st

from server.http.connections.listener import Turns
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import serving
from tests.host.engines import SOON


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, SOON))


def test_another_address_waits_for_a_few_pieces_not_for_all() -> None:
    async def take() -> None:
        turns = Turns(asyncio.get_running_loop(), at_once=4)
        begun: list[str] = []
        for i in range(100):
            turns.begin("greedy", partial(begun.append, f"greedy {i}"))
        for i in range(3):
            turns.begin("modest", partial(begun.append, f"modest {i}"))
        assert begun == [f"greedy {i}" for i in range(4)], "there was room for these at once"
        for n_turns in range(1, 30):
            before = len(begun)
            await asyncio.sleep(0)
            assert len(begun) - before <= 4
            if n_turns == 2:
                assert [one for one in begun if one.startswith("modest")] == [f"modest {i}" for i in range(3)]
        assert [one for one in begun if one.startswith("greedy")] == [f"greedy {i}" for i in range(100)]

    run(take())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), st.integers(1, 5))
def test_all_work_starts_once_in_order_per_address(came: list[tuple[str, bool]], at_once: int) -> None:
    async def take() -> None:
        turns = Turns(asyncio.get_running_loop(), at_once=at_once)
        begun: list[tuple[str, int]] = []
        for i, (network, pauses) in enumerate(came):
            turns.begin(network, partial(begun.append, (network, i)))
            if pauses:
                await asyncio.sleep(0)
        for _ in range(len(came) + 1):
            await asyncio.sleep(0)
        for network in "abc":
            assert [i for name, i in begun if name == network] == [
                i for i, (name, _) in enumerate(came) if name == network
            ]

    run(take())


def test_hundreds_of_requests_at_once_are_all_answered() -> None:
    async def ask(url: str) -> None:
        limits = httpx2.Limits(max_connections=300)
        async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=SOON) as client:
            answers = await asyncio.gather(*[client.get("/health") for _ in range(300)])
        assert {answer.status_code for answer in answers} == {200}

    with serving(options=EndpointOptions(port=0, grpc_port=None, access_log="off")) as server:
        run(ask(server.url))
