"""Engines that die, are added and are removed while OpenAI's client sends requests."""

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai
import pytest

from tests.ray.conftest import SOON, Serve, Served
from tests.ray.processes import descendants
from tests.ray.readings import metrics, n_live, until

ENGINE = "ray::ServeReplica:orca:orca-engine"
WORKER = "orca_jax.launch.worker_process"
RESTART_SECONDS = 180.0
N_TOKENS = 400


@dataclass(frozen=True)
class Outcome:
    """A stream's end: its text if it was complete, else the error and whether it had begun."""

    text: str | None
    error: openai.APIError | None
    began: bool


def stream(served: Served, prompt: str, max_tokens: int = N_TOKENS) -> Outcome:
    text, began, reason = "", False, None
    try:
        with served.client() as client:
            for chunk in client.completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                began = True
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
    except openai.APIError as error:
        return Outcome(None, error, began)
    assert reason == "length"
    return Outcome(text, None, began)


@pytest.mark.timeout(600)
def test_an_engine_that_is_killed_fails_its_own_streams_alone_and_comes_back(run_app: Serve) -> None:
    served = run_app(num_replicas=2)
    expected = stream(served, "a").text
    n = 16
    with ThreadPoolExecutor(n) as pool:
        streams = [pool.submit(stream, served, "a") for _ in range(n)]
        until(lambda: n_live(served) == n)
        live = metrics(served)["orca_live_streams"]
        victim = descendants(ENGINE)[0]
        os.kill(victim, signal.SIGKILL)
        outcomes = [future.result(SOON) for future in streams]
    (survivor,) = served.get("/ready").json()["engines"]
    n_survived = live[survivor]
    assert Counter(outcome.text for outcome in outcomes)[expected] == n_survived, live
    lost = [outcome for outcome in outcomes if outcome.text != expected]
    assert len(lost) == n - n_survived
    for outcome in lost:
        assert outcome.text is None and isinstance(outcome.error, openai.APIError)
        assert outcome.error.code == "engine_failed", outcome.error
        if isinstance(outcome.error, openai.APIStatusError):  # before its first chunk
            assert outcome.error.status_code == 503 and "retry-after" in outcome.error.response.headers
    # New requests are served all the time, by the other engine, until there are two again.
    began = time.monotonic()
    while len(served.get("/ready").json()["engines"]) < 2:
        text = stream(served, "a", 8).text
        assert text and expected is not None and expected.startswith(text)
        assert time.monotonic() - began < RESTART_SECONDS
    assert list(served.get("/ready").json()["engines"].values()) == ["ready", "ready"]
    assert victim not in descendants(ENGINE) and len(descendants(ENGINE)) == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_engines_come_and_go_with_the_load_and_no_request_fails(run_app: Serve) -> None:
    served = run_app(
        min_replicas=1, max_replicas=3, target_load=0.5, upscale_delay=0, downscale_delay=1, load_window=11
    )
    assert len(served.get("/ready").json()["engines"]) == 1
    expected = stream(served, "a").text
    n_clients = 12  # of 8 places in a batch, at a target of a half: three engines' work
    busy, few = threading.Event(), threading.Event()

    def client(index: int) -> list[Outcome]:
        outcomes = list[Outcome]()
        while not busy.is_set() or (index == 0 and not few.is_set()):
            outcomes.append(stream(served, "a"))
        return outcomes

    def n_engines(n: int) -> bool:
        return len(served.get("/ready").json()["engines"]) == n

    with ThreadPoolExecutor(n_clients) as pool:
        clients = [pool.submit(client, i) for i in range(n_clients)]
        try:
            until(lambda: n_engines(3), RESTART_SECONDS)
            busy.set()
            until(lambda: n_engines(1), RESTART_SECONDS)
        finally:
            busy.set()
            few.set()
        outcomes = [outcome for future in clients for outcome in future.result(SOON)]
    assert len(outcomes) > n_clients
    assert Counter(outcome.error for outcome in outcomes) == {None: len(outcomes)}
    assert {outcome.text for outcome in outcomes} == {expected}


@pytest.mark.timeout(600)
def test_an_engine_that_has_failed_for_good_is_replaced(run_app: Serve) -> None:
    served = run_app(num_replicas=1, worker_processes=True, max_restarts=0)
    (first,) = served.get("/ready").json()["engines"]
    os.kill(descendants(WORKER)[0], signal.SIGKILL)

    def is_replaced() -> bool:
        engines = served.get("/ready").json()["engines"]
        return first not in engines and list(engines.values()) == ["ready"]

    until(is_replaced, RESTART_SECONDS)
    assert stream(served, "a", 8).text
    assert len(descendants(WORKER)) == 1
