"""Requests drawn from the server's OpenAPI document against the real engine: none makes a worker die.

Each goes to two servers: one whose engine is in this process, and one with two worker processes. A neighbour
of each repeats one request all the time, and must always get the same answer.
"""

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import requests
from hypothesis import given, settings
from schemathesis import Case

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import Deadlines
from orca_jax.request.request import Request
from server.settings.endpoint_options import EndpointOptions
from tests.device.checkpoint.tiny_checkpoint import gpt2_tensors, write_checkpoint
from tests.device.greedy_reference import GreedyReference
from tests.endpoint.harness import TEMPLATE, Server, serving_model
from tests.endpoint.load.test_fuzz import (
    CALL_SECONDS,
    CHECKS,
    GENERATING,
    NEGATIVE,
    POSITIVE,
    Calls,
    asking_for_little,
    generated,
)
from tests.whole.conftest import CONFIG

SOON = 120.0
N_LEAST = 2_000  # cases, half of them against each server
PROMPT = [73, 110, 32, 116, 104, 101]
N_OUTPUT = 24
N_EXTREMES = 3
GREEDY = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
TWO_PROCESSES: dict[str, Any] = {
    "worker_processes": True,
    "pipeline_parallel": 2,
    "deadlines": Deadlines(ready_seconds=SOON),
}
OPTIONS = EndpointOptions(
    port=0, grpc_port=None, access_log="off", max_choices=16, max_body_bytes=1 << 20, pages=False
)

# What moves logits as far as a request may, and farther; each is one value of its field.
EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 5e-324, 1e-45, 1e-38, 1e-6, 100),
    "top_p": (5e-324, 1e-45, 1e-6, 1),
    "top_k": (-1, 0, 1, 1 << 30),
    "min_p": (0, 5e-324, 1),
    "repetition_penalty": (5e-324, 1e-45, 1e-38, 0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logit_bias": tuple({str(i): bias for i in ids} for bias in (-100, 100) for ids in ((5,), range(259))),
    "seed": (-(1 << 63), (1 << 63) - 16),
    "ignore_eos": (True,),
}


# Of one kind: a tiny penalty and a bias together made a logit infinite, and the next no number.
POISON = {
    "repetition_penalty": 1e-38,
    "logit_bias": {str(token): 100 for token in range(256)},
    "temperature": 1,
    "ignore_eos": True,
}


class CallsOfEngines(Calls):
    """Sends each case to all of `servers`. The only allowed status from 500 on is 503 with a reason."""

    def __init__(self, servers: Sequence[Server]) -> None:
        super().__init__(servers[0])
        self._urls = [server.url for server in servers]

    def send(self, case: Case) -> None:
        for url in self._urls:
            response = case.call(base_url=url, timeout=CALL_SECONDS, headers={"Connection": "close"})
            self.answers[case.operation.path, response.status_code] += 1
            if response.status_code == 503:
                assert response.json()["error"]["message"]
            else:
                case.validate_response(response, checks=CHECKS)

    def fuzz_with_extremes(self, path: str, n: int, little: Callable[[Case], Case], seed: int) -> None:
        """Send `n` drawn cases that can run, then each again with parameters at their bounds or beyond.

        Drawing a case takes longer than sending it to both servers.
        """
        rng = random.Random(seed)

        @settings(generated, max_examples=n)
        @given(case=self.operation(path).as_strategy(generation_mode=POSITIVE).map(little))
        def run(case: Case) -> None:
            self.send(case)
            body = case.body
            assert isinstance(body, dict)
            for _ in range(N_EXTREMES):
                case.body = with_extremes(body, rng)
                self.send(case)

        run()


def with_extremes(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = dict(body)
    for name in rng.sample(sorted(EXTREMES), rng.randint(1, 4)):
        body[name] = rng.choice(EXTREMES[name])
    if rng.random() < 0.2:
        body |= POISON
    body["logprobs"] = 5 if "prompt" in body else True
    body["max_tokens"] = rng.randint(1, 4)
    for name in ("max_completion_tokens", "min_tokens", "top_logprobs"):
        body.pop(name, None)
    return body


class Neighbour:
    """A context manager that repeats one request among all others; `wrong` has wrong answers."""

    def __init__(self, llm: LLM, right: list[int]) -> None:
        self.wrong: list[str] = []
        self.n = 0
        self._llm, self._right = llm, right
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="neighbour")

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SOON)

    def _ask(self) -> None:
        while not self._over.wait(0.5) and not self.wrong:
            try:
                expected = plain(self._llm)
            except Exception as error:
                self.wrong.append(repr(error))
                return
            self.n += 1
            if expected != self._right:
                self.wrong.append(f"{expected} instead of {self._right}")


def plain(llm: LLM) -> list[int]:
    with llm.stream(PROMPT, GREEDY) as generation:
        return generation.result(SOON).token_ids


@pytest.fixture(scope="module")
def directory(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers, one for each stage, whose tokens are the bytes."""
    config = CONFIG | {"n_layer": 2}
    target = write_checkpoint(tmp_path_factory.mktemp("two"), config, gpt2_tensors(config))
    shutil.copy(tiny_directory / "tokenizer.json", target)
    return target


@pytest.fixture(scope="module")
def right(directory: Path) -> list[int]:
    """The reference's continuation of PROMPT, in which no choice is close."""
    checkpoint = load_checkpoint(directory, dtype=jnp.float32)
    with LLM(directory, dtype="float32", max_batch_size=4, n_slots=256) as llm:
        tokens = plain(llm)
    request = Request("right", tuple(PROMPT), len(PROMPT) + N_OUTPUT, GREEDY, seed=0)
    request.output_ids.extend(tokens)
    assert GreedyReference(checkpoint.config, checkpoint.parameters).sure(request) == N_OUTPUT
    return tokens


@contextmanager
def engine(directory: Path, **more: Any) -> Iterator[LLM]:
    with LLM(directory, dtype="float32", max_batch_size=4, n_slots=256, max_batch_tokens=64, **more) as llm:
        yield llm


@contextmanager
def served(llm: LLM) -> Iterator[Server]:
    """Serve; on exit, wait until nothing is left in the pool, the gateway or on the loop."""
    with serving_model(
        llm.service,
        llm.config,
        llm.serving,
        tokenizer=llm.tokenizer,
        chat_template=TEMPLATE,
        options=OPTIONS,
    ) as server:
        yield server


@pytest.mark.long
@pytest.mark.timeout(900)
def test_requests_from_its_own_document_crash_no_worker(directory: Path, right: list[int]) -> None:
    with engine(directory) as here, engine(directory, **TWO_PROCESSES) as apart:
        with (
            served(here) as one,
            served(apart) as other,
            Neighbour(here, right) as neighbour,
            Neighbour(apart, right) as other_neighbour,
        ):
            calls = fuzzed([one, other])
        for llm, asked in ((here, neighbour), (apart, other_neighbour)):
            assert asked.wrong == [] and asked.n >= 20
            service = llm.service
            assert service.failure is None and service.trouble is None
            assert service.recovery.losses == 0
            assert len(service.pool) == 0 and service.scheduler.n_rsrv == 0
            assert plain(llm) == right
    assert calls.n >= N_LEAST
    for path in GENERATING:
        # What is drawn is random, and a busy machine has no time for some of it.
        had_time = calls.n_to(path) - calls.answers[path, 503] - calls.answers[path, 429]
        assert calls.answers[path, 200] >= had_time / 10, "too few requests got as far as the engine"


def fuzzed(servers: Sequence[Server]) -> Calls:
    calls = CallsOfEngines(servers)
    document = requests.get(f"{servers[0].url}/openapi.json", timeout=CALL_SECONDS).json()
    for path in GENERATING:
        calls.fuzz(path, POSITIVE, 30)
        calls.fuzz(path, NEGATIVE, 40)
        calls.fuzz_with_extremes(path, 110, asking_for_little(document), seed=5)
    return calls
