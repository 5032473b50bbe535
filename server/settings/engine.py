"""From settings to the EngineConfig that `LLM`, `compile_engine` and workers take."""

from dataclasses import asdict
from typing import Any

from orca_jax.config import Deadlines, EngineConfig, RestartBound
from server.settings.config import EngineOptions, PipelineOptions
from server.settings.settings import ServeSettings


def engine_config(settings: ServeSettings) -> EngineConfig:
    """What `orca serve` starts. Raises ConfigError for what makes no sense."""
    return EngineConfig.of(
        model=settings.model,
        control_secret=settings.control_secret,
        **asdict(settings.engine),
        **asdict(settings.compiling),
        **_pipeline(settings.pipeline),
    )


def config_to_compile(model: str | None, engine: EngineOptions, pipeline: PipelineOptions) -> EngineConfig:
    """What `orca compile` compiles: the same, of settings that are no secret. Raises ConfigError."""
    return EngineConfig.of(model=model, worker_processes=pipeline.worker_processes, **asdict(engine))


def _pipeline(options: PipelineOptions) -> dict[str, Any]:
    return {
        "workers": None if options.workers is None else [a.strip() for a in options.workers.split(",")],
        "worker_processes": options.worker_processes,
        "deadlines": Deadlines(
            iteration_seconds=options.iteration_timeout,
            worker_seconds=options.worker_timeout,
            ready_seconds=options.ready_timeout,
        ),
        "restarts": RestartBound(restarts=options.max_restarts, seconds=options.restart_window),
    }
