"""The base of all request models: strict validation, and what becomes of fields that are not used."""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orca_jax.errors import InvalidRequest, NotSupported
from server.http.fields.first_fault import stop_at_first_faults
from server.http.fields.hints import HINTS, Hint
from server.http.fields.not_built import NotBuilt
from server.http.fields.unused import Unused

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
