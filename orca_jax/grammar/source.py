"""Translates a request's fields to llguidance's Lark text, and limits what that text may contain.

Grammars are untrusted input and can be made arbitrarily expensive. Too large ones are rejected here, before
llguidance sees them, and llguidance gets limits of its own.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NoReturn

from llguidance import LLParserLimits, regex_to_lark

from orca_jax.errors import InvalidSamplingParameter, is_failure
from orca_jax.grammar.json_schema import followed
from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.sampling_params import SamplingParams

# Limits of the text. llguidance's own limits count nodes, and the cost of a node grows with the text. These
# keep the worst known case to 2 s and 130 MB; before, it took minutes (`a?` 30,000 times: 21 s and 3.4 GB).
MAX_REGEX = 4096  # characters of guided_regex, and of all patterns in a schema
MAX_LARK = 8192  # characters
MAX_CHOICES = 1 << 16  # characters of all choices together
MAX_OPERATORS = 32  # `&` and `~` in Lark: 60 take milliseconds, 280 never end
MAX_PATTERN_PROPERTIES = 32  # in a schema; every pair is compared
MAX_MULTIPLE_OF = 20_000  # sum over a schema, without decimal points; each makes that many states


def _limits(*, row: int, step: int, size: int) -> LLParserLimits:
    """llguidance's limits: items in a row of its parser, items for one mask, symbols of the grammar."""
    return LLParserLimits(
        max_items_in_row=row,
        step_max_items=step,
        max_grammar_size=size,
        initial_lexer_fuel=200_000,  # nodes of all regular expressions; 0.1 s, Unicode's 1.5 s
        step_lexer_fuel=50_000,  # nodes for one mask: some 10 ms
        max_lexer_states=50_000,  # 25 to 100 MB; shared by all requests of one grammar
        precompute_large_lexemes=True,  # so that too large ones are detected at compile time
        verbose_errors=False,  # otherwise messages would show the grammar's state
    )


# Lark may be ambiguous; then the cost grows with the square of a row's items. Grammars of whole languages
# (Python, SQL) need a fifth of this. A schema has no such rows, but 4 items per optional property in one row,
# and 400 such properties need 40,000 items for one mask.
_LARK_LIMITS = _limits(row=300, step=10_000, size=20_000)
_JSON_LIMITS = _limits(row=2_000, step=50_000, size=20_000)

# If the grammar leaves only one text, llguidance allows only the token that a tokenizer would choose for it,
# without context and by calling back into Python. With this option it allows every token that fits.
_EVERY_TOKEN = '\n%llguidance {"no_forcing": true}\n'

# At most one space wherever JSON allows whitespace, and none around it: this covers the two usual one-line
# styles, and no output can run on in spaces. Without `\\u`, as llguidance would take `"\\u0061"` for another
# name than "a". The other settings enforce the whole schema.
_JSON_FORM = {
    "whitespace_pattern": " ?",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}

# The options after a rule's name, up to the one searched for.
_OPTIONS = r'\[(?:"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/|[^]"/\n])*?'
_NOT_IN_LARK = {
    "the option temperature (give it to the request)": rf"^[ \t]*[?!]*[\w-]+{_OPTIONS}\btemperature\s*=",
    "the option stop (write suffix)": rf"^[ \t]*[?!]*[\w-]+{_OPTIONS}\bstop\s*=",
    "a rule with a parameter": r"^[ \t]*[?!]*[\w-]+::",
    "patternProperties (give the schema as guided_json)": '"patternProperties"',
    "multipleOf (give the schema as guided_json)": '"multipleOf"',
}


# Comments, strings and regular expressions. An unterminated one goes to the end of its line, and llguidance
# rejects it; so no character is scanned twice.
_TEXTS_OF_LARK = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])*/?')


@dataclass(frozen=True)
class GrammarText:
    """A grammar in llguidance's Lark, converted from the request's `field`.

    `around` is the server's own Lark, in which `@body` refers to the request's. `schemas` are JSON schemas
    as text, with the names by which both refer to them.
    """

    field: str
    lark: str
    around: str | None = None
    schemas: tuple[tuple[str, str], ...] = ()

    @property
    def limits(self) -> LLParserLimits:
        """llguidance's limits for it."""
        return (
            _LARK_LIMITS
            if self.field in ("guided_regex", "guided_choice", "guided_grammar")
            else _JSON_LIMITS
        )

    @property
    def grammars(self) -> str:
        """The grammars as JSON for llguidance; all allow every token that fits. Raises CannotFollow.

        Each is marked as Lark, because llguidance reads a text that begins with a brace as its own JSON.
        """
        body = {"name": "body", "lark_grammar": self.lark + _EVERY_TOKEN}
        around = {"name": "around", "lark_grammar": (self.around or "") + _EVERY_TOKEN}
        schemas = [
            {"name": name, "json_schema": {**followed(json.loads(text)), "x-guidance": _JSON_FORM}}
            for name, text in self.schemas
        ]
        return json.dumps({"grammars": [*([] if self.around is None else [around]), body, *schemas]})


def grammar_text(sampling: SamplingParams, form: OutputForm = PLAIN_TEXT) -> GrammarText | None:
    """The grammar that a request asks for; None if none. Raises InvalidSamplingParameter with the field."""
    text = None if sampling.grammar is None else _TEXTS[sampling.grammar](sampling)
    if form.lark is None:
        return text
    if sampling.allowed_token_ids is not None:
        message = f"allowed_token_ids and {form.field} are both given; give one of them"
        raise InvalidSamplingParameter(message, param="allowed_token_ids")
    schemas = tuple((f"schema_{i}", schema) for i, schema in enumerate(form.schemas))
    if text is None:
        return GrammarText(form.field, form.lark, schemas=schemas)
    return replace(text, around=form.lark, schemas=text.schemas + schemas)


def _regex(sampling: SamplingParams) -> GrammarText:
    regex = _text("guided_regex", sampling.guided_regex or "", MAX_REGEX)
    try:
        lark = regex_to_lark(regex, "d")  # `\d` is 0 to 9, not the digits of every script
    except BaseException as error:
        if not is_failure(error):
            raise
        refuse("guided_regex", shortened(str(error)))
    return GrammarText("guided_regex", f"start: /{lark}/")


def _choice(sampling: SamplingParams) -> GrammarText:
    choices = sampling.guided_choice or ()
    _text("guided_choice", "".join(choices), MAX_CHOICES)
    # A terminal is one automaton; alternatives of a rule would be followed in parallel.
    return GrammarText("guided_choice", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _lark(sampling: SamplingParams) -> GrammarText:
    field = "guided_grammar"
    lark = _text(field, sampling.guided_grammar or "", MAX_LARK)
    for operator in "&~":
        if lark.count(operator) > MAX_OPERATORS:
            refuse(field, f"it has {lark.count(operator)} `{operator}`; {MAX_OPERATORS} are allowed")
    for what, pattern in _NOT_IN_LARK.items():
        if re.search(pattern, lark, re.MULTILINE):
            refuse(field, f"it has {what}, which is not supported")
    without_texts = _TEXTS_OF_LARK.sub("", lark)
    if "<[" in without_texts:
        refuse(field, "it has a token by its id, which is not supported")
    if "<" in without_texts:
        refuse(field, "special tokens (such as <|endoftext|>) cannot be part of it")
    return GrammarText(field, lark)


def _json(sampling: SamplingParams) -> GrammarText:
    field = "guided_json"
    parsed: Any = json.loads(str(sampling.guided_json))
    schema: dict[str, Any] = {} if parsed is True else parsed
    check_schemas(field, schema)
    return _json_source(field, json.dumps(schema))


def check_schemas(field: str, *schemas: dict[str, Any]) -> None:
    """Raise InvalidSamplingParameter, which names `field`, if the schemas together are too expensive."""
    if any("x-guidance" in schema for schema in schemas):
        refuse(field, "it has x-guidance, which is not supported")
    n_patterns, n_pattern_properties, multiple_of = 0, 0, 0
    for key, value in _entries(schemas):
        if key == "pattern" and isinstance(value, str):
            n_patterns += len(value)
        elif key == "patternProperties" and isinstance(value, dict):
            n_pattern_properties += len(value)  # pyright: ignore[reportUnknownArgumentType]
            n_patterns += sum(map(len, value))  # pyright: ignore[reportUnknownArgumentType]
        elif key == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
            multiple_of += _without_point(value)
    for what, n, most in (
        ("characters of patterns", n_patterns, MAX_REGEX),
        ("patternProperties", n_pattern_properties, MAX_PATTERN_PROPERTIES),
        ("or more as the sum of multipleOf, without decimal points", multiple_of, MAX_MULTIPLE_OF),
    ):
        if n > most:
            refuse(field, f"it has {n} {what}; {most} are allowed")


_TEXTS: dict[str, Callable[[SamplingParams], GrammarText]] = {
    "guided_json": _json,
    "guided_json_object": lambda _: _json_source("guided_json_object", '{"type": "object"}'),
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
}


def _json_source(field: str, schema: str) -> GrammarText:
    return GrammarText(field, "start: @document", schemas=(("document", schema),))


def _entries(schema: object) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth; iterative, because a deep schema would exhaust recursion."""
    todo: list[Any] = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from value.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            todo.extend(value.values())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        elif isinstance(value, list | tuple):
            todo.extend(value)  # pyright: ignore[reportUnknownArgumentType]


def _without_point(number: float) -> int:
    """The number without its decimal point: 125 for 1.25, 300 for 300; at most one more than is allowed."""
    value = abs(Decimal(repr(number)))
    if not value.is_finite():
        return 0  # llguidance rejects it
    places = max(0, -int(value.normalize().as_tuple().exponent))
    return int(min(value.scaleb(places), Decimal(MAX_MULTIPLE_OF + 1)))


def _text(field: str, text: str, most: int) -> str:
    if len(text) > most:
        refuse(field, f"it has {len(text)} characters; {most} are allowed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse(field, f"it is not valid Unicode: a lone surrogate at character {error.start}")
    return text


def shortened(message: str) -> str:
    """llguidance's message on one line, without excerpts of the grammar."""
    message = message.split("<backtrace>")[0].split("\n<non-verbose/>")[0]
    lines = [line.strip() for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    reason = next((line for line in lines if line.startswith("error: ")), None)  # of a regular expression
    message = f"in a regular expression: {reason[7:]}" if reason else " ".join(filter(None, lines))
    message = re.sub(r"^(at )?1\(\d+\): (failed to compile JSON schema: )?", "", message)
    message = next((ours for theirs, ours in _IN_OUR_WORDS.items() if message.startswith(theirs)), message)
    return message if len(message) <= 240 else f"{message[:110]} ... {message[-120:]}"


_IN_OUR_WORDS = {  # by their beginning: llguidance's messages that only its caller can understand
    "lexer precomputation failed": "its regular expressions are too large",
    "oneOf constraints are not supported": "oneOf is for schemas that exclude each other; write anyOf",
    "NoExtensionBias": "",
    "panic: removal index": "special tokens (such as <|endoftext|>) cannot be part of it",
}


def refuse(field: str, reason: str) -> NoReturn:
    """Raise InvalidSamplingParameter."""
    message = f"{field} cannot be followed: {reason}; correct it, or use a smaller one"
    raise InvalidSamplingParameter(message, param=field)
