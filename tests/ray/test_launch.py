"""`orca serve --replicas N` and `serve run` as processes, from their first line of output to their end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from bench.server.server_process import ServerProcess
from server.ray import launch
from server.ray.app import build_app
from tests.places import ROOT
from tests.ray.conftest import SMALL, SOON
from tests.ray.processes import descendants
from tests.ray.readings import until

START_SECONDS = 180.0
EXAMPLE = ROOT / "deploy/ray/serve.yaml"
FLAGS = (
    *("--replicas", "2", "--grpc-port", "none", "--max-batch-size", "8", "--n-slots", "4096"),
    *("--max-batch-tokens", "32"),
)


def stream(url: str, started: threading.Semaphore, max_tokens: int) -> str | None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=SOON) as client:
        reason = None
        for chunk in client.completions.create(
            model="demo", prompt="a", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        ):
            started.release()
            reason = chunk.choices[0].finish_reason or reason
        return reason


@pytest.mark.timeout(400)
def test_orca_serve_with_replicas_drains_on_sigterm_and_leaves_no_process() -> None:
    with ServerProcess(FLAGS) as server, ThreadPoolExecutor() as pool:
        server.wait_until_ready(START_SECONDS)
        ready = httpx2.get(server.url + "/ready", timeout=SOON).json()
        assert list(ready["engines"].values()) == ["ready", "ready"]
        assert len(descendants("ray::ServeReplica:orca:orca-engine")) == 2
        started = threading.Semaphore(0)
        running = [pool.submit(stream, server.url, started, 400) for _ in range(4)]
        for _ in running:
            assert started.acquire(timeout=SOON)
        server.signal(signal.SIGTERM)
        assert [future.result(SOON) for future in running] == ["length"] * 4
        assert server.wait(SOON) == 0
        assert "all requests are done" in server.stderr()
    until(lambda: not descendants("ray"), SOON)


def test_a_port_in_use_is_reported_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launch.main(json.dumps({"replicas": 2, "port": port})) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"replicas": "0"}, "num_replicas is 0; it must be at least 1"),
        ({"replicas": "2", "record": "a.jsonl"}, "each engine would write it"),
        ({"replicas": "2", "max_connections": 5}, "max_connections has no effect"),
        ({"replicas": "2", "n_slots": -1}, "n_slots"),
    ],
)
def test_settings_that_replicas_cannot_share_are_refused_in_one_line(
    flags: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(json.dumps(flags)) == 2
    said = capsys.readouterr().err
    assert said.startswith("orca: error: ") and said.count("\n") == 1 and message in said


def test_without_ray_the_error_says_what_to_install() -> None:
    code = (
        "import sys; import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *more: None if name == 'ray' else find(name, *more); "
        "from server.cli import main; sys.exit(main(['serve', '--replicas', '2']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=SOON, check=False
    )
    assert done.returncode == 2 and "pip install 'ray[serve]" in done.stderr


def test_plain_orca_serve_does_not_import_ray() -> None:
    code = "import server.cli, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=SOON, check=False).returncode == 0


def test_the_example_of_a_config_file_is_valid() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))
    (app,) = schema.applications
    assert app.import_path == "server.ray.app:build_app"
    assert build_app(app.args) is not None


@pytest.mark.timeout(400)
def test_serve_run_takes_the_example(tmp_path: Path) -> None:
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= SMALL
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(path)]
    with (tmp_path / "log").open("w+") as log:
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=tmp_path, preexec_fn=heed
        )
        try:
            until(lambda: _answers(f"http://127.0.0.1:{port}/ready", process), START_SECONDS)
            assert stream(f"http://127.0.0.1:{port}", threading.Semaphore(0), 20) == "length"
            process.send_signal(signal.SIGINT)
            process.wait(SOON)
        except BaseException:
            print((tmp_path / "log").read_text()[-4000:])
            raise
        finally:
            process.kill()
            process.wait(SOON)
    until(lambda: not descendants("ray"), SOON)


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return httpx2.get(url, timeout=SOON).status_code == 200
    except httpx2.TransportError:
        return False
