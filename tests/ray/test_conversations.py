"""Conversations over three replicas: each turn finds the turns before it in the cache of one engine."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest

from bench.ray.conversations import cached_by_turn
from tests.ray.conftest import Serve, Served

N_TURNS = 8
BLOCK = 16  # tokens
# At the end of a prompt the tokenizer may join what was the end with what follows.
_JOINED = 4


@pytest.fixture(scope="module")
def served(run_app: Serve) -> Served:
    return run_app(num_replicas=3)


def converse(client: openai.OpenAI, name: str) -> list[tuple[int, int]]:
    texts = (
        f"{name} said, in the year {turn} of the king, that the children of the city should go out"
        for turn in range(N_TURNS)
    )
    return cached_by_turn(client, texts)


@pytest.mark.long
def test_each_turn_finds_the_engine_of_the_turn_before(served: Served) -> None:
    names = ["Abraham", "Deborah", "Solomon", "Jeremiah", "Naomi", "Zechariah"]
    with served.client() as client, ThreadPoolExecutor(3) as threads:
        conversations = list(threads.map(lambda name: converse(client, name), names))
    for turns in conversations:
        assert turns[0][1] == 0
        for (before, _), (_, cached) in pairwise(turns):
            assert cached >= (before - _JOINED) // BLOCK * BLOCK, conversations
