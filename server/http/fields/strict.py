"""The base of all request models: strict validation, and the handling of unused fields.

A field that could change an answer and is not built accepts only neutral values, so that a client that spells
out every default works unchanged:

    truncation: Annotated[str | None, NotBuilt("disabled", why="it leaves items out")] = None

Fields that cannot change an answer are accepted (hints.py) and named in the response header `x-orca-ignored`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orca_jax.errors import InvalidRequest, NotSupported
from server.http.fields.first_fault import stop_at_first_faults
from server.http.fields.hints import HINTS, Hint, is_one_of


@dataclass(frozen=True, init=False)
class NotBuilt:
    """Annotates a field that accepts only null and the `neutral` values.

    `why` says what would be lost if the field were ignored, for the documentation; `instead` names an
    alternative for clients.
    """

    neutral: tuple[Any, ...]
    why: str
    instead: str | None

    def __init__(self, *neutral: Any, why: str, instead: str | None = None) -> None:
        object.__setattr__(self, "neutral", neutral)
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "instead", instead)

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(core_schema), "description": f"Not built yet ({self.why}): {self.advice()}."}

    def takes(self, value: object) -> bool:
        """Whether the annotated field accepts this value."""
        return value is None or is_one_of(value, self.neutral)

    def advice(self) -> str:
        """Advice for a client, for error messages."""
        ways = ["leave it out"]
        if self.neutral:
            ways.append("give " + " or ".join(map(_as_json, self.neutral)))
        if self.instead:
            ways.append(self.instead)
        return ", or ".join(ways)


def _as_json(value: object) -> str:
    return {False: "false", True: "true"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')


HEADER = "x-orca-ignored"
MOST_CHARACTERS = 1024  # of the header; proxies limit the size of all headers together


class Unused:
    """The names of a request's fields that this server does not use, each once.

    A name is a dotted path without list positions, such as `messages.content.cache_control`. It consists only
    of names from this server's tables, so there are few, and none needs escaping in a header. With `refuse`
    (`--strict`) such a field is an error instead.
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self._refuse = refuse
        self._names: dict[str, None] = {}

    def note(self, name: str, reason: str, *, param: str | None = None) -> None:
        """Note a field; `param` is its path with list positions. Raises NotSupported with `--strict`."""
        if self._refuse:
            param = param or name
            message = f"{param} is not used: {reason}; leave it out, because this server runs with --strict"
            raise NotSupported(message, param=param)
        self._names[name] = None

    def header(self) -> str:
        """The header's value, empty if all fields were used. Names that do not fit are replaced by "..."."""
        shown = list[str]()
        n = 0
        for name in self._names:
            n += len(name) + 2
            if n > MOST_CHARACTERS - 3:
                shown.append("...")
                break
            shown.append(name)
        return ", ".join(shown)


_MOST_CHARACTERS = 64  # of an unknown name that is compared with known ones
_SIMILARITY = 0.8


def null_is(default: str) -> BeforeValidator:
    """Accept null as `default`, for a field that is not optional."""
    return BeforeValidator(
        lambda value: default if value is None else value, json_schema_input_type=Literal[default, None]
    )


def _text_or_list(value: Any, validate_list: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, str) else validate_list(value)


def text_or(kind: Any) -> WrapValidator:
    """Accept a text besides a list of type `kind`: `Annotated[list[Part], text_or(list[Part])]`."""
    return WrapValidator(_text_or_list, json_schema_input_type=str | kind)


def type_of(value: Any) -> Any:
    """The `type` of a JSON object or of a model; None if it has none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def by_type(*known: str, other: str) -> Discriminator:
    """Choose a union's member by a value's `type`: the tag of that name, or `other` if it is unknown."""

    def tag(value: Any) -> str:
        kind = type_of(value)
        return kind if kind in known else other

    return Discriminator(tag)


class Strict(BaseModel):
    """Rejects values of the wrong type and numbers that are not finite, and stops at a list's first fault.

    Unknown fields pass validation and are checked by `take`: null is accepted under any name, and hints where
    HINTS lists them for the model's `place` or its bases'.

    A model with `types` is the fallback of a union: it matches every `type` that the other members do not
    know, and may have any field. HINTS lists the types that are left out; the others are not built.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    place: ClassVar[str | None] = None
    types: ClassVar[str | None] = None

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        schema = handler(source)
        stop_at_first_faults(handler.resolve_ref_schema(schema))
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        if cls.types is None:
            inner = handler.resolve_ref_schema(schema)
            described = {
                name: {"description": f"Taken, not used: {hint.reason}."}
                for name, hint in hints_of(cls).items()
            }
            inner["properties"] = {**inner.get("properties", {}), **described}
            inner["additionalProperties"] = {"type": "null"}
        return schema

    def take(self, unused: Unused) -> None:
        """Check the fields of the whole request after pydantic's validation, and drop unused ones.

        Raises InvalidRequest for an unknown field, and NotSupported for one that is not built; both name it.
        """
        take_fields(self, unused)


def take_fields(request: BaseModel, unused: Unused, path: str = "", place: str = "") -> None:
    """Check the fields of a model and of the models in it.

    `path` and `place` are prefixes for the names of its fields; `place` has no list positions.
    """
    known = _known(type(request))
    if known.types is not None:
        kind: str = getattr(request, "type")  # noqa: B009 (every model with `types` has it)
        left_out = known.types.get(kind)
        if left_out is not None:
            unused.note(f"{place}{kind}", left_out.reason, param=f"{path}type")
            return
    elif request.__pydantic_extra__:
        take_extra(request.__pydantic_extra__, known.names, known.hints, unused, path, place)
        request.__pydantic_extra__.clear()
    for name, value in request.__dict__.items():
        if value is None:
            continue
        mark = known.marks.get(name)
        if mark is not None and not mark.takes(value):
            raise NotSupported(f"{path}{name} is not built yet; {mark.advice()}", param=path + name)
        if isinstance(value, BaseModel):
            take_fields(value, unused, f"{path}{name}.", f"{place}{name}.")
        elif isinstance(value, list):
            for i, element in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                if isinstance(element, BaseModel):
                    take_fields(element, unused, f"{path}{name}.{i}.", f"{place}{name}.")
                elif isinstance(element, int):  # a list of numbers has nothing else, and may be long
                    break


def take_extra(
    extra: Mapping[str, Any],
    names: tuple[str, ...],
    hints: Mapping[str, Hint],
    unused: Unused,
    path: str,
    place: str,
) -> None:
    """Note the hints among a request's extra fields. Raises InvalidRequest for an unknown field."""
    for name, value in extra.items():
        if value is None:
            continue
        hint = hints.get(name)
        if hint is None:
            raise unknown_field(name, (*names, *hints), path)
        if not hint.asks_nothing(value):
            unused.note(f"{place}{name}", hint.reason, param=f"{path}{name}")


def unknown_field(name: str, known: tuple[str, ...], path: str = "") -> InvalidRequest:
    """The error for an unknown field, with the most similar of the `known` names."""
    near = list[str]()
    if len(name) <= _MOST_CHARACTERS:
        lower = {each.lower(): each for each in known}
        near = get_close_matches(name.lower(), lower, n=1, cutoff=_SIMILARITY)
        near = [lower[each] for each in near]
    advice = f"did you mean {near[0]}?" if near else "leave it out"
    message = f"{path}{name} is not known here; {advice} (GET /openapi.json shows what there is)"
    return InvalidRequest(message, param=path + name)


@cache
def hints_of(model: type[Strict]) -> Mapping[str, Hint]:
    """The hints that the model accepts, by field name."""
    places = dict.fromkeys(base.place for base in model.__mro__ if issubclass(base, Strict) and base.place)
    return {name: hint for place in places for name, hint in HINTS[place].items()}


class _Known(NamedTuple):
    """A model's field names as clients spell them, its unbuilt fields, its hints and its left-out types."""

    names: tuple[str, ...]
    marks: Mapping[str, NotBuilt]
    hints: Mapping[str, Hint]
    types: Mapping[str, Hint] | None


@cache
def _known(model: type[BaseModel]) -> _Known:
    fields = model.model_fields.items()
    marks = {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, NotBuilt)}
    names = tuple(field.alias or name for name, field in fields)
    if not issubclass(model, Strict):
        return _Known(names, marks, {}, None)
    return _Known(names, marks, hints_of(model), None if model.types is None else HINTS[model.types])
