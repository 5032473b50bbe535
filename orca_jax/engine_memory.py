"""What an engine offers besides iterations: its weights and caches, which can be replaced or given back."""

from collections.abc import Callable
from typing import Protocol

from orca_jax.config import Layout


class EngineMemory(Protocol):
    """An engine's weights and caches, which can be replaced or given back while no iteration is in flight.

    Only `prepare` may be called on any thread; the others, and what it returns, run between iterations. An
    error of theirs that is an OrcaError but no EngineError leaves everything as it was.
    """

    def prepare(
        self, weights: object, *, cast: bool, lora_scale: float, layout: Layout | None = None
    ) -> Callable[[], None]:
        """Check new weights and return what installs them; see `LLM.update_weights`.

        Raises ConfigError or a CheckpointError.
        """
        ...

    def release(self, level: int) -> None:
        """Give back the caches (level 1), and the weights too (level 2)."""
        ...

    def restore(self) -> None:
        """Bring the weights back, unless new ones were installed, and make empty caches."""
        ...
