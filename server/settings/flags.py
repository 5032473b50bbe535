"""Command-line flags, made from the dataclasses in options.py."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from server.settings.endpoint_options import EndpointOptions
from server.settings.option import Option, options_of
from server.settings.options import CompileOptions, EngineOptions, PipelineOptions
from server.settings.router_options import RouterOptions

T = TypeVar("T")

_ENGINE_GROUP = "model and engine"
MODEL = Option(
    name="model",
    kind=str,
    default=None,
    help="a directory, a name on the Hugging Face hub, or a preset's name with --load-format dummy "
    "(default: the demo model)",
    group=_ENGINE_GROUP,
    optional=True,
)
_ENGINE = options_of(EngineOptions, _ENGINE_GROUP)
_PIPELINE = options_of(PipelineOptions, "workers")
# `orca generate` has a `--seed` for sampling, and waits for room in the queue itself.
GENERATE_OPTIONS = (MODEL, *(o for o in _ENGINE if o.group == _ENGINE_GROUP and o.name != "seed"))
# The options that determine which programs a server needs.
COMPILE_OPTIONS = (
    *(o for o in GENERATE_OPTIONS if o.name not in ("generation_config", "tokenizer")),
    *(o for o in _PIPELINE if o.name == "worker_processes"),
)
_ENDPOINT = options_of(EndpointOptions, "limits")
_FORMATS = tuple(o for o in _ENDPOINT if o.name in ("chat_template", "tool_format", "reasoning_format"))
SERVE_OPTIONS = (
    MODEL,
    *_ENDPOINT,
    *_ENGINE,
    *options_of(CompileOptions, _ENGINE_GROUP),
    *_PIPELINE,
    *options_of(RouterOptions, "routers"),
)

_METAVARS: dict[Callable[[str], Any], str] = {int: "N", float: "X", str: "TEXT"}


def add_engine_flags(parser: argparse._ArgumentGroup) -> None:
    """Add the flags of `orca generate`, which builds its own engine."""
    for option in (*GENERATE_OPTIONS, *_FORMATS):
        add_flag(parser, option, option.default)


def add_chat_flags(command: argparse.ArgumentParser) -> None:
    """Add the model, and the flags of a command that talks with it."""
    add_model(command, MODEL.help)
    group = command.add_argument_group(_ENGINE_GROUP)
    for option in (*GENERATE_OPTIONS, *_FORMATS):
        if option is not MODEL and option.name != "tool_format":  # there are no tools
            add_flag(group, option, option.default)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of these flags, as arguments for `EngineConfig.of`."""
    return {option.name: getattr(args, option.name) for option in GENERATE_OPTIONS}


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
        if option is MODEL:
            _add_model(parsers[option.group], MODEL.help)
        else:
            add_flag(parsers[option.group], option, argparse.SUPPRESS)


def add_flags(
    command: argparse.ArgumentParser, config: type, *, title: str, model_help: str = MODEL.help
) -> None:
    """Add the model and a flag for each field of `config`, in one group. Absent flags get their defaults."""
    add_model(command, model_help)
    group = command.add_argument_group(title)
    for option in options_of(config):
        add_flag(group, option, option.default)


def read_flags(args: argparse.Namespace, config: type[T]) -> T:
    """The values of the flags that `add_flags` added for `config`. Raises ConfigError if `config` does."""
    return config(**{option.name: getattr(args, option.name) for option in options_of(config)})


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
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else _METAVARS.get(option.kind, "FILE")
    parser.add_argument(
        option.flag,
        type=argparse_type(option.parse),
        required=default is MISSING,
        default=None if default is MISSING else default,
        metavar=metavar,
        help=escaped(text),
    )


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
