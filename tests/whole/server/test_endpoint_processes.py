"""`orca serve --endpoint-processes`: the tokens of a model, an operator's changes, and every kind of end."""

import os
import re
import signal
import time
from pathlib import Path

import httpx2
import pytest

from bench.server.server_process import ServerProcess
from orca_jax import LLM, SamplingParams

SOON = 60.0
KEY = {"Authorization": "Bearer operator-key"}
PROMPTS = ["abc", "In the beginning", "x"]


@pytest.fixture
def options(tiny_directory: Path, tmp_path: Path) -> tuple[str, ...]:
    keys = tmp_path / "keys"
    keys.write_text("operator-key\n")
    keys.chmod(0o600)
    names = ("--served-model-name", "tiny", "--admin-key-file", str(keys), "--access-log", "json")
    return (str(tiny_directory), "--endpoint-processes", "2", "--grpc-port", "none", *names)


def children(pid: int) -> list[int]:
    """The endpoint processes that `pid` has started."""
    found = list[int]()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"^PPid:\t(\d+)", (each / "status").read_text(), re.MULTILINE)
            command = (each / "cmdline").read_bytes()
        except OSError:
            continue
        if parent is not None and int(parent[1]) == pid and b"server.endpoint_processes.main" in command:
            found.append(int(each.name))
    return found


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SOON
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.02)


def test_tokens_changes_and_an_orderly_end(options: tuple[str, ...], tiny_directory: Path) -> None:
    with LLM(tiny_directory) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
        expected = llm.generate(PROMPTS, params)
    with ServerProcess(options) as server, httpx2.Client(timeout=SOON) as asked:
        server.wait_until_ready()
        asked.base_url = server.url
        pids = children(server.pid)
        assert len(pids) == 2
        for prompt, result in zip(PROMPTS, expected, strict=True):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
            answer = asked.post("/v1/completions", json=body).raise_for_status().json()
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == (result.text, result.finish_reason)
            assert result.logprobs is not None
            logprobs = [one.logprob for one in result.logprobs]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
            assert choice["weights_version"] == 0
        # An operator's change is known to all processes once it is answered.
        for _ in range(5):
            asked.post("/admin/sleep", headers=KEY, json={"level": 1}).raise_for_status()
            with httpx2.Client(base_url=server.url, timeout=SOON) as another:
                assert another.post("/v1/completions", json={"prompt": "abc"}).status_code == 503
            asked.post("/admin/wake_up", headers=KEY, json={}).raise_for_status()
            with httpx2.Client(base_url=server.url, timeout=SOON) as another:
                another.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}).raise_for_status()
        server.signal(signal.SIGTERM)
        assert server.wait(SOON) == 0
        until_gone(pids)
    log = server.stderr()
    assert "Traceback" not in log and log.count('"path": "/v1/completions"') == 13, log


def test_the_end_of_the_engines_process_ends_the_others(options: tuple[str, ...]) -> None:
    with ServerProcess(options) as server:
        server.wait_until_ready()
        pids = children(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        until_gone(pids)
