"""A newcomer who follows one request from its HTTP route to the sampler reads at most 30 files.

This is under Algorithm 1; the default policy adds its own file and the prefix cache's.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx2

from orca_jax import LLM
from orca_jax.execution.sampling import TokenChooser
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.service.orca import SCHEDULER_THREAD
from server.http.generation.completions import create_completion
from tests.endpoint.harness import ENDPOINT_THREAD, Server, serving_model
from tests.host.engines import SOON
from tests.places import ROOT
from tests.whole.conftest import TINY_SIZES

MOST_FILES = 30
ROUTE, QUEUE, SAMPLER = create_completion.__code__, RequestPool.add.__code__, TokenChooser.choose.__code__
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


class RequestPath:
    """The files that run for one request, in order, from `armed` on.

    On the event loop's thread these run from the route until the request is in the pool; on the scheduler's
    thread until the sampler. Later the event loop only waits for output, which is the way back.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.armed = False
        self._begun = self._queued = self._sampled = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For `threading.setprofile`; threads that run no part of a request's path do without."""
        if threading.current_thread().name not in (SCHEDULER_THREAD, ENDPOINT_THREAD):
            sys.setprofile(None)
        if not self.armed or self._sampled or event not in ("call", "return"):
            return
        code = frame.f_code
        if code is ROUTE:
            self._begun = True
        on_endpoint = threading.current_thread().name == ENDPOINT_THREAD
        if event == "call" and self._begun and not (on_endpoint and self._queued):
            self._add(code)
        if event == "return" and code is QUEUE:
            self._queued = True
        self._sampled = code is SAMPLER

    def _add(self, code: CodeType) -> None:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT / "orca_jax") or path.is_relative_to(ROOT / "server"):
            self.files[path.relative_to(ROOT).as_posix()] = None


@contextmanager
def followed(directory: Path, path: RequestPath) -> Iterator[Server]:
    """A server whose threads all report to `path`."""
    threading.setprofile(path.profile)
    try:
        with (
            LLM(directory, policy="orca", **TINY_SIZES) as llm,
            serving_model(llm.service, llm.config, llm.serving, tokenizer=llm.tokenizer) as server,
        ):
            yield server
    finally:
        threading.setprofile(None)


def test_a_request_passes_through_at_most_30_files(tiny_directory: Path) -> None:
    path = RequestPath()
    with followed(tiny_directory, path) as server:
        for path.armed in (False, False, True):  # first warm up
            body = {"prompt": "In", "max_tokens": 3, "temperature": 0.7}
            httpx2.post(f"{server.url}/v1/completions", json=body, timeout=SOON).raise_for_status()
    files = [*path.files]
    assert files[0] == "server/http/generation/completions.py", files
    assert files[-1] == "orca_jax/execution/sampling.py", files
    assert "orca_jax/scheduling/select.py" in files and "orca_jax/engine/engine_master.py" in files, files
    assert len(files) <= MOST_FILES, files
    unnamed = [name for name in files if f"`{name}`" not in STRUCTURE]
    assert not unnamed, "docs/structure.md leaves out a part of the path"
