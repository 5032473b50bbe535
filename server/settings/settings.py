"""The settings of `orca serve`: command line over environment over `--config` file over defaults."""

import argparse
import difflib
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from server.settings import api_keys, control_secret
from server.settings.api_keys import ApiKeys
from server.settings.config import CompileOptions, EndpointOptions, EngineOptions, PipelineOptions
from server.settings.flags import SERVE_OPTIONS, UsageError
from server.settings.small_files import read_text

PREFIX = "ORCA_"

_OPTIONS = {option.name: option for option in SERVE_OPTIONS}
_CONFIG = PREFIX + "CONFIG"
_MAX_FILE_BYTES = 1_000_000

# What Kubernetes puts into every pod for a Service whose name begins with "orca".
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
_SERVICE_VARIABLE = re.compile(
    r"ORCA_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)

_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_YAML + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """All that was set, from wherever; `notes` are lines for the one who starts the server."""

    model: str | None
    engine: EngineOptions
    endpoint: EndpointOptions
    pipeline: PipelineOptions
    compiling: CompileOptions
    api_keys: ApiKeys
    control_secret: str = field(default="", repr=False)
    notes: tuple[str, ...] = ()


def serve_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> ServeSettings:
    """What flags, variables and file say together; `args` has what was given after `add_serve_flags`.

    Raises UsageError or ConfigError, in one line that says where the mistake stands.
    """
    chosen = _chosen(args, environ)
    endpoint = EndpointOptions(**_of_class(EndpointOptions, chosen))
    pipeline = PipelineOptions(**_of_class(PipelineOptions, chosen))
    keys = ApiKeys.read(endpoint.api_key_file, environ)
    return ServeSettings(
        model=chosen.get("model"),
        engine=EngineOptions(**_of_class(EngineOptions, chosen)),
        endpoint=endpoint,
        pipeline=pipeline,
        compiling=CompileOptions(**_of_class(CompileOptions, chosen)),
        api_keys=keys,
        control_secret=control_secret.read_secret(pipeline.control_secret_file, environ),
        notes=(*_unknown_variables(environ), *keys.notes),
    )


def engine_settings(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[str | None, EngineOptions, PipelineOptions]:
    """The model, its engine and where the stages run, of the same places; no file of secrets is read.

    Raises as `serve_settings`.
    """
    chosen = _chosen(args, environ)
    engine = EngineOptions(**_of_class(EngineOptions, chosen))
    return chosen.get("model"), engine, PipelineOptions(**_of_class(PipelineOptions, chosen))


def _chosen(args: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, Any]:
    flags = {name: getattr(args, name) for name in _OPTIONS if hasattr(args, name)}
    variables = _of_environment(environ, ports_said=flags)
    config = getattr(args, "config", environ.get(_CONFIG) or None)
    file = {} if config is None else _of_file(Path(config))
    chosen = ChainMap(flags, variables, file)
    if chosen.get("model") == "":
        raise UsageError("the model's name is empty; leave it out for the demo model")
    return chosen


def _of_class(config: type, chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: chosen[field.name] for field in fields(config) if field.name in chosen}


def _of_environment(environ: Mapping[str, str], *, ports_said: Mapping[str, Any]) -> dict[str, Any]:
    values = dict[str, Any]()
    for name, option in _OPTIONS.items():
        variable = PREFIX + name.upper()
        text = environ.get(variable)
        if not text:
            continue
        if variable.endswith("_PORT") and _SERVICE_ADDRESS.match(text):
            if name in ports_said:
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
    """A note for each variable that looks like a setting and is none, without its value, maybe a secret."""
    known = {PREFIX + name.upper() for name in _OPTIONS} | {
        _CONFIG,
        api_keys.VARIABLE,
        control_secret.VARIABLE,
    }
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known or _SERVICE_VARIABLE.fullmatch(variable):
            continue
        if variable.endswith("_PORT") and _SERVICE_ADDRESS.match(environ[variable]):
            continue
        yield f"the variable {variable!r} is no setting and does nothing{_nearest(variable, known, PREFIX)}"


def _of_file(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, _MAX_FILE_BYTES)
    except ValueError as error:
        raise UsageError(f"the settings: {error}") from error
    try:
        # Composed, not constructed: what stands there is text, as in a flag, and `off` no boolean.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise UsageError(f"{path}{place}: not usable YAML: {error.problem}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not usable YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: not usable YAML: {error}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds {_kind(root)}; it must hold lines such as 'port: 8000'")
    values = dict[str, Any]()
    for key, value in root.value:
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
        where = f"{path}, line {key.start_mark.line + 1}"
        if name not in _OPTIONS:
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
            raise UsageError(f"{where}: {shown} is no setting{_nearest(name, _OPTIONS)}")
        if name in values:
            raise UsageError(f"{where}: {name} stands there twice")
        try:
            values[name] = _option_value(name, value)
        except ValueError as error:
            raise UsageError(f"{where}: {name}: {error}") from error
    return values


def _option_value(name: str, node: yaml.Node) -> Any:
    option = _OPTIONS[name]
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS:
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
    return "a single value" if node.tag in _PLAIN_TAGS else f"a value with the tag {node.tag!r}"


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message: which of `known` was meant, by what stands behind the prefix that all have."""
    near = difflib.get_close_matches(
        name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], n=1
    )
    return f"; did you mean {prefix}{near[0]}?" if near else ""
