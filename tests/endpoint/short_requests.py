"""Short requests among long ones over HTTP, and what the timeline must show with any engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

from orca_jax.scheduling.timeline import Timeline
from tests.host.engines import SOON


@dataclass(frozen=True, slots=True)
class Traffic:
    """`n_long` clients that send requests of `long` tokens in sequence, and `n_short` requests of `short`."""

    n_long: int
    long: int
    n_short: int
    short: int


def check(url: str, model: str, timeline: Timeline, traffic: Traffic) -> None:
    """Send the traffic and check ORCA's promise (section 3.1): a new request waits for at most one iteration.

    With overlap it may wait for one more, because the next iteration has already been issued.
    """
    started = threading.Semaphore(0)
    enough = threading.Event()

    def ask(max_tokens: int) -> str:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=SOON) as client:
            stream = client.completions.create(
                model=model,
                prompt="ab",
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = []
            for chunk in stream:
                chunks.append(chunk)
                started.release()
        assert chunks[-1].choices[0].finish_reason == "length"
        return f"{chunks[0].id}-0"

    def ask_on() -> list[str]:
        names = [ask(traffic.long)]
        while not enough.is_set():
            names.append(ask(traffic.long))
        return names

    with ThreadPoolExecutor(traffic.n_long) as pool:
        clients = [pool.submit(ask_on) for _ in range(traffic.n_long)]
        try:
            for _ in range(2 * traffic.n_long):
                assert started.acquire(timeout=SOON)
            short = [ask(traffic.short) for _ in range(traffic.n_short)]
        finally:
            enough.set()
        names_of_long = {name for client in clients for name in client.result(SOON)}
    records = {record.request_id: record for record in timeline.requests}
    returned = [(one, one.returned) for one in timeline.iterations if one.returned is not None]
    n_overtaken = 0
    for name in short:
        record = records[name]
        first_token = record.token_times[0]
        assert record.finished is not None
        done_meanwhile = [one for one, at in returned if record.arrived < at <= first_token]
        assert 1 <= len(done_meanwhile) <= 3, "the one that ran when it came, one behind it, and its own"
        its_own = done_meanwhile[-1].request_ids
        assert name in its_own
        for other in (records[other] for other in names_of_long):
            assert other.finished is not None
            if other.token_times[0] < record.arrived and record.finished < other.finished:
                n_overtaken += 1
                assert other.request_id in its_own, "it ran with the long ones, in one batch"
    assert n_overtaken >= traffic.n_short, "hardly a short one came back before a long one"
