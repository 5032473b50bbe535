"""Bodies in JSON, read strictly: what has two meanings, or none, is refused.

Every router with a body is made with `APIRouter(route_class=JsonRoute)`.
"""

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be JSON by its header and by every letter.

    Without the header a web page could make a visitor's browser send requests here unasked.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook: what answers a request."""
        handler = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            if has_body:
                _check_content_type(request.headers.get("content-type"))
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body. Raises HTTPException (400) for what is not JSON."""
        return parse(await self.body())


def parse(data: bytes) -> Any:
    """The value of a JSON text in UTF-8; numbers are finite, names in an object differ, text is Unicode.

    Raises HTTPException (400).
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # finds surrogates that have no partner
        return value
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte {error.start} cannot be read"
    except UnicodeEncodeError:
        message = "the body is not valid Unicode: a \\u escape is half of a surrogate pair"
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg}, at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        message = f"the body is not JSON that can be read: {error}"
    except RecursionError:
        message = "the body is nested too deeply"
    raise HTTPException(400, message)


def _check_content_type(value: str | None) -> None:
    media_type = (value or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        came = f"Content-Type is {value[:100]!r}" if value else "the request has no Content-Type"
        raise HTTPException(415, f"{came}; send the header 'Content-Type: application/json'")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} stands twice in one object")
    return value


def _number(text: str) -> float | int:
    """1.0 is a whole number to JSON Schema, and so to the OpenAPI document."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:50]} is too large")
    return int(number) if number.is_integer() else number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
