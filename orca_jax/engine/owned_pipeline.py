"""A pipeline whose worker processes begin and end with it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from orca_jax.config import EngineConfig
from orca_jax.engine.built_engine import BuiltEngine
from orca_jax.engine.remote_pipeline import StageWorkers, remote_pipeline
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.stage_layers import check_split


class OwnedWorkers(Protocol):
    """Worker processes, one for each stage, and what restarts them. `same_machine`: they run here."""

    same_machine: bool
    workers: StageWorkers

    def close(self) -> None:
        """End all processes within a few seconds."""
        ...


class StartWorkers(Protocol):
    """Starts the worker processes of an engine. Raises ConfigError or EngineError."""

    def __call__(self, config: EngineConfig, *, on_event: Callable[[str], None]) -> OwnedWorkers:
        """See the class; `on_event` receives a line for each event of a process."""
        ...


def owned_pipeline(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    start: StartWorkers,
    *,
    on_event: Callable[[str], None],
) -> tuple[BuiltEngine, OwnedWorkers]:
    """Start the worker processes and bring up their pipeline; the engine's `close` ends them.

    Raises as `start` and `remote_pipeline` do, after ending all processes.
    """
    check_split(model, config)
    owned = start(config, on_event=on_event)
    try:
        built = remote_pipeline(name, model, config, owned.workers, on_event=on_event)
    except BaseException:
        owned.close()
        raise

    def close() -> None:
        built.close()
        owned.close()

    return replace(built, close=close), owned
