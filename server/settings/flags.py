"""Command-line flags, made from the options' declarations (orca_jax/options.py)."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from orca_jax.config import EngineConfig
from orca_jax.options import Option, build, options_of, pairs
from orca_jax.workers.worker_options import WorkerLink
from server.settings.endpoint_options import EndpointOptions, RouterOptions

T = TypeVar("T")

_ENGINE_GROUP = "model and engine"
_ENGINE = options_of(EngineConfig, _ENGINE_GROUP, ("serve", "generate", "chat", "compile"))
MODEL = next(each for each in _ENGINE if each.name == "model")
GROUPS = (_ENGINE_GROUP, "addresses", "security", "limits", "logging", "workers", "routers")
ALL_OPTIONS = (
    MODEL,
    *(each for each in _ENGINE if each is not MODEL),
    *options_of(EndpointOptions, "limits", ("serve",)),
    *options_of(RouterOptions, "routers", ("serve",)),
)


def options_for(command: str) -> tuple[Option, ...]:
    """The options that have a flag of `orca COMMAND`, the model first."""
    return tuple(each for each in ALL_OPTIONS if each is MODEL or command in each.commands)


# With the defaults of a server, in the order of the groups.
SERVE_OPTIONS = tuple(
    replace(each, default=each.served)
    for each in sorted(options_for("serve"), key=lambda option: [*GROUPS, option.group].index(option.group))
)
GENERATE_OPTIONS = options_for("generate")
COMPILE_OPTIONS = options_for("compile")

_METAVARS: dict[Callable[[str], Any], str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    tuple: "TEXT",
    pairs: "NAME=DIRECTORY",
}


def add_engine_flags(parser: argparse._ArgumentGroup) -> None:
    """Add the flags of `orca generate`, which builds its own engine."""
    for option in GENERATE_OPTIONS:
        add_flag(parser, option, option.default)


def engine_config(command: str, args: argparse.Namespace, **others: Any) -> EngineConfig:
    """The engine of a command's flags; its other options have their defaults, or are in `others`.

    Raises ConfigError.
    """
    names = [option.name for option in options_for(command)]
    return build(EngineConfig, {name: getattr(args, name) for name in names}, **others)


def add_serve_flags(command: argparse.ArgumentParser, options: Sequence[Option] = SERVE_OPTIONS) -> None:
    """Add the model, `--config` and a flag for each option, in groups.

    A flag that is not given is absent from the namespace, so that variable, file or default applies.
    """
    command.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="read settings from this file; flags and variables take precedence",
    )
    groups = dict.fromkeys(option.group for option in options)
    parsers = {group: command.add_argument_group(group) for group in groups}
    for option in options:
        if option.name == MODEL.name:
            _add_model(parsers[option.group], MODEL.help)
        else:
            add_flag(parsers[option.group], option, argparse.SUPPRESS)


def add_flags(
    parser: argparse.ArgumentParser,
    command: str,
    *,
    title: str,
    config: type | None = None,
    model_help: str = MODEL.help,
) -> None:
    """Add the model and, in one group, the flags of `config` and of the engine's options of a command.

    Absent flags get their defaults.
    """
    add_model(parser, model_help)
    group = parser.add_argument_group(title)
    for option in (*(() if config is None else options_of(config)), *options_for(command)):
        if option is not MODEL:
            add_flag(group, option, option.default)


def read_flags(args: argparse.Namespace, config: type[T]) -> T:
    """The values of the flags that `add_flags` added for `config`. Raises ConfigError if `config` does."""
    return build(config, vars(args))


def add_model(command: argparse.ArgumentParser, text: str) -> None:
    """Add the model, None if it is absent."""
    command.set_defaults(model=None)
    _add_model(command, text)


def _add_model(parser: argparse._ActionsContainer, text: str) -> None:
    """Add the model, absent from the namespace if it is not given."""
    parser.add_argument(
        "model",
        nargs="?",
        action=GivenModel,
        type=argparse_type(MODEL.parse),
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=text,
    )


class GivenModel(argparse.Action):
    """Takes the model, as an argument or by a flag, once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            parser.error("the model is given twice; give it once")
        setattr(namespace, self.dest, values)


def add_flag(parser: argparse._ActionsContainer, option: Option, default: Any) -> None:
    """Add one flag; required if `default` is MISSING."""
    text = option.help if default is MISSING else option.full_help
    if option.kind is bool:
        action = parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=default)
        action.help = escaped(text)  # as an argument, some versions of Python would append the default again
        return
    metavar = (
        "{" + ",".join(option.shown_choices) + "}" if option.choices else _METAVARS.get(option.kind, "FILE")
    )
    parser.add_argument(
        option.flag,
        type=argparse_type(option.parse),
        required=default is MISSING,
        default=None if default is MISSING else default,
        metavar=metavar,
        help=escaped(text),
        action=_Pairs if option.kind is pairs else "store",
    )


class _Pairs(argparse.Action):
    """Collects the pairs NAME=VALUE of a flag that may be given several times."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None) or {}
        if values is None:  # the text none
            setattr(namespace, self.dest, None)
            return
        twice = next((name for name in values if name in before), None)
        if twice is not None:
            parser.error(f"argument {option_string}: {twice!r} is given twice; give each name once")
        setattr(namespace, self.dest, {**before, **values})


def argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, which shows the message of an ArgumentTypeError but not of a ValueError."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def escaped(text: str) -> str:
    """`text` as argparse's help, where % begins a format specifier."""
    return text.replace("%", "%%")


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """The stage, its addresses and its link. The server sends the batch sizes."""

    stage: Annotated[int, "number of this stage, from 1"]
    of: Annotated[int, "number of stages"]
    listen: Annotated[str, "HOST:PORT for control messages; a host other than loopback needs a secret"]
    data_host: Annotated[
        str | None,
        "address at which the next stage's worker reaches this one for activations (default: the host of "
        "--listen)",
    ] = None
    link: Annotated[
        WorkerLink,
        "how activations reach the next stage's process; nccl: over NVLink or InfiniBand, but losing one "
        "worker restarts all",
    ] = "transfer"
    coordinator: Annotated[
        str | None, "with --link nccl: HOST:PORT on stage 1's machine at which all workers meet"
    ] = None
    control_secret_file: Annotated[
        Path | None, "file with the secret shared by server and workers; or set ORCA_CONTROL_SECRET"
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The devices, and what is computed for them."""

    device: Annotated[
        str, "device to plan for: a100-40gb, a100-80gb, l40s, h100, h200, b200, or cpu (this machine's)"
    ]
    context: Annotated[
        int | None, "cached tokens per request, for the floors (default: half the model's positions)"
    ] = None
    latency_budget: Annotated[
        str | None,
        "recommend the largest max_bs that keeps the time between two tokens of a request within this, for "
        "example 50ms or 0.05s; a plain number means seconds (default: none)",
    ] = None
    role: Annotated[
        Literal["prefill", "decode"] | None,
        "also size a server that only computes prompts of --context tokens, or only decodes (default: none)",
    ] = None
    output_tokens: Annotated[int, "with --role, output tokens of a request"] = 256
    memory: Annotated[float | None, "memory of each device in GiB (default: the data sheet's)"] = None
    bandwidth: Annotated[float | None, "measured memory bandwidth in GB/s (default: the data sheet's)"] = None
    matrix_rate: Annotated[
        float | None, "measured rate of matrix products in TFLOP/s (default: the data sheet's)"
    ] = None
    compile: Annotated[
        bool, "compile with XLA, if its compiler for the device is installed, to size temporaries exactly"
    ] = True
    compile_timeout: Annotated[float, "seconds to wait for XLA before estimating"] = 600.0
    json: Annotated[bool, "print one JSON object instead of tables"] = False
