"""OpenAI's own client in front of a server of the harness."""

from openai import AsyncOpenAI, OpenAI

from orca_jax.request.request import Request
from tests.endpoint.harness import Server
from tests.host.engines import SOON


def client_of(server: Server) -> OpenAI:
    """To be left by `with`; it never tries twice."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SOON)


def async_client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SOON)


def by_seed(request: Request, index: int) -> int:
    """An engine's tokens: letters from one on that prompt and seed choose."""
    return ord("a") + (sum(request.prompt_ids) + request.seed + index) % 26


def letters_by_seed(prompt: bytes, seed: int, n: int) -> str:
    """The text of the first `n` of them."""
    start = (sum(prompt) + seed) % 26
    return ("abcdefghijklmnopqrstuvwxyz" * (n // 26 + 2))[start : start + n]
