"""The shared LLM for one command."""

from typing import Any

from orca_jax import LLM


class Lent:
    """Lends the shared LLM to one command, which would close an LLM of its own."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __enter__(self) -> "Lent":
        return self

    def __exit__(self, *_: object) -> None:
        pass
