"""A Ray cluster for each test file, and our application on it over real HTTP."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Ray reads these when it is imported, here and in the processes that it starts.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Ray's coming default, without its warning
os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"

import httpx2
import openai
import pytest

with warnings.catch_warnings():  # Ray's own, of what it imports
    warnings.simplefilter("ignore")
    import ray
    from ray import serve

from server.ray.app import build_app
from tests.places import ROOT

SOON = 60.0
# What the replicas of a test need: few programs, compiled when first needed and kept for the next replica.
SMALL: dict[str, Any] = {
    "max_batch_size": 8,
    "n_slots": 4096,
    "max_batch_tokens": 32,
    "compile_ahead": False,
    "access_log": "off",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of Ray itself."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"))
        item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning:ray"))


@dataclass(frozen=True)
class Served:
    """An application that answers at `url`."""

    name: str
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client for the application; the caller closes it."""
        options = {"api_key": "none", "max_retries": 0, "timeout": SOON} | options
        return openai.OpenAI(base_url=self.url + "/v1", **options)

    def get(self, path: str) -> httpx2.Response:
        """Send a GET request."""
        return httpx2.get(self.url + path, timeout=SOON)


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def http_port() -> int:
    """A port that was free just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(http_port: int) -> Iterator[None]:
    """A Ray cluster on this machine, with Serve's proxy on `http_port`, for the tests of a file."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), path)))
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=bool(os.environ.get("ORCA_TESTS_RAY_LOGS")),
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": http_port})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ["PYTHONPATH"] = path


@pytest.fixture(scope="module")
def run_app(cluster: None, http_port: int) -> Iterator[Serve]:
    """Start the application with these arguments, replacing one that runs already.

    `run_app(num_replicas=2)` returns when all its replicas are ready. Arguments that are not given are those
    of SMALL.
    """

    def run(**args: Any) -> Served:
        serve.run(build_app(SMALL | args), name="orca")
        return Served("orca", f"http://127.0.0.1:{http_port}")

    yield run
    serve.delete("orca")
