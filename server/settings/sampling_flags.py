"""The flags of `orca generate` and `orca chat` for SamplingParams."""

import argparse
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from orca_jax.options import option
from orca_jax.request.sampling_params import SamplingParams, with_defaults
from orca_jax.small_files import read_text
from server.errors import UsageError
from server.settings.flags import add_flag, argparse_type, escaped

# Where the command line's defaults differ from SamplingParams', to suit a person who reads the output.
GENERATE_DEFAULTS = {"max_tokens": 128, "temperature": 0.8}
_FIELDS = tuple(field for field in fields(SamplingParams) if field.name != "speculative")  # the engine's flag
# One reply is a conversation's next message: it has one text, which is as long as it needs to be.
CHAT_FIELDS = tuple(
    field.name
    for field in _FIELDS
    if field.name not in {"n", "logprobs", "prompt_logprobs", "return_routed_experts", "use_beam_search"}
    and field.name not in {"best_of", "length_penalty", "early_stopping", "prediction"}
)
# A model may recommend other defaults for these.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_HELP = {
    "n": "number of outputs per prompt, with the seeds SEED, SEED + 1, ...",
    "max_tokens": "maximum number of output tokens",
    "min_tokens": "ignore end-of-sequence tokens, stop tokens and --stop texts before this many tokens",
    "temperature": "randomness of the choice; 0 takes the most likely token",
    "top_p": "sample from the most likely tokens with this total probability; 1: all",
    "top_k": "sample from this many most likely tokens; 0: all",
    "min_p": "sample from tokens with at least this fraction of the top token's probability; 0: all",
    "repetition_penalty": "above 1, tokens of the prompt and the output become less likely; 1: off",
    "frequency_penalty": "subtract this from a token's logit for each time it was output, -2 to 2",
    "presence_penalty": "subtract this from the logit of each token that was output, -2 to 2",
    "logit_bias": "add VALUE, -100 to 100, to the logit of token ID; repeatable",
    "seed": "seed of the random choices; the same seed gives the same text (default: random, and shown)",
    "ignore_eos": "continue after an end-of-sequence token",
    "stop": "end before this text; repeatable",
    "stop_token_ids": "end after any of these tokens; repeatable",
    "allowed_token_ids": "allow only these tokens; repeatable (default: all)",
    "bad_words": "never output this text; repeatable",
    "logprobs": "show the log-probability of each output token, and of this many most likely ones "
    "(default: off)",
    "prompt_logprobs": "as --logprobs, for the prompt's tokens (default: off)",
    "return_routed_experts": "with --output, write the experts that each token chose in a mixture of experts",
    "guided_json": "make the output match this JSON schema; @FILE reads it from a file",
    "guided_json_object": "make the output a JSON object",
    "guided_regex": "make the whole output match this regular expression",
    "guided_choice": "make the output one of the given texts; repeatable",
    "use_beam_search": "show the n best outputs of a beam search",
    "best_of": "number of beams, up to 16 (default: n)",
    "length_penalty": "a beam's score is its log-probability over its length to this power",
    "early_stopping": "end a beam search once as many outputs as beams are complete: true, false or never "
    "(default: false)",
    "guided_grammar": "make the output follow this grammar in Lark syntax; @FILE reads it from a file",
    "prediction": "text that the output may follow, which --speculative drafts; @FILE reads it from a file",
}
_UNLIMITED = 1 << 30  # tokens; SamplingParams' limit
_TYPES = get_type_hints(SamplingParams)
_MAX_FILE_BYTES = 1 << 20  # more than SamplingParams accepts


def _token_ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        message = f"{text!r} is not a list of token ids; it must be whole numbers separated by commas"
        raise ValueError(message) from error


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not of the form ID=VALUE, as in 50256=-100") from error


def text_or_file(text: str) -> str:
    """A flag's text, or that of the file in @FILE. Raises ValueError."""
    return read_text(Path(text[1:]), _MAX_FILE_BYTES) if text.startswith("@") else text


def _early_stopping(text: str) -> bool | str:
    if text not in ("true", "false", "never"):
        raise ValueError(f"{text!r} is not true, false or never")
    return text if text == "never" else text == "true"


class _Form(NamedTuple):
    """A flag that is not a plain number, boolean or choice."""

    parse: Callable[[str], Any]
    metavar: str
    repeatable: bool = False


_FORMS = {
    "logit_bias": _Form(_bias, "ID=VALUE", repeatable=True),
    "stop": _Form(str, "TEXT", repeatable=True),
    "stop_token_ids": _Form(_token_ids, "ID,ID...", repeatable=True),
    "allowed_token_ids": _Form(_token_ids, "ID,ID...", repeatable=True),
    "bad_words": _Form(str, "TEXT", repeatable=True),
    "guided_json": _Form(text_or_file, "SCHEMA"),
    "guided_regex": _Form(str, "REGEX"),
    "guided_choice": _Form(str, "TEXT", repeatable=True),
    "guided_grammar": _Form(text_or_file, "GRAMMAR"),
    "prediction": _Form(text_or_file, "TEXT"),
    "early_stopping": _Form(_early_stopping, "WHEN"),
}


def add_sampling_flags(parser: argparse._ArgumentGroup) -> None:
    """Add a flag for each field of SamplingParams."""
    for field in _FIELDS:
        _add(parser, field)


def add_chat_sampling_flags(parser: argparse._ActionsContainer) -> None:
    """Add a flag for each of CHAT_FIELDS. Without `--max-tokens` the namespace lacks it."""
    for field in _FIELDS:
        if field.name == "max_tokens":
            most = option(
                "max_tokens", int, None, "maximum number of tokens of a reply (default: as many as fit)"
            )
            add_flag(parser, most, SUPPRESS)
        elif field.name in CHAT_FIELDS:
            _add(parser, field)


def chat_flags() -> argparse.ArgumentParser:
    """A parser of these flags alone. It raises argparse.ArgumentError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_chat_sampling_flags(parser)
    return parser


def _add(parser: argparse._ActionsContainer, field: Field[Any]) -> None:
    name, text = field.name, _HELP[field.name]
    form = _FORMS.get(name)
    if form is None:
        default = GENERATE_DEFAULTS.get(name, field.default)
        absent = SUPPRESS if name in _RECOMMENDED else default
        add_flag(parser, option(name, _TYPES[name], default, text), absent)
    else:
        parser.add_argument(
            "--" + name.replace("_", "-"),
            action="append" if form.repeatable else "store",
            type=argparse_type(form.parse),
            metavar=form.metavar,
            help=escaped(text),
        )


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The parameters from the flags, with the model's `defaults` for absent ones.

    Raises InvalidSamplingParameter, or UsageError for a duplicate bias.
    """
    defaults = with_defaults(
        {**GENERATE_DEFAULTS, **(defaults or {})},
        {"use_beam_search": getattr(args, "use_beam_search", False)},
    )
    values = {
        field.name: getattr(args, field.name, defaults.get(field.name, field.default)) for field in _FIELDS
    }
    for name in ("stop_token_ids", "allowed_token_ids"):
        if values[name] is not None:
            values[name] = [token_id for token_ids in values[name] for token_id in token_ids]
    if values["logit_bias"] is not None:
        values["logit_bias"] = _without_duplicates(values["logit_bias"])
    # An absent flag of _FORMS is None here, and the field's default applies.
    return SamplingParams(
        **{name: value for name, value in values.items() if name not in _FORMS or value is not None}
    )


def chat_params(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The parameters of a reply, as `sampling_params`, but as long as the model allows."""
    return sampling_params(args, {**(defaults or {}), "max_tokens": _UNLIMITED})


def _without_duplicates(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    bias = dict[int, float]()
    for token_id, value in pairs:
        if token_id in bias:
            raise UsageError(f"--logit-bias has token id {token_id} twice; give it once")
        bias[token_id] = value
    return bias
