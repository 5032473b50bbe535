"""The interface to an engine's weights and caches, which can be replaced or given back between iterations."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from orca_jax.config import Layout


class EngineMemory(Protocol):
    """An engine's weights and caches, which can be replaced or given back while no iteration is in flight.

    Only `prepare` and `read_ahead` may be called on any thread; the other methods, and the functions that
    these return, run between iterations. If one of them raises an OrcaError other than EngineError, nothing
    has changed.
    """

    def prepare(
        self, weights: object, *, cast: bool, lora_scale: float, layout: Layout | None = None
    ) -> Callable[[], None]:
        """Check new weights and return what installs them; see `LLM.update_weights`.

        Raises ConfigError or a CheckpointError.
        """
        ...

    def read_ahead(self, directory: Path) -> Callable[[], None]:
        """Read a checkpoint of the same model into host memory; return what installs it.

        Raises ConfigError or a CheckpointError.
        """
        ...

    def release(self, level: int) -> None:
        """Give back the caches (level 1), and the weights too (level 2)."""
        ...

    def restore(self) -> None:
        """Bring the weights back, unless new ones were installed, and make empty caches."""
        ...
