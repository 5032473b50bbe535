"""The base of all request models: strict validation, and what becomes of fields that are not used.

A field that could change an answer and is not built takes neutral values only, so that a client that spells
out every default works unchanged:

    truncation: Annotated[str | None, NotBuilt("disabled", why="it leaves items out")] = None

Fields that could change no answer are taken (hints.py) and named in the response header `x-orca-ignored`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orca_jax.errors import InvalidRequest, NotSupported
from server.http.fields.first_fault import stop_at_first_faults
from server.http.fields.hints import HINTS, Hint, is_one_of


@dataclass(frozen=True, init=False)
class NotBuilt:
    """An annotation for fields of which only null and the `neutral` values are accepted.

    `why` says what would be lost if the field were ignored, for the documentation. `instead` tells clients an
    alternative.
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
        """Whether a value of the marked field asks for nothing."""
        return value is None or is_one_of(value, self.neutral)

    def advice(self) -> str:
        """What a client can do instead, for error messages."""
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
    """Names of fields that a request has and this server does not use, each once.

    A name is a dotted path without the positions in lists, `messages.content.cache_control`, made of names in
    this server's tables alone. So there are few of them, and none needs escaping in a header. With `refuse`,
    which is `--strict`, such a field is an error instead.
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self._refuse = refuse
        self._names: dict[str, None] = {}

    def note(self, name: str, reason: str, *, param: str | None = None) -> None:
        """Note a field. `param` is its path with positions, if it has any.

        Raises NotSupported with `--strict`.
        """
        if self._refuse:
            param = param or name
            message = f"{param} is not used: {reason}; leave it out, because this server runs with --strict"
            raise NotSupported(message, param=param)
        self._names[name] = None

    def header(self) -> str:
        """The header's value, empty if all fields were used; it ends with "..." where names are left out."""
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
    """Take null for this value, in a field that has one even if it is left out."""
    return BeforeValidator(
        lambda value: default if value is None else value, json_schema_input_type=Literal[default, None]
    )


class Strict(BaseModel):
    """Rejects values of another type and numbers that are not finite; of a list or map, the first ones only.

    Unknown fields pass validation and are checked by `take`: null is taken for every name, and hints are
    taken in the places where HINTS has them. A model names its place there, and has those of its bases too.

    A model with `types` stands for whatever has another `type` than the models beside it, and may have any
    field. HINTS has the types that are left out; the others are not built.
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
        """Check the whole request's fields, which pydantic has validated, and drop those that are not used.

        Raises InvalidRequest for an unknown field, and NotSupported for one that is not built; both name it.
        """
        take_fields(self, unused)


def take_fields(request: BaseModel, unused: Unused, path: str = "", place: str = "") -> None:
    """Check the fields of a model and of the models in it.

    `path` and `place` stand before the names of its fields, the latter without positions in lists.
    """
    known = _known(type(request))
    if known.types is not None:
        kind: str = getattr(request, "type")  # noqa: B009 (such a model has it)
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
    """Note the hints among fields that are not in `names`. Raises InvalidRequest for an unknown one."""
    for name, value in extra.items():
        if value is None:
            continue
        hint = hints.get(name)
        if hint is None:
            raise unknown_field(name, (*names, *hints), path)
        if not hint.asks_nothing(value):
            unused.note(f"{place}{name}", hint.reason, param=f"{path}{name}")


def unknown_field(name: str, known: tuple[str, ...], path: str = "") -> InvalidRequest:
    """The error for a name that is not among the `known` ones, with the nearest of them."""
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
    """The hints that the model takes, by name."""
    places = dict.fromkeys(base.place for base in model.__mro__ if issubclass(base, Strict) and base.place)
    return {name: hint for place in places for name, hint in HINTS[place].items()}


class _Known(NamedTuple):
    """A model's fields as clients name them, those that are not built, its hints, and types left out."""

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
