"""The fields of a request that say how its output is made: those of `SamplingParams`, by OpenAI's names.

Ranges stand in the schema for its readers; `SamplingParams` alone enforces them.
"""

import dataclasses
from typing import Annotated, Any

from pydantic import Field

from orca_jax.errors import InvalidRequest
from orca_jax.request.sampling_params import (
    MAX_BAD_WORDS,
    REPETITION_RANGE,
    TEMPERATURE_RANGE,
    TOP_P_RANGE,
    SamplingParams,
)
from server.http.fields.response_format import ResponseFormat
from server.http.fields.strict import FirstFault, Strict


def ranged(description: str, low: float, high: float) -> Any:
    """A number's field: its range is told in the schema, and not enforced here."""
    return Field(description=description, json_schema_extra={"minimum": low, "maximum": high})


def _told(**schema: Any) -> Any:
    return Field(json_schema_extra=schema)


def _list(description: str, least: int, most: int) -> Any:
    return Field(description=description, json_schema_extra={"minItems": least, "maxItems": most})


Text = Annotated[str, _told(minLength=1, maxLength=1024)]
Texts = Annotated[list[Text], FirstFault()]
TokenIds = Annotated[list[Annotated[int, _told(minimum=0, maximum=1 << 30)]], FirstFault()]
Bias = dict[str, Annotated[float, _told(minimum=-100, maximum=100)]]

_LEAST, _MOST = TEMPERATURE_RANGE
_BIAS: dict[str, Any] = {"maxProperties": 4096, "propertyNames": {"pattern": "^[0-9]{1,9}$"}}
_GRAMMAR: dict[str, Any] = {"minLength": 1, "maxLength": 1 << 16}


class SamplingFields(Strict):
    """Null is the default everywhere. What OpenAI's API does not have is called an extension."""

    n: Annotated[int | None, ranged("choices for each prompt; default 1", 1, 1 << 16)] = None
    max_tokens: Annotated[int | None, ranged("output tokens at most", 1, 1 << 30)] = None
    max_completion_tokens: Annotated[int | None, ranged("another name of max_tokens", 1, 1 << 30)] = None
    min_tokens: Annotated[
        int | None, ranged("an extension: output tokens at least; default 0", 0, 1 << 30)
    ] = None
    temperature: Annotated[
        float | None,
        ranged(f"default 1; 0 is greedy; the least above it is {_LEAST:g}", 0, _MOST),
    ] = None
    top_p: Annotated[float | None, ranged("default 1: every token", *TOP_P_RANGE)] = None
    top_k: Annotated[int | None, ranged("an extension; default 0, or -1: every token", -1, 1 << 30)] = None
    min_p: Annotated[float | None, ranged("an extension; default 0: every token", 0, 1)] = None
    repetition_penalty: Annotated[
        float | None, ranged("an extension; default 1: none", *REPETITION_RANGE)
    ] = None
    frequency_penalty: Annotated[float | None, ranged("default 0", -2, 2)] = None
    presence_penalty: Annotated[float | None, ranged("default 0", -2, 2)] = None
    logit_bias: Annotated[
        Bias | None, Field(description="token id to what is added to its logit", json_schema_extra=_BIAS)
    ] = None
    seed: Annotated[
        int | None,
        ranged("choice i of a prompt uses seed + i; default: drawn", -(1 << 63), (1 << 63) - 1),
    ] = None
    ignore_eos: Annotated[bool | None, Field(description="an extension: go on after the text's end")] = None
    stop: Annotated[
        str | Texts | None,
        Field(description="up to 16 texts of 1 to 1024 characters; the output ends before the first of them"),
    ] = None
    stop_token_ids: Annotated[TokenIds | None, _list("an extension: tokens that end the output", 0, 256)] = (
        None
    )
    allowed_token_ids: Annotated[TokenIds | None, _list("an extension: no other token comes", 1, 1 << 22)] = (
        None
    )
    bad_words: Annotated[
        Texts | None,
        _list(f"an extension: texts that do not come, of {MAX_BAD_WORDS} characters together", 0, 256),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="what the output must be; default: any text")
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | None,
        Field(description="an extension: the output follows this JSON schema, an object or its text"),
    ] = None
    guided_regex: Annotated[
        str | None,
        Field(description="an extension: the whole output matches it", json_schema_extra=_GRAMMAR),
    ] = None
    guided_choice: Annotated[Texts | None, _list("an extension: the output is one of these", 1, 1024)] = None
    guided_grammar: Annotated[
        str | None,
        Field(description="an extension: the output follows it; Lark's form", json_schema_extra=_GRAMMAR),
    ] = None

    @property
    def n_choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens` under either name. Raises InvalidRequest if they contradict each other."""
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            message = f"max_tokens is {one} and max_completion_tokens is {other}; give one of them"
            raise InvalidRequest(message, param="max_completion_tokens")
        return one if other is None else other

    @property
    def client_names(self) -> dict[str, str]:
        """What the client calls a field of `SamplingParams`, where that is another name; see `named`."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        told = {} if self.response_format is None else self.response_format.client_names
        return {"max_tokens": name, **told}

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The request's sampling parameters; `more` are those that each route has under names of its own.

        Raises a leaf of InvalidRequest, which names the field as `SamplingParams` does.
        """
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if self.response_format is not None:
            wanted = self.response_format.guided()
            for name in given if wanted else ():
                if name.startswith("guided_"):
                    message = f"response_format and {name} are both given; an output follows one grammar"
                    raise InvalidRequest(message, param="response_format")
            given |= wanted
        return SamplingParams(**given, **more)


# The fields that are called as in `SamplingParams`; the default of `max_tokens` depends on the route.
PASSED_ON = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingFields.model_fields and field.name != "max_tokens"
)
