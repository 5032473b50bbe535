"""A plain server shared by all tests of a file, and a client for each test."""

from collections.abc import Iterator

import httpx2
import pytest

from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client
