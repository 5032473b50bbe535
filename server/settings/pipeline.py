"""From the settings of a pipeline to the arguments of `orca_jax.LLM`."""

from typing import Any

from orca_jax.config import Deadlines, RestartBound
from server.settings.config import PipelineOptions


def pipeline_options(options: PipelineOptions, secret: str) -> dict[str, Any]:
    """Keyword arguments for `orca_jax.LLM`. Raises ConfigError for times that make no sense."""
    return {
        "workers": None if options.workers is None else [a.strip() for a in options.workers.split(",")],
        "worker_processes": options.worker_processes,
        "control_secret": secret,
        "deadlines": Deadlines(
            iteration_seconds=options.iteration_timeout,
            worker_seconds=options.worker_timeout,
            ready_seconds=options.ready_timeout,
        ),
        "restarts": RestartBound(restarts=options.max_restarts, seconds=options.restart_window),
    }
