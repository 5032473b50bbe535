"""The arguments of the application: the keys of `orca serve --config`, and how many engines there are."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from orca_jax.errors import ConfigError
from server.errors import UsageError
from server.settings.flags import SERVE_OPTIONS
from server.settings.option import Option, options_of
from server.settings.serve_settings import ServeSettings, serve_settings
from server.settings.settings_file import did_you_mean

Router = Literal["prefix", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """How many engines the application has, and how requests come to them. Raises ConfigError."""

    num_replicas: Annotated[int, "number of engines"] = 1
    min_replicas: Annotated[int | None, "fewest engines; with max_replicas: scale with the load"] = None
    max_replicas: Annotated[int | None, "most engines"] = None
    target_load: Annotated[float, "the load of each engine that scaling aims at: a fraction of its slots"] = (
        0.7
    )
    router: Annotated[Router, "prefix: send a prompt where its beginning is cached; ray: Ray's own"] = (
        "prefix"
    )
    doors: Annotated[int, "number of processes that take HTTP requests"] = 1
    cpus_per_replica: Annotated[float, "processor cores that Ray reserves for an engine"] = 1.0

    def __post_init__(self) -> None:
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
        if not self.cpus_per_replica >= 0:
            raise ConfigError(f"cpus_per_replica is {self.cpus_per_replica:g}; it must not be negative")

    @property
    def scales(self) -> bool:
        return self.max_replicas is not None


_REPLICAS = {option.name: option for option in options_of(ReplicaOptions)}
# Ray's proxy listens for HTTP; settings of a listener of our own would have no effect.
_LISTENER = frozenset(
    ("host", "port", "grpc_port", "ssl_certfile", "ssl_keyfile", "max_connections", "header_timeout")
    + ("max_connections_per_address", "max_header_bytes", "keep_alive_timeout", "max_watch_streams")
)
_OPTIONS: dict[str, Option] = {
    **{option.name: option for option in SERVE_OPTIONS if option.name not in _LISTENER},
    **_REPLICAS,
}


def ray_settings(args: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[ServeSettings, ReplicaOptions]:
    """The settings in `args`, as `serve run` and a config file give them: texts or values.

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
    replicas = ReplicaOptions(**{name: values.pop(name) for name in _REPLICAS if name in values})
    settings = serve_settings(argparse.Namespace(**values), environ)
    if (
        settings.model is not None and Path(settings.model).is_dir()
    ):  # a replica has another working directory
        settings = replace(settings, model=str(Path(settings.model).resolve()))
    return settings, replicas


def _value(option: Option, value: Any) -> Any:
    if value is None and option.optional:
        return None
    if not isinstance(value, str | int | float | Path):
        raise UsageError(f"{option.name} is {type(value).__name__}; it must be {option.allowed}")
    try:
        return option.parse(str(value))
    except ValueError as error:
        raise UsageError(f"{option.name}: {error}") from error
