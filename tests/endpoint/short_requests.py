"""Short requests among long ones, over HTTP: what the timeline must say of them, whatever the engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

from orca_jax.timeline import Timeline
from tests.host.engines import SOON


@dataclass(frozen=True, slots=True)
class Traffic:
    """`n_long` requests of `long` tokens at once, and `n_short` of `short` one after another."""

    n_long: int
    long: int
    n_short: int
    short: int


def check(url: str, model: str, timeline: Timeline, traffic: Traffic) -> None:
    """Send them, and hold the timeline to ORCA's promise (3.1): a new request waits for one iteration."""
    started = threading.Semaphore(0)

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
        return chunks[0].id

    with ThreadPoolExecutor(traffic.n_long) as pool:
        long = [pool.submit(ask, traffic.long) for _ in range(traffic.n_long)]
        for _ in range(2 * traffic.n_long):
            assert started.acquire(timeout=SOON)
        short = [ask(traffic.short) for _ in range(traffic.n_short)]
        assert not any(future.done() for future in long), "the short ones came back before the long ones"
        ids_of_long = [future.result(SOON) for future in long]
    records = {record.request_id: record for record in timeline.requests}
    returned = [(one, one.returned) for one in timeline.iterations if one.returned is not None]
    for name in short:
        record = records[f"{name}-0"]
        first_token = record.token_times[0]
        done_meanwhile = [one for one, at in returned if record.arrived < at <= first_token]
        assert 1 <= len(done_meanwhile) <= 2, "the one that ran when it came, and its own"
        assert record.request_id in done_meanwhile[-1].request_ids
        assert done_meanwhile[-1].n_rows > traffic.n_long, "it ran with the long ones, in one batch"
        for other in ids_of_long:
            finished = records[f"{other}-0"].finished
            assert finished is not None and record.finished is not None and record.finished < finished
