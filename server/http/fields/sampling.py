"""The request fields that every generating route has, by OpenAI's names and strictly typed.

Most are those of `SamplingParams`. The schema states ranges as documentation; only `SamplingParams` enforces
them, and `renamed_fields` gives its errors the client's names.
"""

import dataclasses
from functools import cache
from typing import Annotated, Any

from pydantic import Field

from orca_jax.request.sampling_params import (
    MAX_BAD_WORDS,
    REPETITION_RANGE,
    TEMPERATURE_RANGE,
    TOP_P_RANGE,
    SamplingParams,
)
from orca_jax.request.scheduling_params import MAX_CACHE_SALT, PLAIN, PRIORITY_RANGE, SchedulingParams
from server.http.fields.strict import FirstFault, Strict


def ranged(description: str, low: float, high: float) -> Any:
    """A numeric field whose range is in the schema but not enforced here."""
    return Field(description=description, json_schema_extra={"minimum": low, "maximum": high})


def in_schema(**schema: Any) -> Any:
    """What the schema says of a field besides, without being enforced here."""
    return Field(json_schema_extra=schema)


def listed(description: str, least: int, most: int) -> Any:
    """A list whose length is in the schema but not enforced here."""
    return Field(description=description, json_schema_extra={"minItems": least, "maxItems": most})


Text = Annotated[str, in_schema(minLength=1, maxLength=1024)]
Texts = Annotated[list[Text], FirstFault()]
TokenIds = Annotated[list[Annotated[int, in_schema(minimum=0, maximum=1 << 30)]], FirstFault()]
Bias = dict[str, Annotated[float, in_schema(minimum=-100, maximum=100)]]

_LEAST, _MOST = TEMPERATURE_RANGE
_BIAS: dict[str, Any] = {"maxProperties": 4096, "propertyNames": {"pattern": "^[0-9]{1,9}$"}}


class SharedSamplingFields(Strict):
    """Null means the default for every field. "Extension" marks fields that OpenAI's API does not have."""

    min_tokens: Annotated[
        int | None, ranged("an extension: minimum number of output tokens; default 0", 0, 1 << 30)
    ] = None
    temperature: Annotated[
        float | None,
        ranged(f"default: the model's, or 1; 0 is greedy; other values are at least {_LEAST:g}", 0, _MOST),
    ] = None
    top_p: Annotated[float | None, ranged("default: the model's, or 1: all tokens", *TOP_P_RANGE)] = None
    top_k: Annotated[
        int | None, ranged("an extension; default: the model's, or 0 (or -1): all tokens", -1, 1 << 30)
    ] = None
    min_p: Annotated[float | None, ranged("an extension; default: the model's, or 0: all tokens", 0, 1)] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, ranged("an extension; default: the model's, or 1: no penalty", *REPETITION_RANGE)
    ] = None
    frequency_penalty: Annotated[float | None, ranged("default 0", -2, 2)] = None
    presence_penalty: Annotated[float | None, ranged("default 0", -2, 2)] = None
    logit_bias: Annotated[
        Bias | None, Field(description="by token id: a number added to its logit", json_schema_extra=_BIAS)
    ] = None
    seed: Annotated[
        int | None,
        ranged("choice i of a prompt uses seed + i; default: random", -(1 << 63), (1 << 63) - 1),
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="an extension: continue after an end-of-sequence token")
    ] = None
    stop_token_ids: Annotated[TokenIds | None, listed("an extension: tokens that end the output", 0, 256)] = (
        None
    )
    allowed_token_ids: Annotated[
        TokenIds | None, listed("an extension: only these tokens can be generated", 1, 1 << 22)
    ] = None
    bad_words: Annotated[
        Texts | None,
        listed(f"an extension: texts never generated; at most {MAX_BAD_WORDS} characters in total", 0, 256),
    ] = None

    def given(self) -> dict[str, Any]:
        """What the client has set of the fields that `SamplingParams` has under the same name."""
        return {name: value for name in _passed_on(type(self)) if (value := getattr(self, name)) is not None}


class SchedulingFields(Strict):
    """What a request asks of the scheduler."""

    priority: Annotated[
        int | None,
        ranged(
            "an extension: requests with a lower one go first; default 0, and no other is allowed unless the "
            "server runs with --scheduling-policy priority",
            *PRIORITY_RANGE,
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(
            description="an extension: a secret; the request reuses only keys and values of requests with "
            "the same one, and of the same API key",
            json_schema_extra={"minLength": 1, "maxLength": MAX_CACHE_SALT},
        ),
    ] = None

    @property
    def scheduling(self) -> SchedulingParams:
        """What the request asks of the scheduler. Raises InvalidSchedulingParameter."""
        if not self.priority and self.cache_salt is None:
            return PLAIN
        return SchedulingParams(priority=self.priority or 0, cache_salt=self.cache_salt)


@cache
def _passed_on(fields: type[SharedSamplingFields]) -> tuple[str, ...]:
    """All but `max_tokens`, whose name and default depend on the route."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return tuple(name for name in names if name in fields.model_fields and name != "max_tokens")
