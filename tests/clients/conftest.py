"""`orca serve` as processes of the main environment; the clients need none of it."""

import os
import sys
from collections.abc import Iterator

import pytest

from bench.server.server_process import ServerProcess
from tests.clients.errand_model import write_model
from tests.clients.page import MODEL

PYTHON = os.environ.get("SERVER_PYTHON", sys.executable)
FLAGS = ("--access-log", "off", "--max-batch-size", "4")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of OpenAI's routes, on a server of the demo model named "demo"."""
    with ServerProcess(FLAGS, python=PYTHON) as server:
        yield server.wait_until_ready().url + "/v1"


@pytest.fixture(scope="session")
def errands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the model in errand_model.py, under the name and with the routes of docs/clients.md."""
    directory = tmp_path_factory.mktemp("errand-model")
    write_model(directory)
    flags = (str(directory), "--served-model-name", MODEL, "--n-slots", "131072", *FLAGS)
    with ServerProcess(flags, python=PYTHON) as server:
        yield server.wait_until_ready().url
