"""`orca serve` with the demo model, as a process of the main environment; the clients need none of it."""

import os
import sys
from collections.abc import Iterator

import pytest

from bench.server.server_process import ServerProcess


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where OpenAI's routes are. The model is called "demo"."""
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    with ServerProcess(["--access-log", "off", "--max-batch-size", "4"], python=python) as server:
        yield server.wait_until_ready().url + "/v1"
