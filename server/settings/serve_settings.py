"""The settings of `orca serve` and `orca compile`. A flag overrides a variable, which overrides the file."""

import argparse
import os.path
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, did_you_mean
from orca_jax.options import Option, build
from orca_jax.small_files import read_text
from server.errors import UsageError
from server.settings import api_keys
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions, RouterOptions
from server.settings.flags import COMPILE_OPTIONS, SERVE_OPTIONS
from server.settings.foreign_flags import about

_OPTIONS = {option.name: option for option in SERVE_OPTIONS}
_CONFIG = "ORCA_CONFIG"
_DEMO = "demo"
_SNAPSHOTS, _CACHED = "snapshots", "models--"  # of the hub's cache: models--org--name/snapshots/COMMIT

# Kubernetes sets these in every pod for a Service whose name begins with "orca".
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
_SERVICE_VARIABLE = re.compile(
    r"ORCA_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """All settings of a server. `notes` are warnings to print."""

    engine: EngineConfig
    endpoint: EndpointOptions
    routing: RouterOptions
    api_keys: ApiKeys
    admin_keys: ApiKeys
    notes: tuple[str, ...] = ()

    @property
    def model_name(self) -> str:
        return self.endpoint.served_model_name or model_name(self.engine.model)


def serve_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> ServeSettings:
    """The settings from the flags of `add_serve_flags`, `environ` and the file.

    Raises UsageError or ConfigError, in one line that names the source of the mistake.
    """
    values = ChainMap(layers(args, environ), {option.name: option.default for option in SERVE_OPTIONS})
    endpoint = build(EndpointOptions, values)
    secret = api_keys.read_secret(endpoint.control_secret_file, environ)
    engine = build(EngineConfig, values, control_secret=secret)
    keys = ApiKeys.read(endpoint.api_key_file, environ)
    if keys.weights and engine.scheduling_policy != "fair":
        message = f"an API key has a weight, which the scheduling policy {engine.scheduling_policy!r} ignores"
        raise ConfigError(f"{message}; set scheduling_policy to 'fair', or leave the weights out")
    routing = build(RouterOptions, values)
    if keys.required and routing.kv_events is not None:
        message = "kv_events tells of blocks that all clients share, and each API key has blocks of its own"
        raise ConfigError(f"{message}; let the router check the keys, or leave kv_events out")
    if keys.required and not secret and (engine.gives_blocks or engine.takes_blocks):
        message = f"role is {engine.role!r} and requests need API keys, whose prompts travel between servers"
        raise ConfigError(f"{message}; set the same control_secret_file for all of them")
    admin_keys = ApiKeys.read(endpoint.admin_key_file, environ, api_keys.ADMIN_VARIABLE)
    return ServeSettings(
        engine=engine,
        endpoint=endpoint,
        routing=routing,
        api_keys=keys,
        admin_keys=admin_keys,
        notes=(*_unknown_variables(environ), *keys.notes, *admin_keys.notes),
    )


def model_name(model: str | None) -> str:
    """The model's name in the API if the operator sets none.

    A directory's is its last part, in the hub's cache the name of its repository. The name of a preset or a
    function, or one on the hub, is used as it is.
    """
    if model is None:
        return _DEMO
    path = Path(model).expanduser()
    if not (model.startswith(("/", "~", ".")) or model.endswith("/") or path.is_dir()):
        return model
    path = Path(os.path.abspath(path))  # without following links, whose names were chosen
    if path.parent.name == _SNAPSHOTS and path.parents[1].name.startswith(_CACHED):
        return path.parents[1].name.removeprefix(_CACHED).replace("--", "/")
    return path.name or model


def compile_config(args: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """The engine whose programs `orca compile` compiles, from the same sources. Reads no file of secrets.

    Raises as `serve_settings` does.
    """
    values = layers(args, environ)
    names = [option.name for option in COMPILE_OPTIONS]
    return build(EngineConfig, {name: values[name] for name in names if name in values})


def layers(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of all settings that a flag, a variable or the file gives. Raises UsageError."""
    flags = {name: getattr(args, name) for name in _OPTIONS if hasattr(args, name)}
    variables = _read_variables(environ, flags)
    path = getattr(args, "config", environ.get(_CONFIG) or None)
    file = {} if path is None else read_settings(Path(path), _OPTIONS)
    values = {**file, **variables, **flags}
    if values.get("model") == "":
        raise UsageError("the model's name is empty; leave it out for the demo model")
    return values


def _read_variables(environ: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `ORCA_*` variables; an empty variable counts as not set."""
    values = dict[str, Any]()
    for name, option in _OPTIONS.items():
        variable = option.variable
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
    known = {option.variable for option in SERVE_OPTIONS}
    known |= {_CONFIG, api_keys.VARIABLE, api_keys.ADMIN_VARIABLE, api_keys.SECRET_VARIABLE}
    for variable in sorted(environ):
        if not variable.startswith("ORCA_") or variable in known or _SERVICE_VARIABLE.fullmatch(variable):
            continue
        if variable.endswith("_PORT") and _SERVICE_ADDRESS.match(environ[variable]):
            continue
        suggestion = did_you_mean(variable, known, prefix="ORCA_")
        yield f"the variable {variable!r} is not a setting and has no effect{suggestion}"


_MAX_BYTES = 1_000_000
_YAML = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_YAML + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}


def read_settings(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """The file's values by option name. Raises UsageError, which gives the file and the line."""
    root = _parse(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds {_kind(root)}; it must hold lines such as 'port: 8000'")
    values = dict[str, Any]()
    for key, value in root.value:
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
        where = f"{path}, line {key.start_mark.line + 1}"
        if name not in options:
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
            raise UsageError(f"{where}: {shown} is not a setting{about(name) or did_you_mean(name, options)}")
        if name in values:
            raise UsageError(f"{where}: {name} appears twice; give it once")
        try:
            values[name] = _value(options[name], value)
        except ValueError as error:
            raise UsageError(f"{where}: {name}: {error}") from error
    return values


def _parse(path: Path) -> yaml.Node | None:
    try:
        text = read_text(path, _MAX_BYTES)
    except ValueError as error:
        raise UsageError(f"the settings: {error}") from error
    try:
        # Only composed: scalars stay text, as in a flag, so that `off` is not read as a boolean.
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise UsageError(f"{path}{line}: invalid YAML: {error.problem}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: invalid YAML: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: invalid YAML: {error}") from error


def _value(option: Option, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
        raise ValueError(f"it is {_kind(node)}; it must be {option.allowed}")
    if node.tag == _YAML + "null":
        if not option.optional:
            raise ValueError(f"there is no value; it must be {option.allowed}")
        return None
    return option.parse(node.value)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a single value" if node.tag in _SCALAR_TAGS else f"a value with the tag {node.tag!r}"
