"""Fields that clients may send but that are not supported yet: neutral values are accepted, others rejected.

    return_token_ids: Annotated[bool | None, NotBuilt(False)] = None

So a client that spells out every default works unchanged, and nothing is ignored silently.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orca_jax.errors import NotSupported


@dataclass(frozen=True, init=False)
class NotBuilt:
    """An annotation for fields of which only null and the `neutral` values are accepted.

    `same_as` names another field whose value is neutral as well. `instead` tells clients an alternative.
    """

    neutral: tuple[Any, ...]
    same_as: str | None
    instead: str | None

    def __init__(self, *neutral: Any, same_as: str | None = None, instead: str | None = None) -> None:
        object.__setattr__(self, "neutral", neutral)
        object.__setattr__(self, "same_as", same_as)
        object.__setattr__(self, "instead", instead)

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(core_schema), "description": f"Not built yet: {self.advice()}."}

    def takes(self, value: object, request: BaseModel) -> bool:
        """Whether `value` of the marked field of `request` asks for nothing."""
        if value is None:
            return True
        same = (self.same_as,) if self.same_as else ()
        neutral = (*self.neutral, *[getattr(request, name) for name in same])
        return any(type(value) is type(other) and value == other for other in neutral)  # here False is not 0

    def advice(self) -> str:
        """What a client can do instead, for error messages."""
        ways = ["leave it out"]
        if self.neutral:
            ways.append("give " + " or ".join(map(_as_json, self.neutral)))
        if self.instead:
            ways.append(self.instead)
        return ", or ".join(ways)


def refuse_unsupported(request: BaseModel, path: str = "") -> None:
    """Raise NotSupported, with the dotted path, for the first field that asks for something unsupported."""
    marks = _marks(type(request))
    for name in type(request).model_fields:
        if name not in request.model_fields_set:
            continue
        value = getattr(request, name)
        mark = marks.get(name)
        if mark is not None and not mark.takes(value, request):
            raise NotSupported(f"{path}{name} is not built yet; {mark.advice()}", param=path + name)
        if isinstance(value, BaseModel):
            refuse_unsupported(value, f"{path}{name}.")
        elif isinstance(value, list):
            for i, element in enumerate(value):
                if not isinstance(element, BaseModel):
                    break
                refuse_unsupported(element, f"{path}{name}.{i}.")


@cache
def _marks(model: type[BaseModel]) -> dict[str, NotBuilt]:
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, NotBuilt)}


def _as_json(value: object) -> str:
    return {False: "false", True: "true"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')
