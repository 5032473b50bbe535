"""Fields that could change an answer and are not built: neutral values are accepted, others rejected.

    truncation: Annotated[str | None, NotBuilt("disabled", why="it leaves items out")] = None

So a client that spells out every default works unchanged. Fields that could change no answer are taken
instead (hints.py).
"""

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


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


def is_one_of(value: object, others: tuple[Any, ...]) -> bool:
    """Whether `value` equals one of them as JSON: false is not 0."""
    return any(type(value) is type(other) and value == other for other in others)


def _as_json(value: object) -> str:
    return {False: "false", True: "true"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')
