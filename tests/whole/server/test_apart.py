"""Prefill and decode apart over HTTP: engines behind the proxy, and processes of which either is killed."""

import itertools
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests

from bench.server.server_process import ServerProcess
from orca_jax import LLM
from server.apart.proxy import Proxy, ProxyOptions
from tests.device.model.golden import load_golden
from tests.endpoint.commands.test_route import running
from tests.endpoint.harness import serving_model, until

GOLDEN = load_golden("llama-grouped")
ROWS = [row for row, prompt in enumerate(GOLDEN.prompts) if 40 < len(prompt) < 80]
N_OUTPUT = 8


def checked(url: str, row: int, seconds: float = 30.0, **more: Any) -> int:
    """Complete a prompt, check its tokens, and return how many of the prompt were cached."""
    body = {"prompt": list(GOLDEN.prompts[row]), "max_tokens": N_OUTPUT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=seconds)
    assert answer.status_code == 200, answer.text
    found, sure = answer.json(), GOLDEN.sure(row)[:N_OUTPUT]
    assert tuple(found["choices"][0]["token_ids"][: len(sure)]) == sure
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """The addresses of a server of each role."""
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 64, "n_slots": 192, "block_size": 4}
    sizes |= {"kv_lease_seconds": 120.0, "kv_transfer_seconds": 60.0}  # for a busy machine
    with ExitStack() as stack:
        urls: list[str] = []
        for role in ("prefill", "decode"):
            llm = stack.enter_context(LLM(GOLDEN.directory, role=role, kv_host_bytes=1 << 20, **sizes))
            server = serving_model(llm.service, llm.config, llm.serving)
            urls.append(stack.enter_context(server).url)
        yield urls[0], urls[1]


def test_the_proxy_drives_both_servers(servers: tuple[str, str]) -> None:
    prefill, decode = servers
    with running(Proxy(ProxyOptions(prefill=[prefill], decode=[decode])).app()) as proxy:
        url = proxy
        for row in ROWS[:2]:
            assert checked(url, row, cache_salt="a") == len(GOLDEN.prompts[row]) // 4 * 4
        body = {"prompt": list(GOLDEN.prompts[ROWS[2]]), "max_tokens": 4, "stream": True}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=30)
        assert answer.text.endswith("data: [DONE]\n\n")
        wrong = requests.post(f"{url}/v1/completions", json={"prompt": 7}, timeout=30)
        assert wrong.status_code == 400
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with running(Proxy(ProxyOptions(prefill=[gone], decode=[decode])).app()) as proxy:
        assert checked(proxy, ROWS[0], cache_salt="b") == 0


def test_params_are_in_the_answer_of_the_first_step_alone(servers: tuple[str, str]) -> None:
    prefill, decode = servers
    body = {"prompt": list(GOLDEN.prompts[ROWS[0]]), "max_tokens": 1}
    wish = {"kv_transfer_params": {"do_remote_decode": True}}
    params = requests.post(f"{prefill}/v1/completions", json=body | wish, timeout=30).json()[
        "kv_transfer_params"
    ]
    n_blocks = len(GOLDEN.prompts[ROWS[0]]) // 4
    assert params["remote_block_ids"] == [*range(n_blocks)] and params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False and params["remote_host"] == "127.0.0.1"
    for url, asked in (
        (prefill, body),
        (decode, body | wish),
        (decode, body | {"kv_transfer_params": params}),
    ):
        answer = requests.post(f"{url}/v1/completions", json=asked, timeout=30)
        assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()
    wish = {"kv_transfer_params": {"remote_port": "7"}}
    answer = requests.post(f"{decode}/v1/completions", json=body | wish, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params.remote_port"


def test_each_of_several_outputs_samples_its_own_first_token(servers: tuple[str, str]) -> None:
    prefill, decode = servers
    body: dict[str, Any] = {
        "prompt": list(GOLDEN.prompts[ROWS[3]]),
        "temperature": 2,
        "seed": 3,
        "max_tokens": 4,
    }
    body |= {"ignore_eos": True, "return_token_ids": True}

    def outputs(**more: Any) -> list[list[int]]:
        answer = requests.post(f"{decode}/v1/completions", json=body | {"n": 2} | more, timeout=30)
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    first = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = requests.post(f"{prefill}/v1/completions", json=first, timeout=30).json()["kv_transfer_params"]
    expected = outputs(cache_salt="another")
    assert params["first_token_id"] == expected[0][0] != expected[1][0]
    assert outputs(kv_transfer_params=params) == expected


N_PARTS, N_KILLS = 5, 8  # 40 kills, in parts that long runs share
_GONE = ("no server that generates", "the model is still loading")  # of the proxy, and of a server


@pytest.mark.long
@pytest.mark.parametrize("part", range(N_PARTS))
def test_either_process_may_be_killed(part: int) -> None:
    """Clients send again what a killed server of the role decode was generating; all else is answered.

    Afterwards the servers that live transfer prompts, and hold no lease and no place for a transfer.
    """
    flags = [str(GOLDEN.directory), "--kv-host-bytes", "1000000", "--max-batch-size", "4", "--n-slots", "512"]
    flags += ["--max-batch-tokens", "64", "--kv-transfer-seconds", "1", "--kv-lease-seconds", "5"]
    rng = random.Random(part)
    done, failures, counts = threading.Event(), list[BaseException](), {"answered": 0, "sent again": 0}
    ports = [_free_port(), _free_port()]

    def start(role: str) -> ServerProcess:
        port = ports[role == "decode"]
        return ServerProcess([*flags, "--role", role, "--port", str(port), "--grpc-port", "none"])

    servers = {role: start(role) for role in ("prefill", "decode")}
    for one in servers.values():
        one.wait_until_ready()

    def client(url: str, number: int) -> None:
        try:
            for i in itertools.count():
                if done.is_set():
                    return
                while True:
                    try:
                        checked(url, ROWS[i % len(ROWS)], cache_salt=f"{number} {i}")
                    except (requests.RequestException, AssertionError) as error:
                        if isinstance(error, AssertionError) and not any(why in str(error) for why in _GONE):
                            raise
                        counts["sent again"] += 1
                        time.sleep(0.2)  # while the server of the role decode starts
                        continue
                    break
                counts["answered"] += 1
        except BaseException as error:
            failures.append(error)

    options = ProxyOptions(prefill=[f"http://127.0.0.1:{ports[0]}"], decode=[f"http://127.0.0.1:{ports[1]}"])
    try:
        with running(Proxy(options).app()) as proxy:
            clients = [threading.Thread(target=client, args=(proxy, i)) for i in range(4)]
            for thread in clients:
                thread.start()
            for i in range(N_KILLS):
                before = counts["answered"]
                while counts["answered"] < before + rng.randint(4, 12) and not failures:
                    time.sleep(rng.random() / 20)
                role = ("prefill", "decode")[(part + i) % 2]
                servers[role].signal(signal.SIGKILL)
                servers[role].kill()
                servers[role] = start(role)
                servers[role].wait_until_ready()
            done.set()
            for thread in clients:
                thread.join(60)
            assert not failures and counts["answered"] > 4 * N_KILLS
            salts = itertools.count()
            until(lambda: checked(proxy, ROWS[0], cache_salt=f"last {next(salts)}") > 0, "a transfer", 60)
            for url in (*options.prefill, *options.decode):
                until(lambda url=url: not _held(url), "the end of leases and transfers", 60)
    finally:
        done.set()
        for one in servers.values():
            one.kill()


def _held(url: str) -> float:
    """The bytes of leases, and the requests whose prompts are on their way."""
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    names = ("orca_kv_lease_bytes", "orca_kv_transfers_under_way")
    found = [float(line.split()[-1]) for line in lines if line.startswith(names)]
    assert len(found) == len(names)
    return sum(found)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
