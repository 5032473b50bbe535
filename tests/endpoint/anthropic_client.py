"""Anthropic's client for a harness server."""

from anthropic import Anthropic

from tests.endpoint.harness import Server
from tests.host.engines import SOON


def anthropic_of(server: Server, key: str = "none") -> Anthropic:
    """A client as a context manager, without retries."""
    return Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=SOON)
