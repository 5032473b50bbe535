"""The settings of `orca serve` and `orca compile`. A flag overrides a variable, which overrides the file."""

import argparse
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from orca_jax.config import Deadlines, EngineConfig, RestartBound
from orca_jax.errors import ConfigError
from orca_jax.suggestions import did_you_mean
from server.errors import UsageError
from server.settings import api_keys, control_secret
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from server.settings.flags import SERVE_OPTIONS
from server.settings.model_name import model_name
from server.settings.options import CompileOptions, EngineOptions, PipelineOptions
from server.settings.router_options import RouterOptions
from server.settings.settings_file import read_settings

T = TypeVar("T")

_PREFIX = "ORCA_"
_OPTIONS = {option.name: option for option in SERVE_OPTIONS}
_CONFIG = _PREFIX + "CONFIG"

# Kubernetes sets these in every pod for a Service whose name begins with "orca".
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
_SERVICE_VARIABLE = re.compile(
    r"ORCA_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """All settings of a server. `notes` are warnings to print."""

    model: str | None
    engine: EngineOptions
    endpoint: EndpointOptions
    pipeline: PipelineOptions
    compiling: CompileOptions
    routing: RouterOptions
    api_keys: ApiKeys
    admin_keys: ApiKeys
    control_secret: str = field(default="", repr=False)
    notes: tuple[str, ...] = ()

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.endpoint.served_model_name or model_name(self.model)

    def engine_config(self) -> EngineConfig:
        """The server's engine. Raises ConfigError."""
        pipeline = self.pipeline
        return EngineConfig.of(
            model=self.model,
            control_secret=self.control_secret,
            workers=None if pipeline.workers is None else [w.strip() for w in pipeline.workers.split(",")],
            worker_processes=pipeline.worker_processes,
            deadlines=Deadlines(
                iteration_seconds=pipeline.iteration_timeout,
                worker_seconds=pipeline.worker_timeout,
                ready_seconds=pipeline.ready_timeout,
            ),
            restarts=RestartBound(restarts=pipeline.max_restarts, seconds=pipeline.restart_window),
            **asdict(self.engine),
            **asdict(self.compiling),
        )


def serve_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> ServeSettings:
    """The settings from the flags of `add_serve_flags`, `environ` and the file.

    Raises UsageError or ConfigError, in one line that names the source of the mistake.
    """
    values = _values(args, environ)
    endpoint = _only(EndpointOptions, values)
    pipeline = _only(PipelineOptions, values)
    engine = _only(EngineOptions, values)
    keys = ApiKeys.read(endpoint.api_key_file, environ)
    if keys.weights and engine.scheduling_policy != "fair":
        message = f"an API key has a weight, which the scheduling policy {engine.scheduling_policy!r} ignores"
        raise ConfigError(f"{message}; set scheduling_policy to 'fair', or leave the weights out")
    routing = _only(RouterOptions, values)
    if keys.required and routing.kv_events is not None:
        message = "kv_events tells of blocks that all clients share, and each API key has blocks of its own"
        raise ConfigError(f"{message}; let the router check the keys, or leave kv_events out")
    admin_keys = ApiKeys.read(endpoint.admin_key_file, environ, api_keys.ADMIN_VARIABLE)
    return ServeSettings(
        model=values.get("model"),
        engine=engine,
        endpoint=endpoint,
        pipeline=pipeline,
        compiling=_only(CompileOptions, values),
        routing=routing,
        api_keys=keys,
        admin_keys=admin_keys,
        control_secret=control_secret.read_secret(pipeline.control_secret_file, environ),
        notes=(*_unknown_variables(environ), *keys.notes, *admin_keys.notes),
    )


def compile_config(args: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """The engine whose programs `orca compile` compiles, from the same sources. Reads no file of secrets.

    Raises as `serve_settings` does.
    """
    values = _values(args, environ)
    return EngineConfig.of(
        model=values.get("model"),
        worker_processes=_only(PipelineOptions, values).worker_processes,
        **asdict(_only(EngineOptions, values)),
    )


def _values(args: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, Any]:
    flags = {name: getattr(args, name) for name in _OPTIONS if hasattr(args, name)}
    variables = _read_variables(environ, flags)
    path = getattr(args, "config", environ.get(_CONFIG) or None)
    file = {} if path is None else read_settings(Path(path), _OPTIONS)
    values = ChainMap(flags, variables, file)
    if values.get("model") == "":
        raise UsageError("the model's name is empty; leave it out for the demo model")
    return values


def _only(config: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass `config` with its fields among `values`."""
    names = [option.name for option in fields(config)]  # pyright: ignore[reportArgumentType]
    return config(**{name: values[name] for name in names if name in values})


def _read_variables(environ: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `ORCA_*` variables; an empty variable counts as not set."""
    values = dict[str, Any]()
    for name, option in _OPTIONS.items():
        variable = _PREFIX + name.upper()
        text = environ.get(variable)
        if not text:
            continue
        if variable.endswith("_PORT") and _SERVICE_ADDRESS.match(text):
            if name in flags:
                continue
            service = variable.removesuffix("_PORT").lower().replace("_", "-")
            raise UsageError(
                f"{variable} is {text!r}, as Kubernetes sets it in pods for a Service called {service!r}; "
                f"set {variable} or {option.flag} to a number, rename the Service, or set the pod's "
                "enableServiceLinks to false"
            )
        try:
            values[name] = option.parse(text)
        except ValueError as error:
            raise UsageError(f"{variable}: {error}") from error
    return values


def _unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """A warning for each unknown `ORCA_*` variable, without its value, which may be a secret."""
    known = {_PREFIX + name.upper() for name in _OPTIONS}
    known |= {_CONFIG, api_keys.VARIABLE, api_keys.ADMIN_VARIABLE, control_secret.VARIABLE}
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or variable in known or _SERVICE_VARIABLE.fullmatch(variable):
            continue
        if variable.endswith("_PORT") and _SERVICE_ADDRESS.match(environ[variable]):
            continue
        suggestion = did_you_mean(variable, known, prefix=_PREFIX)
        yield f"the variable {variable!r} is not a setting and has no effect{suggestion}"
