"""The arguments of the application: the keys of `orca serve --config`, and those of its replicas."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from orca_jax.errors import ConfigError, did_you_mean
from orca_jax.options import Option, Options, build, options_of
from server.errors import UsageError
from server.settings.flags import SERVE_OPTIONS
from server.settings.serve_settings import ServeSettings, serve_settings

Router = Literal["prefix", "ray"]
_SHORTEST_WINDOW, _LONGEST = 10.0, 86_400.0
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Options):
    """The number of engines, their resources, and the routing of requests to them. Raises ConfigError."""

    num_replicas: Annotated[int, "number of engines"] = 1
    min_replicas: Annotated[int | None, "fewest engines; with max_replicas: scale with the load"] = None
    max_replicas: Annotated[int | None, "most engines"] = None
    target_load: Annotated[float, "the load of each engine that scaling aims at: a fraction of its slots"] = (
        0.7
    )
    upscale_delay: Annotated[float, "seconds that the load must ask for more engines"] = 10.0
    downscale_delay: Annotated[float, "seconds that the load must ask for fewer engines"] = 300.0
    load_window: Annotated[float, "seconds over which the load is averaged"] = 30.0
    router: Annotated[Router, "prefix: send a prompt where its beginning is cached; ray: Ray's own"] = (
        "prefix"
    )
    doors: Annotated[int, "number of processes that take HTTP requests"] = 1
    cpus_per_replica: Annotated[float, "processor cores that Ray reserves for an engine"] = 1.0
    gpus_per_replica: Annotated[
        float | None, "GPUs of an engine; by default one for each device, if the cluster has any"
    ] = None
    stage_actors: Annotated[bool, "run each stage in an actor, so that stages may be on several nodes"] = (
        False
    )
    stage_strategy: Annotated[Strategy, "how a placement group spreads the actors of stages over nodes"] = (
        "PACK"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_replicas", "doors"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        low, high = self.min_replicas, self.max_replicas
        if (low is None) != (high is None):
            raise ConfigError("give both min_replicas and max_replicas, or neither")
        if low is not None and high is not None and not 1 <= low <= high:
            raise ConfigError(
                f"min_replicas is {low} and max_replicas is {high}; they must be at least 1, in this order"
            )
        if not 0 < self.target_load <= 1:
            raise ConfigError(f"target_load is {self.target_load:g}; it must be above 0 and at most 1")
        for name in ("upscale_delay", "downscale_delay"):
            if not 0 <= getattr(self, name) <= _LONGEST:
                raise ConfigError(
                    f"{name} is {getattr(self, name):g}; it must be from 0 to {_LONGEST:g} seconds"
                )
        if not _SHORTEST_WINDOW < self.load_window <= _LONGEST:
            raise ConfigError(
                f"load_window is {self.load_window:g}; it must be above {_SHORTEST_WINDOW:g} seconds, since "
                f"Ray collects loads that often, and at most {_LONGEST:g}"
            )
        if not self.cpus_per_replica >= 0:
            raise ConfigError(f"cpus_per_replica is {self.cpus_per_replica:g}; it must not be negative")
        if self.gpus_per_replica is not None and not self.gpus_per_replica >= 0:
            raise ConfigError(f"gpus_per_replica is {self.gpus_per_replica:g}; it must not be negative")

    @property
    def scales(self) -> bool:
        return self.max_replicas is not None


_REPLICAS = {option.name: option for option in options_of(ReplicaOptions)}
# Ray's proxy listens for HTTP, so settings of our listener would have no effect.
_LISTENER = frozenset(
    ("host", "port", "grpc_port", "ssl_certfile", "ssl_keyfile", "max_connections", "header_timeout")
    + ("max_connections_per_address", "max_header_bytes", "keep_alive_timeout", "max_watch_streams")
    + ("end_with_stdin", "endpoint_processes")
)
_OPTION_OF_LISTENER = {option.name: option for option in SERVE_OPTIONS if option.name in _LISTENER}
_OPTIONS: dict[str, Option] = {
    **{option.name: option for option in SERVE_OPTIONS if option.name not in (*_LISTENER, "replicas")},
    **_REPLICAS,
}


def ray_settings(args: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[ServeSettings, ReplicaOptions]:
    """Read the settings from `args`, whose values may be texts, as `serve run` passes them.

    Raises UsageError or ConfigError.
    """
    values = dict[str, Any]()
    for key, value in args.items():
        name = key.replace("-", "_")
        if name in _LISTENER:
            message = f"{name} has no effect under Ray Serve, whose proxy takes the requests"
            raise UsageError(f"{message}; set http_options there, and leave {name} out")
        option = _OPTIONS.get(name)
        if option is None:
            raise UsageError(f"{key!r} is not a setting{did_you_mean(name, _OPTIONS)}")
        values[name] = _value(option, value)
    replicas = build(ReplicaOptions, values)
    settings = serve_settings(argparse.Namespace(**values), environ)
    if settings.routing.replicas is not None:
        raise ConfigError("replicas is a setting of `orca serve`; give num_replicas to this application")
    return for_replicas(settings, replicas), replicas


def for_replicas(
    settings: ServeSettings, replicas: ReplicaOptions, listener: Iterable[str] = ()
) -> ServeSettings:
    """Make paths absolute, because replicas run in other working directories, maybe on other machines.

    Raises ConfigError for settings from any source that several engines cannot share, or that would have no
    effect. The caller applies the settings named in `listener`.
    """
    endpoint, engine = settings.endpoint, settings.engine
    for name in sorted(_LISTENER.difference(listener)):
        value = getattr(endpoint, name)
        if value not in (None, _OPTION_OF_LISTENER[name].default):  # None turns gRPC off, which it is
            raise ConfigError(f"{name} has no effect under Ray Serve, whose proxy listens; leave it out")
    if settings.admin_keys.required:
        raise ConfigError(
            "there are admin keys, but a request to /admin would reach one engine only; leave them out"
        )
    if engine.record is not None:
        raise ConfigError("record is one file, and each engine would write it; leave it out")
    if endpoint.batch_dir is not None:
        raise ConfigError("batch_dir is one folder, and each engine would write to it; leave it out")
    if endpoint.follow is not None:
        raise ConfigError(
            "follow would give the engines new weights at different times; leave it out, and start new "
            "replicas with a new checkpoint"
        )
    if settings.routing.kv_events is not None:
        raise ConfigError(
            "kv_events is one address, and each engine would bind it; under Ray Serve the router needs no "
            "events, so leave it out"
        )
    several = replicas.num_replicas > 1 or replicas.scales
    if settings.engine.workers is not None and several:
        raise ConfigError("workers are those of one engine; leave workers out, or have one replica")
    if replicas.stage_actors and engine.workers is not None:
        raise ConfigError(
            "stage_actors starts the workers, and workers has addresses of others; leave one of both out"
        )
    chat_template = endpoint.chat_template
    return replace(
        settings,
        engine=replace(
            engine,
            worker_processes=engine.worker_processes or replicas.stage_actors,
            model=_absolute(engine.model),
            generation_config=_absolute(engine.generation_config) or "",
            tokenizer=_absolute(engine.tokenizer),
            compile_cache=_absolute(engine.compile_cache),
        ),
        endpoint=replace(
            endpoint,
            chat_template=None if chat_template is None else chat_template.resolve(),
            # Engines do not share their stores, and the next request may reach another engine.
            max_stored_responses=0 if several else endpoint.max_stored_responses,
        ),
    )


def _absolute(name: str | Path | None) -> str | Path | None:
    """Make the path of an existing file or folder absolute; return any other text unchanged."""
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name


def _value(option: Option, value: Any) -> Any:
    if value is None and option.optional:
        return None
    if not isinstance(value, str | int | float | Path):
        raise UsageError(f"{option.name} is {type(value).__name__}; it must be {option.allowed}")
    try:
        return option.parse(str(value))
    except ValueError as error:
        raise UsageError(f"{option.name}: {error}") from error
