"""The command line's flags, made from the dataclasses here and nowhere else."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from orca_jax.errors import OrcaError
from orca_jax.request import SamplingParams
from server.config import EndpointOptions, EngineOptions, PipelineOptions, WorkerFlags
from server.options import Option, option, options_of


class UsageError(OrcaError):
    """A command line, a variable or a settings file that makes no sense."""


# Defaults of the command line where they are not those of SamplingParams: a person reads what comes.
GENERATE_DEFAULTS = {"max_tokens": 128, "temperature": 0.8}

_SAMPLING_HELP = {
    "max_tokens": "output tokens at most",
    "temperature": "0 takes the likeliest token, higher values vary more",
    "top_p": "choose among the likeliest tokens that have this probability together; 1: all",
    "top_k": "choose among this many likeliest tokens; 0: all",
    "seed": "the same seed gives the same text again (default: drawn, and told)",
    "ignore_eos": "go on after an end-of-sequence token",
    "stop": "end before this text; may be given several times",
}

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
# `orca generate` has a `--seed` for sampling, and waits itself rather than have a request refused.
_NOT_OF_GENERATE = ("seed", "max_queue")
ENGINE_FLAGS = tuple(one for one in options_of(EngineOptions) if one.name not in _NOT_OF_GENERATE)
SERVE_OPTIONS = (
    MODEL,
    *options_of(EndpointOptions),
    *options_of(EngineOptions, _ENGINE_GROUP),
    *options_of(PipelineOptions, "workers"),
)
WORKER_OPTIONS = options_of(WorkerFlags)

_METAVARS: dict[Callable[[str], Any], str] = {int: "N", float: "X", str: "TEXT"}


def add_sampling_flags(parser: argparse._ArgumentGroup) -> None:
    """A flag for each field of SamplingParams."""
    hints = get_type_hints(SamplingParams)
    for field in fields(SamplingParams):
        hint, text = hints[field.name], _SAMPLING_HELP[field.name]
        if hint == tuple[str, ...]:
            parser.add_argument(f"--{field.name}", action="append", default=[], metavar="TEXT", help=text)
        else:
            default = GENERATE_DEFAULTS.get(field.name, field.default)
            _add(parser, option(field.name, hint, default, text), default)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags say; raises InvalidSamplingParameter."""
    return SamplingParams(**{field.name: getattr(args, field.name) for field in fields(SamplingParams)})


def add_engine_flags(parser: argparse._ArgumentGroup) -> None:
    """The flags of a command that builds an engine for itself."""
    for one in (MODEL, *ENGINE_FLAGS):
        _add(parser, one, one.default)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for `orca_jax.LLM`."""
    return {one.name: getattr(args, one.name) for one in (MODEL, *ENGINE_FLAGS)}


def add_serve_flags(command: argparse.ArgumentParser, options: Sequence[Option] = SERVE_OPTIONS) -> None:
    """The model, `--config`, and a flag for each field of EngineOptions and EndpointOptions, in groups.

    What is not given is not in the namespace: then it is for a variable, a file or the default to say.
    """
    command.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="read settings from this file; it says what neither a flag nor a variable says",
    )
    groups = dict.fromkeys(one.group for one in options)
    parsers = {group: command.add_argument_group(group) for group in groups}
    for one in options:
        if one is MODEL:
            parsers[one.group].add_argument(
                one.name,
                nargs="?",
                type=_type(one),
                default=argparse.SUPPRESS,
                metavar="MODEL",
                help=one.help,
            )
        else:
            _add(parsers[one.group], one, argparse.SUPPRESS)


def add_worker_flags(command: argparse.ArgumentParser) -> None:
    """The model, and a flag for each field of WorkerFlags."""
    command.add_argument("model", nargs="?", type=_type(MODEL), metavar="MODEL", help=MODEL.help)
    group = command.add_argument_group("worker")
    for one in WORKER_OPTIONS:
        _add(group, one, one.default)


def worker_flags(args: argparse.Namespace) -> WorkerFlags:
    """What they say."""
    return WorkerFlags(**{one.name: getattr(args, one.name) for one in WORKER_OPTIONS})


def _add(parser: argparse._ArgumentGroup, one: Option, default: Any) -> None:
    if one.kind is bool:
        action = parser.add_argument(one.flag, action=argparse.BooleanOptionalAction, default=default)
        action.help = _escaped(one.full_help)  # given above, some versions of Python add the default again
        return
    if default is MISSING:
        parser.add_argument(
            one.flag, type=_type(one), required=True, metavar=_METAVARS[one.kind], help=one.help
        )
        return
    metavar = "{" + ",".join(one.choices) + "}" if one.choices else _METAVARS.get(one.kind, "FILE")
    parser.add_argument(
        one.flag, type=_type(one), default=default, metavar=metavar, help=_escaped(one.full_help)
    )


def _type(one: Option) -> Callable[[str], Any]:
    """`Option.parse` in argparse's terms: of a ValueError it would not show the message."""

    def convert(text: str) -> Any:
        try:
            return one.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
