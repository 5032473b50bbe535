"""The command line's flags, made from the dataclasses here and nowhere else."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from orca_jax.errors import OrcaError
from orca_jax.request.sampling_params import SamplingParams
from server.settings.config import (
    CompileOptions,
    EndpointOptions,
    EngineOptions,
    PipelineOptions,
    PlanFlags,
    WorkerFlags,
)
from server.settings.option import Option, option, options_of
from server.settings.small_files import read_text

T = TypeVar("T")


class UsageError(OrcaError):
    """A command line, a variable or a settings file that makes no sense."""


# Defaults of the command line where they are not those of SamplingParams: a person reads what comes.
GENERATE_DEFAULTS = {"max_tokens": 128, "temperature": 0.8}

_SAMPLING_HELP = {
    "n": "outputs of each prompt, which differ in their seeds: SEED, SEED + 1, ...",
    "max_tokens": "output tokens at most",
    "min_tokens": "neither an end-of-sequence or stop token nor a --stop text ends the output before so many",
    "temperature": "0 takes the likeliest token, higher values vary more",
    "top_p": "choose among the likeliest tokens that have this probability together; 1: all",
    "top_k": "choose among this many likeliest tokens; 0: all",
    "min_p": "choose among tokens with at least this part of the likeliest one's probability; 0: all",
    "repetition_penalty": "above 1: tokens of the prompt and the output come less; 1: off",
    "frequency_penalty": "taken from a token's logit for each time that it came, -2 to 2",
    "presence_penalty": "taken from the logit of each token that came, -2 to 2",
    "logit_bias": "add VALUE, -100 to 100, to the logit of token ID; may be given several times",
    "seed": "the same seed gives the same text again (default: drawn, and told)",
    "ignore_eos": "go on after an end-of-sequence token",
    "stop": "end before this text; may be given several times",
    "stop_token_ids": "end after any of these tokens; may be given several times",
    "allowed_token_ids": "no other tokens than these may come; may be given several times (default: all may)",
    "bad_words": "a text that does not come; may be given several times",
    "logprobs": "tell the log-probability of each output token, and of so many of the likeliest "
    "(default: tell nothing)",
    "prompt_logprobs": "the same for the prompt's tokens (default: tell nothing)",
    "guided_json": "the output is JSON of this schema; @FILE reads it from there",
    "guided_json_object": "the output is a JSON object",
    "guided_regex": "the output matches this regular expression as a whole",
    "guided_choice": "the output is this text, or another that is given so",
    "guided_grammar": "the output follows this grammar, in Lark's form; @FILE reads it from there",
}
_MAX_FILE_BYTES = 1 << 20  # more than SamplingParams takes, and no more than need be read to find that out

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
_NOT_OF_GENERATE = ("seed", "max_queue", "max_queue_bytes", "max_queue_share")
ENGINE_FLAGS = tuple(one for one in options_of(EngineOptions) if one.name not in _NOT_OF_GENERATE)
SERVE_OPTIONS = (
    MODEL,
    *options_of(EndpointOptions),
    *options_of(EngineOptions, _ENGINE_GROUP),
    *options_of(CompileOptions, _ENGINE_GROUP),
    *options_of(PipelineOptions, "workers"),
)
# What decides which programs there are.
COMPILE_OPTIONS = tuple(
    one
    for one in SERVE_OPTIONS
    if one.group == _ENGINE_GROUP and one.name not in ("seed", "served_model_name", "chat_template")
    if one.name not in {field.name for field in fields(CompileOptions)}
) + tuple(one for one in SERVE_OPTIONS if one.name == "worker_processes")
WORKER_OPTIONS = options_of(WorkerFlags)
PLAN_OPTIONS = options_of(PlanFlags)

_METAVARS: dict[Callable[[str], Any], str] = {int: "N", float: "X", str: "TEXT"}


def add_sampling_flags(parser: argparse._ArgumentGroup) -> None:
    """A flag for each field of SamplingParams."""
    hints = get_type_hints(SamplingParams)
    for field in fields(SamplingParams):
        hint, text = hints[field.name], _SAMPLING_HELP[field.name]
        if field.name in _SAMPLING_FORMS:
            form, metavar, is_list = _SAMPLING_FORMS[field.name]
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                action="append" if is_list else "store",
                type=_shown(form),
                metavar=metavar,
                help=_escaped(text),
            )
        else:
            default = GENERATE_DEFAULTS.get(field.name, field.default)
            _add(parser, option(field.name, hint, default, text), default)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags say; raises InvalidSamplingParameter, or UsageError for a bias said twice."""
    given = {field.name: getattr(args, field.name) for field in fields(SamplingParams)}
    for name in ("stop_token_ids", "allowed_token_ids"):
        if given[name] is not None:
            given[name] = [token_id for some in given[name] for token_id in some]
    if given["logit_bias"] is not None:
        given["logit_bias"] = _said_once(given["logit_bias"])
    # One of these that was not given is None here.
    return SamplingParams(
        **{name: value for name, value in given.items() if name not in _SAMPLING_FORMS or value is not None}
    )


def _said_once(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    bias = dict[int, float]()
    for token_id, value in pairs:
        if token_id in bias:
            raise UsageError(f"--logit-bias has token id {token_id} twice; give it once")
        bias[token_id] = value
    return bias


def _token_ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        message = f"{text!r} is no list of token ids; it must be whole numbers with commas between"
        raise ValueError(message) from error


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not of the form ID=VALUE, as in 50256=-100") from error


def _text_or_file(text: str) -> str:
    return read_text(Path(text[1:]), _MAX_FILE_BYTES) if text.startswith("@") else text


# Of fields that are no plain number, truth or word: what a flag's text becomes, what `--help` calls it, and
# whether the flag may stand there several times.
_SAMPLING_FORMS: dict[str, tuple[Callable[[str], Any], str, bool]] = {
    "logit_bias": (_bias, "ID=VALUE", True),
    "stop": (str, "TEXT", True),
    "stop_token_ids": (_token_ids, "ID,ID...", True),
    "allowed_token_ids": (_token_ids, "ID,ID...", True),
    "bad_words": (str, "TEXT", True),
    "guided_json": (_text_or_file, "SCHEMA", False),
    "guided_regex": (str, "REGEX", False),
    "guided_choice": (str, "TEXT", True),
    "guided_grammar": (_text_or_file, "GRAMMAR", False),
}


def add_engine_flags(parser: argparse._ArgumentGroup) -> None:
    """The flags of a command that builds an engine for itself."""
    for one in (MODEL, *ENGINE_FLAGS):
        _add(parser, one, one.default)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for `EngineConfig.of`."""
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


def add_flags(
    command: argparse.ArgumentParser, options: Sequence[Option], *, title: str, model_help: str = MODEL.help
) -> None:
    """The model, and a flag for each option, in one group. What is not given has its default."""
    command.add_argument("model", nargs="?", type=_type(MODEL), metavar="MODEL", help=model_help)
    group = command.add_argument_group(title)
    for one in options:
        _add(group, one, one.default)


def read_flags(args: argparse.Namespace, config: type[T]) -> T:
    """The dataclass whose options were added as flags. Raises ConfigError where it is checked."""
    return config(**{one.name: getattr(args, one.name) for one in options_of(config)})


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
    return _shown(one.parse)


def _shown(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` in argparse's terms: of a ValueError it would not show the message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
