"""OpenAI's client for a harness server."""

from openai import AsyncOpenAI, OpenAI

from orca_jax.request.request import Request
from tests.endpoint.harness import Server
from tests.host.engines import SOON


def client_of(server: Server) -> OpenAI:
    """A client as a context manager, without retries."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SOON)


def async_client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SOON)


def by_seed(request: Request, index: int) -> int:
    """An engine's tokens: consecutive letters, starting with one determined by prompt and seed."""
    return ord("a") + (sum(request.prompt_ids) + request.seed + index) % 26


def letters_by_seed(prompt: bytes, seed: int, n: int) -> str:
    """The text of the first `n` tokens."""
    start = (sum(prompt) + seed) % 26
    return ("abcdefghijklmnopqrstuvwxyz" * (n // 26 + 2))[start : start + n]
