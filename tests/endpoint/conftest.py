"""A plain server shared by all tests of a file, and a client for each test."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn.server

from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected


@pytest.fixture(scope="session", autouse=True)
def servers_stop_at_once() -> Iterator[None]:
    """uvicorn polls every 0.1 s, and a stop takes two polls; these tests stop hundreds of servers."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client
