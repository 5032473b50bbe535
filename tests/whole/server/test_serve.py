"""`orca serve` as a process, from its first line of output to every kind of end."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.server.server_process import ServerProcess
from server.rpc import generation_pb2, generation_pb2_grpc
from tests.places import CERTIFICATES, ROOT

SOON = 60.0


@pytest.fixture
def options(tiny_directory: Path) -> tuple[str, ...]:
    return (
        str(tiny_directory),
        "--max-batch-size",
        "4",
        "--served-model-name",
        "tiny",
        "--access-log",
        "off",
    )


def client(server: ServerProcess, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=SOON, **options)


def stream(server: ServerProcess, started: threading.Semaphore, max_tokens: int = 60) -> tuple[str, str]:
    """Read one stream: its finish reason, or the error that ended it, and its text."""
    text, reason = "", "none"
    with client(server) as one:
        try:
            chunks = one.completions.create(
                model="tiny",
                prompt="abc",
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in chunks:
                started.release()
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
        except openai.APIError as error:
            return str(error), text
    return reason, text


def test_it_serves_both_endpoints_and_ends_in_order(options: tuple[str, ...]) -> None:
    with ServerProcess(options) as server:
        server.wait_until_ready()
        stderr = server.stderr()
        assert "attention  pure JAX, following the real lengths" in stderr and "1 stage on 1 device" in stderr
        assert (
            "max_bs     4 requests" in stderr
            and "float32" in stderr
            and "buckets" in stderr
            and "n_slots" in stderr
        )
        assert re.search(r"^end        at \d+", stderr, re.MULTILINE)
        assert "defaults   the API's (no generation_config.json)" in stderr
        # The first request that the banner prints works as it is printed.
        (command,) = [line for line in server.stderr().splitlines() if line.startswith("curl")]
        done = (
            subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=SOON, check=True)
            if _has_curl()
            else None
        )
        if done is not None:
            assert json.loads(done.stdout)["usage"]["completion_tokens"] >= 1
        with client(server) as one:
            over_http = one.completions.create(
                model="tiny", prompt="abc", max_tokens=8, temperature=0, seed=1
            )
        with grpc.insecure_channel(server.grpc_address) as channel:
            request = generation_pb2.GenerateRequest(
                text="abc", sampling=generation_pb2.SamplingParams(max_tokens=8, temperature=0)
            )
            answers = list(generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=SOON))
            check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
            health = check(health_pb2.HealthCheckRequest(), timeout=SOON)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert "".join(answer.text for answer in answers) == over_http.choices[0].text
        assert httpx2.get(server.url + "/ready", timeout=SOON).json()["status"] == "ready"
        server.signal(signal.SIGTERM)
        assert server.wait(SOON) == 0
    assert not [line for line in server.stderr().splitlines() if "Traceback" in line], server.stderr()


def _has_curl() -> bool:
    return subprocess.run(["sh", "-c", "command -v curl"], capture_output=True, check=False).returncode == 0


@pytest.mark.long
def test_what_the_readme_prints_works() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (curl,) = [text for kind, text in blocks if kind == "sh" and text.startswith("curl ")]
    (program,) = [text for kind, text in blocks if kind == "python" and "import OpenAI" in text]
    with ServerProcess() as server:
        server.wait_until_ready()
        here = server.url.removeprefix("http://")
        printed = subprocess.run(
            [sys.executable, "-c", program.replace("127.0.0.1:8000", here)],
            capture_output=True,
            text=True,
            timeout=SOON,
            check=True,
        ).stdout
        assert len(printed.split()) > 20
        if _has_curl():
            command = ["sh", "-c", curl.replace("127.0.0.1:8000", here)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=True)
            assert json.loads(done.stdout)["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_running_requests_finish_and_takes_no_new_ones(
    options: tuple[str, ...], number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"the tests were started with {number.name} ignored, as by nohup, and so are servers")
    n_clients = 12  # three batches of four: some still wait when the signal comes
    with ServerProcess(options) as server, ThreadPoolExecutor(n_clients) as pool:
        server.wait_until_ready()
        started = threading.Semaphore(0)
        running = [pool.submit(stream, server, started) for _ in range(n_clients)]
        assert started.acquire(timeout=SOON)
        _until_live(server, n_clients)
        server.signal(number)
        refused = _refusal(server, running)
        reasons = [future.result(SOON)[0] for future in running]
        assert reasons == ["length"] * n_clients
        assert server.wait(SOON) == 0
    assert refused is None or (refused.startswith("503") and "shutting down" in refused)
    assert "all requests are done" in server.stderr()


LAUNCHER = """
import subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()
"""


def test_a_server_drains_and_ends_with_the_process_that_started_it(options: tuple[str, ...]) -> None:
    flags = ("--port", "0", "--grpc-port", "none", "--no-compile-ahead", "--end-with-stdin")
    serve = (sys.executable, "-m", "server.cli", "serve", *options, *flags)
    launcher = subprocess.Popen(
        (sys.executable, "-c", LAUNCHER, *serve),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert launcher.stderr is not None
        said = ""
        while "\ncurl " not in said:  # the last line when it is ready
            line = launcher.stderr.readline()
            assert line, said
            said += line
        url = re.findall(r"^HTTP +(\S+)", said, re.MULTILINE)[0]
        body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=SOON) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            launcher.kill()
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] and '"finish_reason":"length"' in "".join(rest)
        # Both processes have ended when nobody holds the pipe any more.
        assert "all requests are done" in launcher.stderr.read()
        assert launcher.wait(SOON) == -signal.SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(SOON)
        assert launcher.stderr is not None
        launcher.stderr.close()


def test_a_server_that_shall_end_with_its_standard_input_needs_a_pipe(options: tuple[str, ...]) -> None:
    with ServerProcess((*options, "--end-with-stdin")) as server:
        assert server.wait(SOON) == 2
    assert "end_with_stdin needs a pipe as standard input" in server.stderr()


def _until_live(server: ServerProcess, n: int) -> None:
    """Wait until the server counts `n` accepted requests."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        text = httpx2.get(server.url + "/metrics", timeout=SOON).text
        (line,) = [line for line in text.splitlines() if line.startswith("orca_requests_total")]
        if float(line.split()[-1]) >= n:
            return
        time.sleep(0.01)
    raise AssertionError(f"fewer than {n} requests came in")


def _refusal(server: ServerProcess, running: list[Future[tuple[str, str]]]) -> str | None:
    """Send a request after the signal; return the answer, None if the server had already ended."""
    while not all(future.done() for future in running):
        try:
            with client(server) as one:
                one.completions.create(model="tiny", prompt="abc", max_tokens=1)
        except openai.InternalServerError as error:
            return f"{error.status_code}: {error}"
        except openai.APIConnectionError:
            return None
    return None


@pytest.mark.long
def test_requests_that_do_not_finish_in_time_end_with_an_error(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    slow = ("gpt2", "--load-format", "dummy", "--served-model-name", "tiny", "--drain-timeout", "0.2")
    with ServerProcess((*slow, "--max-batch-size", "2")) as server, ThreadPoolExecutor(6) as pool:
        server.wait_until_ready()
        with grpc.insecure_channel(server.grpc_address) as channel:
            sampling = generation_pb2.SamplingParams(max_tokens=500)
            ids = generation_pb2.TokenIds(ids=[1, 2, 3])
            answers = generation_pb2_grpc.GenerationStub(channel).Generate(
                generation_pb2.GenerateRequest(token_ids=ids, sampling=sampling), timeout=SOON
            )
            next(answers)
            started = threading.Semaphore(0)
            running = [pool.submit(_long, server, started) for _ in range(5)]
            _until_live(server, 6)
            server.signal(signal.SIGTERM)
            for future in running:
                assert "shutting down" in future.result(SOON)
            with pytest.raises(grpc.RpcError) as ended:
                list(answers)
            assert ended.value.code() is grpc.StatusCode.CANCELLED  # pyright: ignore[reportAttributeAccessIssue]
        assert server.wait(SOON) == 0
    assert "6 requests had to be ended" in server.stderr()


@pytest.mark.long
def test_a_second_signal_ends_what_runs_at_once() -> None:
    slow = ("gpt2", "--load-format", "dummy", "--served-model-name", "tiny", "--drain-timeout", "600")
    with ServerProcess(slow) as server, ThreadPoolExecutor(2) as pool:
        server.wait_until_ready()
        running = [pool.submit(_long, server, threading.Semaphore(0)) for _ in range(2)]
        _until_live(server, 2)
        server.signal(signal.SIGTERM)
        deadline = time.monotonic() + SOON
        while "shutting down; 2 requests" not in server.stderr():
            assert time.monotonic() < deadline, "the first signal was not noticed"
            time.sleep(0.05)
        server.signal(signal.SIGINT)
        assert server.wait(SOON) == 0
        assert all("shutting down" in future.result(SOON) for future in running)
    assert "2 requests had to be ended" in server.stderr()


def _long(server: ServerProcess, started: threading.Semaphore) -> str:
    """Send a request that would run for minutes; return the error that ends it."""
    try:
        with client(server) as one:
            for _ in one.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=500, stream=True):
                started.release()
    except openai.APIError as error:
        return str(error)
    return "no error"


@pytest.mark.long
def test_after_sigkill_it_comes_back_on_the_same_port(options: tuple[str, ...]) -> None:
    with ServerProcess(options) as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready()
        started = threading.Semaphore(0)
        running = pool.submit(stream, server, started)
        assert started.acquire(timeout=SOON)
        server.signal(signal.SIGKILL)
        assert server.wait(SOON) == -signal.SIGKILL
        assert running.result(SOON)[0] != "length", "the client saw that it was cut off"
    port = server.url.rpartition(":")[2]
    with ServerProcess((*options, "--port", port)) as again:
        again.wait_until_ready()
        assert again.url == server.url
        assert stream(again, threading.Semaphore(0), max_tokens=4)[0] == "length"


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use_is_reported_in_one_line_before_loading(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with ServerProcess((flag, port)) as server:
            assert server.wait(SOON) == 2
    (line,) = server.stderr().splitlines()
    assert line.startswith("orca: error:") and port in line and flag in line
    assert "in use" in line.lower()


def test_a_signal_while_the_model_loads_ends_it_at_once() -> None:
    with ServerProcess(("gpt2", "--load-format", "dummy")) as server:
        server.wait_until_listening()
        assert httpx2.get(server.url + "/health", timeout=SOON).status_code == 200
        response = httpx2.get(server.url + "/ready", timeout=SOON)
        assert (response.status_code, response.json()["status"]) == (503, "loading")
        server.signal(signal.SIGTERM)
        assert server.wait(SOON) == 128 + signal.SIGTERM
    assert "stopped while the model was loading" in server.stderr()


# Each has a test of its message without a process: of the settings, keys, templates, or the engine.
TOLD_ELSEWHERE: list[tuple[list[str], str]] = [
    (["--port", "70000"], "port"),
    (["--ssl-certfile", "cert.pem"], "belong together"),
    (["--chat-template", "no.jinja"], "no.jinja"),
    (["--api-key-file", "no-keys"], "no-keys"),
    (["--config", "no.yaml"], "no.yaml"),
    (["--pipeline-parallel", "5"], "pipeline_parallel is 5, but the model's n_layers is 4"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "there is no directory"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
        (["--ssl-certfile", "no.pem", "--ssl-keyfile", "no.key"], "not a usable certificate"),
        *(pytest.param(*mistake, marks=pytest.mark.long) for mistake in TOLD_ELSEWHERE),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--grpc-port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("orca: error:") and message in last
    assert "Traceback" not in done.stderr


def test_tls_on_both_endpoints_and_keys_from_the_environment(options: tuple[str, ...]) -> None:
    certificate, key = CERTIFICATES / "localhost.pem", CERTIFICATES / "localhost.key"
    keys = {"ORCA_API_KEYS": "first-secret,second-secret", "ORCA_SSL_CERTFILE": str(certificate)}
    with ServerProcess((*options, "--ssl-keyfile", str(key)), variables=keys) as server:
        server.wait_until_ready()
        assert server.url.startswith("https://")
        port = server.url.rpartition(":")[2]
        trusted = ssl.create_default_context(cafile=str(certificate))
        base_url = f"https://localhost:{port}/v1"
        with httpx2.Client(verify=trusted, timeout=SOON) as http:
            good = openai.OpenAI(base_url=base_url, api_key="second-secret", http_client=http, max_retries=0)
            assert good.completions.create(model="tiny", prompt="abc", max_tokens=2).usage is not None
            bad = openai.OpenAI(base_url=base_url, api_key="third-secret", http_client=http, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                bad.completions.create(model="tiny", prompt="abc", max_tokens=2)
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        grpc_port = server.grpc_address.rpartition(":")[2]
        with grpc.secure_channel(f"localhost:{grpc_port}", credentials) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.ModelsRequest()
            with pytest.raises(grpc.RpcError) as refused:
                stub.Models(request, timeout=SOON)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore[reportAttributeAccessIssue]
            metadata = (("authorization", "Bearer first-secret"),)
            assert stub.Models(request, timeout=SOON, metadata=metadata).models[0].name == "tiny"
    assert "secret" not in server.stderr()


def test_a_closed_terminal_does_not_end_it(options: tuple[str, ...]) -> None:
    """stderr is a pipe whose reader leaves: log lines are lost, but the work goes on."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "server.cli",
            "serve",
            "--no-compile-ahead",
            *options,
            "--port",
            "0",
            "--grpc-port",
            "none",
        ],
        stderr=write,
    )
    os.close(write)
    try:
        with os.fdopen(read) as stderr:
            url = ""
            for line in stderr:
                if line.startswith("loading; "):
                    url = line.removeprefix("loading; ").partition("/ready")[0]
                if line.startswith("curl"):
                    break
        for _ in range(3):
            assert httpx2.get(url + "/nowhere", timeout=SOON).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(SOON)
