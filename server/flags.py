"""The command line's flags, made from the dataclasses here and nowhere else."""

import argparse
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args

from orca_jax.config import ServingConfig
from orca_jax.errors import OrcaError
from orca_jax.request import SamplingParams


class UsageError(OrcaError):
    """A command line that makes no sense."""


# Defaults of the command line where they are not those of SamplingParams: a person reads what comes.
GENERATE_DEFAULTS = {"max_tokens": 128, "temperature": 0.8}

_SAMPLING_HELP = {
    "max_tokens": "output tokens at most",
    "temperature": "0 takes the likeliest token, higher values vary more",
    "top_p": "choose among the likeliest tokens that have this probability together; 1: all",
    "top_k": "choose among this many likeliest tokens; 0: all",
    "seed": "the same seed gives the same text again; without one it is drawn, and told",
    "ignore_eos": "go on after an end-of-sequence token",
    "stop": "end before this text; may be given several times",
}


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """A keyword argument of `orca_jax.LLM`. A default of None means that it follows from the model."""

    name: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None


_SERVING_DEFAULTS = {field.name: field.default for field in fields(ServingConfig)}
ENGINE_FLAGS = (
    EngineFlag(
        "max_batch_size",
        int,
        _SERVING_DEFAULTS["max_batch_size"],
        "requests in one iteration at most (max_bs)",
    ),
    EngineFlag("n_slots", int, None, "tokens whose keys and values fit (default: by model and memory)"),
    EngineFlag(
        "max_batch_tokens",
        int,
        None,
        "tokens of one iteration at most (default: 2048, or the model's positions)",
    ),
    EngineFlag(
        "dtype",
        str,
        None,
        "of weights, keys and values (default: float32 on a CPU, bfloat16 elsewhere)",
        ("float32", "bfloat16", "float16"),
    ),
    EngineFlag(
        "load_format", str, "auto", "dummy: random weights of a preset or directory", ("auto", "dummy")
    ),
    EngineFlag("tensor_parallel", int, 1, "devices of one stage; only 1 is built so far"),
    EngineFlag("pipeline_parallel", int, 1, "stages; only 1 is built so far"),
)


def add_sampling_flags(parser: argparse._ArgumentGroup) -> None:
    """A flag for each field of SamplingParams."""
    for field in fields(SamplingParams):
        default = GENERATE_DEFAULTS.get(field.name, field.default)
        flag, text = _flag(field.name), _SAMPLING_HELP[field.name]
        if field.type is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif field.type == tuple[str, ...]:
            parser.add_argument(flag, action="append", default=[], metavar="TEXT", help=text)
        else:
            (kind, *_) = [one for one in (*get_args(field.type), field.type) if one is not NoneType]
            told = "" if default is None else f" (default: {default})"
            parser.add_argument(flag, type=kind, default=default, metavar=_METAVARS[kind], help=text + told)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags say; raises InvalidSamplingParameter."""
    return SamplingParams(**{field.name: getattr(args, field.name) for field in fields(SamplingParams)})


def add_engine_flags(parser: argparse._ArgumentGroup) -> None:
    """The flags that every command with an engine has."""
    parser.add_argument(
        "--model",
        metavar="M",
        help="a directory, a name on the Hugging Face hub, or a preset's name with --load-format dummy "
        "(default: the demo model)",
    )
    for flag in ENGINE_FLAGS:
        told = "" if flag.default is None else f" (default: {flag.default})"
        metavar = None if flag.choices else _METAVARS[flag.type]
        parser.add_argument(
            _flag(flag.name),
            type=flag.type,
            default=flag.default,
            choices=flag.choices,
            metavar=metavar,
            help=flag.help + told,
        )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for `orca_jax.LLM`."""
    return {"model": args.model} | {flag.name: getattr(args, flag.name) for flag in ENGINE_FLAGS}


_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
