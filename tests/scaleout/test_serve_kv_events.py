"""`orca serve --kv-events` on the demo model, as a router sees it."""

import time
import uuid
from pathlib import Path

import httpx2
import pytest

from bench.server.server_process import ServerProcess
from tests.scaleout.vllm_subscriber import AllBlocksCleared, Index, Subscriber

SOON = 240.0  # seconds that nothing here takes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_router_knows_the_blocks_of_a_served_prompt(tmp_path: Path) -> None:
    name = uuid.uuid4().hex[:8]
    events, replay = f"ipc://{tmp_path}/{name}.e", f"ipc://{tmp_path}/{name}.r"
    flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-topic", "kv@pod@demo")
    flags += (
        "--prefix-hash-seed",
        "7",
        "--metric-names",
        "vllm",
        "--latency-budget",
        "1",
        "--n-slots",
        "1024",
    )
    with ServerProcess((*flags, "--access-log", "off", "--no-compile-ahead")) as server:
        server.wait_until_ready(SOON)
        with Subscriber(events, replay, topic="kv@pod@demo") as subscriber:
            (first,) = subscriber.missed(0)
            assert (first.number, first.events) == (0, [AllBlocksCleared()])
            prompt = list(range(3, 43))  # two whole blocks of 16, and 8 tokens
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=SOON)
            assert answer.status_code == 200, answer.text
            salted = httpx2.post(
                f"{server.url}/v1/completions",
                json=body | {"prompt": prompt[::-1], "cache_salt": "mine"},
                timeout=SOON,
            )
            assert salted.status_code == 200, salted.text
            index = Index()
            end = time.monotonic() + SOON
            while len(index.blocks) < 2:
                assert time.monotonic() < end
                for each in subscriber.missed(1):
                    index.apply(each)
            tokens = [block for _, block in index.blocks.values()]
            assert tokens == [tuple(prompt[:16]), tuple(prompt[16:32])], "and nothing of the salted prompt"
            first_hash, second_hash = index.blocks
            assert index.blocks[first_hash][0] is None and index.blocks[second_hash][0] == first_hash
        page = httpx2.get(f"{server.url}/metrics", timeout=SOON).text
        assert 'vllm:cache_config_info{block_size="16"' in page and 'num_gpu_blocks="64"' in page
        assert "vllm:prefix_cache_queries_total{" in page and "orca_kv_events_dropped_total 0.0" in page
        (line,) = [
            one for one in page.splitlines() if one.startswith("orca_predicted_capacity_tokens_per_second{")
        ]
        assert float(line.split()[-1]) > 0
