"""Worker processes end soon after their server, however that ends and whatever they are doing."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from bench.server.server_process import ServerProcess
from bench.server.worker_faults import worker_pids
from orca_jax.config import EngineConfig
from orca_jax.workers.worker_options import WorkerOptions
from tests.places import ROOT
from tests.whole.workers.worker_harness import SIZES, SOON, is_there, until, write_model

LOADS_FOR_EVER = """
@contextmanager
def loading():
    print("up", flush=True)
    threading.Event().wait()
"""
HANGS = """
class Hangs:
    address = "here"
    def __init__(self, options, on_load): pass
    def stop(self): print("asked to stop", flush=True)
    def run(self):
        print("up", flush=True)
        threading.Event().wait()
worker_process.WorkerProcess = Hangs
worker_process._ORPHAN_SECONDS = 0.2
loading = lambda: nullcontext(None)
"""


@pytest.mark.parametrize(
    ("doing", "last"), [(LOADS_FOR_EVER, b""), (HANGS, b"asked to stop\n")], ids=["loads", "hangs"]
)
def test_a_worker_whose_parent_is_gone_ends_whatever_it_does(doing: str, last: bytes) -> None:
    options = WorkerOptions(stage=0, engine=EngineConfig(), listen="unix:/nowhere", end_with_stdin=True)
    code = f"""
import sys, threading
from contextlib import contextmanager, nullcontext
from orca_jax.launch import worker_process
from orca_jax.workers.worker_options import WorkerOptions
{doing}
options = WorkerOptions.from_json({options.as_json()!r})
worker_process.run_worker(options, note=lambda line: None, loading=loading)
"""
    process = subprocess.Popen(
        (sys.executable, "-c", code), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(SOON) == 3
        assert process.stdout.read() == last
    finally:
        process.kill()
        process.wait(SOON)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.long
def test_workers_end_when_their_server_is_killed_under_load(tmp_path: Path) -> None:
    flags = ("--worker-processes", "--pipeline-parallel", "2", *SIZES)
    with ServerProcess((str(write_model(tmp_path)), *flags)) as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready(SOON)
        pids = worker_pids(server)
        answered = threading.Event()

        def ask_again_and_again() -> None:
            body = {"prompt": [1, 2], "max_tokens": 20, "ignore_eos": True}
            with httpx2.Client(base_url=server.url, timeout=SOON) as client:
                while client.post("/v1/completions", json=body).status_code == 200:
                    answered.set()

        asking = pool.submit(ask_again_and_again)
        assert answered.wait(SOON)
        assert len(pids) == 2 and all(map(is_there, pids))
        server.signal(signal.SIGKILL)
        server.wait(SOON)
        until(lambda: not any(map(is_there, pids)), "the workers' end", 10)
        assert isinstance(asking.exception(SOON), httpx2.TransportError)
