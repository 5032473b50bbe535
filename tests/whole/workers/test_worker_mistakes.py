"""Mistakes with workers: each is one line that names the difference, and no stream is disturbed."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.server.repeated_streams import KnownStream, RepeatedStreams, asked
from bench.server.server_process import ServerProcess
from bench.server.worker_faults import figures, known_streams
from orca_jax import LLM
from orca_jax.config import Deadlines
from orca_jax.control import handshake
from orca_jax.errors import ConfigError, WorkerRefused, WorkerUnreachable
from orca_jax.launch import worker_process
from server import cli
from tests.whole.workers.worker_harness import (
    MAX_PROMPT,
    N_OUTPUT,
    N_POSITIONS,
    SIZES,
    SOON,
    OrcaWorker,
    nobody_listens,
    serve_mistake,
    until,
    write_model,
)

SECRET = "a secret that is long enough"
AT_ONCE = 15.0  # seconds for what no wait makes better; a wait for it would take twice as long
LONG = Deadlines(ready_seconds=2 * AT_ONCE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("four"))


class Serving:
    """A context manager: a server with workers started separately, and streams that never end."""

    def __init__(self, model: Path, workers: list[str], secret: Path) -> None:
        self.workers = workers
        self.flags = (
            str(model),
            "--workers",
            ",".join(workers),
            "--control-secret-file",
            str(secret),
            *SIZES,
        )
        self._known: list[KnownStream] = known_streams(model, n=6, n_output=N_OUTPUT, longest=MAX_PROMPT)
        self.begin()

    def begin(self) -> None:
        self.server = ServerProcess(self.flags)
        try:
            self.server.wait_until_ready(SOON)
        except BaseException:
            self.server.kill()
            raise
        self._enough = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._stream()), daemon=True)
        self._thread.start()
        assert self._begun.wait(SOON)

    async def _stream(self) -> None:
        async with RepeatedStreams(self.server.http_address, self._known) as self._streams:
            self._begun.set()
            while not self._enough.is_set():
                await asyncio.sleep(0.05)

    def is_undisturbed(self) -> None:
        """Check that correct tokens still arrive, and that no worker was lost."""
        n_ended = len(self._streams.ended)
        until(lambda: len(self._streams.ended) >= n_ended + 2 * len(self._known), "streams")
        assert self._streams.wrong == []
        metrics = asyncio.run(figures(self.server.http_address))
        assert metrics["orca_worker_losses_total"] == 0
        assert asyncio.run(asked(self.server.http_address, "/ready"))[0] == 200

    def kill(self) -> None:
        self.server.signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(SOON)
        self.server.signal(signal.SIGTERM)
        self._end()

    def _end(self) -> None:
        self._enough.set()
        try:
            self.server.wait(SOON)
            self._thread.join(SOON)
            assert not self._thread.is_alive()
        finally:
            self.server.kill()


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text(SECRET)
    with ExitStack() as stack:
        options = ("--of", "2", "--dtype", "float32", "--control-secret-file", str(secret))
        workers = [
            stack.enter_context(OrcaWorker(model, ("--stage", stage, *options))) for stage in ("1", "2")
        ]
        serving = Serving(model, [worker.listens().address for worker in workers], secret)
        yield serving
        serving.stop()
        for worker in workers:
            assert "Traceback" not in worker.stderr() and SECRET not in worker.stderr()


def refusal(model: Path, workers: list[str], **other: Any) -> str:
    """The reason why an engine cannot use these workers, which it gets at once."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_batch_tokens": N_POSITIONS,
        "control_secret": SECRET,
        "deadlines": LONG,
    }
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        LLM(model, workers=workers, **(options | other))
    assert time.monotonic() - begun < AT_ONCE
    expected = WorkerUnreachable if "was not reached" in str(caught.value) else WorkerRefused
    assert caught.type is expected
    return str(caught.value)


def another_model(serving: Serving, model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", n_embd=32)
    complaint = refusal(other, serving.workers)
    assert complaint.startswith(
        f"the worker of stage 1 at {serving.workers[0]} refused the connection: model: this worker has "
    )
    assert str(model) in complaint and str(other) in complaint


def a_model_of_the_same_name_and_another_shape(serving: Serving, model: Path, tmp_path: Path) -> None:
    config = model / "config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps(json.loads(before) | {"layer_norm_epsilon": 1e-3}))
        assert "refused the connection: digest: this worker has " in refusal(model, serving.workers)
    finally:
        config.write_text(before)


def another_dtype(serving: Serving, model: Path, tmp_path: Path) -> None:
    complaint = refusal(model, serving.workers, dtype="bfloat16")
    assert (
        "dtype: this worker has 'float32', but the caller has 'bfloat16'; start both with the same"
        in complaint
    )


def another_number_of_stages(serving: Serving, model: Path, tmp_path: Path) -> None:
    with nobody_listens() as unused:
        complaint = refusal(model, [*serving.workers, unused])
    assert "n_stages: this worker has 2, but the caller has 3" in complaint
    with OrcaWorker(model, ("--stage", "1", "--of", "3", "--dtype", "float32")) as worker:
        complaint = refusal(model, [worker.listens().address, serving.workers[1]], control_secret="")
        assert "n_stages: this worker has 3, but the caller has 2" in complaint


def addresses_in_another_order(serving: Serving, model: Path, tmp_path: Path) -> None:
    assert "refused the connection: stage: this worker has " in refusal(model, serving.workers[::-1])


def another_version_of_the_protocol(serving: Serving, model: Path, tmp_path: Path) -> None:
    version = handshake.PROTOCOL_VERSION
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "PROTOCOL_VERSION", version + 1)
        complaint = refusal(model, serving.workers)
    assert f"protocol_version: this worker has {version}, but the caller has {version + 1}" in complaint


def an_address_without_a_listener(serving: Serving, model: Path, tmp_path: Path) -> None:
    with nobody_listens() as unused, nobody_listens() as another:
        complaint = refusal(model, [unused, another], deadlines=Deadlines(ready_seconds=1))
    assert complaint.startswith(f"the worker of stage 1 at {unused} was not reached within ")
    assert complaint.endswith("; is one running there?")


def wrong_secrets(serving: Serving, model: Path, tmp_path: Path) -> None:
    for secret in ("", "another secret, long enough"):
        complaint = refusal(model, serving.workers, control_secret=secret)
        assert "the control plane's secret is wrong; give the server and all workers the same" in complaint
        assert SECRET not in complaint and (not secret or secret not in complaint)


def rubbish_at_the_control_port(serving: Serving, model: Path, tmp_path: Path) -> None:
    for address in serving.workers:
        host, _, port = address.rpartition(":")
        connections = [socket.create_connection((host, int(port)), SOON) for _ in range(20)]
        for i, connection in enumerate(connections):
            connection.sendall(bytes((i * 37 + j * 101) % 256 for j in range(1000 * (i + 1))))
        with pytest.raises((httpx2.HTTPError, OSError)):
            httpx2.post(f"http://{address}/orca.v1.Worker/Frames", content=b"{}", timeout=SOON)
        serving.is_undisturbed()  # while those connections are open
        for connection in connections:
            connection.close()


@pytest.mark.long
def test_each_mistake_is_named_and_disturbs_no_stream(serving: Serving, model: Path, tmp_path: Path) -> None:
    """tests/host/engine/test_grpc_channel.py has the same refusals without processes."""
    for mistake in (
        another_model,
        a_model_of_the_same_name_and_another_shape,
        another_dtype,
        another_number_of_stages,
        addresses_in_another_order,
        another_version_of_the_protocol,
        an_address_without_a_listener,
        wrong_secrets,
        rubbish_at_the_control_port,
    ):
        mistake(serving, model, tmp_path)
        serving.is_undisturbed()
        print(mistake.__name__)  # the next one is at fault


@pytest.mark.long
def test_a_second_server_is_refused_until_the_first_is_gone(serving: Serving) -> None:
    ready = ("--ready-timeout", "3")
    line = serve_mistake((*serving.flags, *ready), seconds=60)
    assert (
        f"{serving.workers[0]} refused the connection: an engine master has already joined this worker"
        in line
    )
    assert line.endswith("stop it first")
    serving.is_undisturbed()
    serving.kill()
    serving.begin()  # with the same workers, which still run
    serving.is_undisturbed()


MISTAKES = [
    (("--stage", "3", "--of", "2"), "stage is 3; it must be a whole number from 1 to 2"),
    (("--listen", "0.0.0.0:0"), "data_host is '0.0.0.0'; it must be an address"),
    (("--listen", "0.0.0.0:0", "--data-host", "127.0.0.1"), "and it has no secret"),
    (("--listen", "here", "--data-host", "127.0.0.1"), "a worker's address is 'here'; it must be host:port"),
    (("--control-secret-file", "no/such/file"), "no/such/file"),
]
OF_TWO = ("--stage", "1", "--of", "2")


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_a_worker_s_mistake_is_reported_in_one_line(
    model: Path,
    flags: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert message in mistake_here(model, flags, monkeypatch, capfd)


def mistake_here(
    model: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> str:
    """The last line of `orca worker` in this process, which ends with status 2."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # it sets variables for JAX
    monkeypatch.setattr(
        worker_process, "keep_compiled_programs", lambda *_, **__: None
    )  # for all that follows
    stage = () if "--stage" in flags else OF_TWO
    listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
    assert cli.main(["worker", str(model), *stage, *listen, *flags]) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("orca: error: ")
    return last


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--control-secret-file", "no/such/file"), "no/such/file"),
        pytest.param(
            ("--tensor-parallel", "2"),
            "tensor_parallel 2 needs 2 devices in the worker's process; JAX has 1",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_mistake_ends_the_process(model: Path, flags: tuple[str, ...], message: str) -> None:
    with OrcaWorker(model, (*OF_TWO, *flags)) as worker:
        assert message in worker.mistake()


@pytest.mark.long
def test_a_worker_without_a_model_reports_it(tmp_path: Path) -> None:
    with OrcaWorker(tmp_path / "nowhere", OF_TWO) as worker:
        assert "there is no directory" in worker.mistake()


def test_a_port_in_use_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        complaint = mistake_here(model, ("--listen", address), monkeypatch, capfd)
    assert f"a worker cannot listen on {address}: " in complaint
    assert complaint.endswith("; choose another address or port")


@pytest.mark.long
def test_a_mistake_that_its_workers_find_ends_the_server_soon(model: Path, tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    line = serve_mistake((str(broken), "--worker-processes", "--pipeline-parallel", "2", *SIZES), seconds=60)
    assert str(weights) in line and line.startswith("orca: error: stage ")
