"""The cost of a body before it is refused, for every list and map of every route."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from orca_jax.errors import OrcaError, shown
from server.batches.service import Batches
from server.gateway.gateway import Gateway
from server.http.app import create_app
from server.http.authentication import is_admin
from server.http.bodies.errors import fault
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import MAX_NAMES_OF_ONE, parse
from server.http.fields.first_fault import parts
from server.http.fields.strict import Strict, Unused
from server.metrics.metrics import Metrics
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

N_ELEMENTS = 150_000
WRONG = ("x", 0.5, None)  # no field takes them all
MOST_BYTES = 20 << 20
MOST_CALLS = 30_000  # of Python functions; far fewer than there are elements
MOST_ERRORS = 256  # an error for each field of a large model, and for each alternative of its type


@cache
def routes() -> dict[str, JsonRoute]:
    """The routes with a JSON body, by path, with everything switched on."""
    app: Any = create_app(
        cast(Gateway, SimpleNamespace()),
        EndpointOptions(),
        api_keys=ApiKeys(),
        admin_keys=ApiKeys(["x" * 32]),
        metrics=cast(Metrics, SimpleNamespace()),
        batches=cast(Batches, SimpleNamespace()),
    )
    while not isinstance(app, FastAPI):
        app = app._app
    found = dict[str, JsonRoute]()
    for each in app.routes:  # FastAPI keeps included routers as they are
        included: Any = getattr(each, "original_router", None)
        for route in [each] if included is None else included.routes:
            if isinstance(route, JsonRoute) and route.body_field is not None:
                found[route.path] = route
    described = {
        path
        for path, operations in app.openapi()["paths"].items()
        if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert described <= set(found) and len(described) > 8
    return found


Wrap = Callable[[Any], Any]  # a body that has this value as a field


def places(
    kind: Any, wrap: Wrap, path: str, inside: tuple[type, ...] = ()
) -> Iterator[tuple[str, str, Wrap]]:
    """The lists and maps of a type: their paths, "list" or "map", and the body that has a value there."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from places(get_args(kind)[0], wrap, path, inside)
    elif origin in (Union, UnionType):
        for each in get_args(kind):
            yield from places(each, wrap, path, inside)
    elif origin is list:
        yield path, "list", wrap
        (element,) = get_args(kind)
        yield from places(element, lambda value: wrap([value]), f"{path}.0", inside)
    elif origin is dict:
        yield path, "map", wrap
        yield from places(get_args(kind)[1], lambda value: wrap({"k": value}), f"{path}.k", inside)
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in inside:
        yield from fields(kind, wrap, path, inside)


def fields(
    model: type[BaseModel], wrap: Wrap, path: str, inside: tuple[type, ...] = ()
) -> Iterator[tuple[str, str, Wrap]]:
    tags = {  # what tells the model from others
        name: get_args(field.annotation)[0]
        for name, field in model.model_fields.items()
        if get_origin(field.annotation) is Literal
    }
    for name, field in model.model_fields.items():
        alias = field.alias or name
        below = f"{path}.{alias}".lstrip(".")
        within = lambda value, alias=alias: wrap({**tags, alias: value})  # noqa: E731
        yield from places(field.annotation, within, below, (*inside, model))


def all_places() -> list[Any]:
    found: dict[str, Any] = {}
    for path, route in routes().items():
        assert route.body_field is not None
        body = route.body_field.field_info.annotation
        assert isinstance(body, type) and issubclass(body, Strict)
        for place, kind, wrap in fields(body, lambda value: value, ""):
            found[f"{path} {place} {kind}"] = (path, kind, wrap)
    return [pytest.param(*each, id=name) for name, each in found.items()]


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block allocates more than MOST_BYTES or makes more than MOST_CALLS."""
    n_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert n_calls < MOST_CALLS


@cache
def many(kind: str, wrong: Any) -> Any:
    if kind == "list":
        return [wrong] * N_ELEMENTS
    return {str(i): wrong for i in range(MAX_NAMES_OF_ONE)}  # `parse` refuses more


def refusal(route: JsonRoute, body: Any) -> str | None:
    """The refusal of this body by `JsonRoute` and bodies/errors.py, None if it is accepted."""
    assert route.body_field is not None
    value, errors = route.body_field.validate(body, loc=("body",))
    if errors:
        assert len(errors) <= MOST_ERRORS
        return fault(RequestValidationError(errors, body=body).errors(), body)[1]
    try:
        value.take(Unused(refuse=False))
    except OrcaError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("path", "kind", "wrap"), all_places())
def test_a_long_list_or_map_is_refused_at_its_first_faults(path: str, kind: str, wrap: Wrap) -> None:
    for wrong in WRONG:
        body = wrap(many(kind, wrong))
        with bounded():
            message = refusal(routes()[path], body)
        assert message is None or len(message) < 2000


def test_each_list_refuses_something() -> None:
    """The test above reaches the lists' elements."""
    takes_all = [
        each.id
        for each in all_places()
        for path, kind, wrap in [each.values]
        if kind == "list" and all(refusal(routes()[path], wrap([wrong])) is None for wrong in WRONG)
    ]
    assert takes_all == []


@pytest.mark.parametrize("path", routes())
def test_every_list_of_a_route_stops_at_its_first_fault(path: str) -> None:
    body: Any = routes()[path].body_field
    kinds = ("list", "tuple", "set", "frozenset", "generator")
    lists = [part for part in parts(body._type_adapter.core_schema) if part["type"] in kinds]
    assert lists or path == "/v1/batches" or is_admin(path)
    assert all(part.get("fail_fast") for part in lists)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_other_threads_may_run_while_valid_objects_are_validated(path: str) -> None:
    """Python calls a function for each; 100,000 in one call of pydantic hold the GIL for 0.1 to 0.6 s."""
    n_elements, elements = 200, [{"type": "text", "text": "a"}] * 200
    parts_of = {"/v1/responses": ("input", [{**part, "type": "input_text"} for part in elements])}
    name, content = parts_of.get(path, ("messages", elements))
    body = {name: [{"role": "user", "content": content}], **({"max_tokens": 1} if name == "messages" else {})}
    n_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    body_field = routes()[path].body_field
    assert body_field is not None
    sys.setprofile(count)
    try:
        _, errors = body_field.validate(body, loc=("body",))
    finally:
        sys.setprofile(None)
    assert not errors and n_calls >= n_elements


def test_reading_many_elements_is_bounded() -> None:
    data = b'{"tools": [' + b"1," * N_ELEMENTS + b"1]}"
    tracemalloc.start()
    parse(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES
    names = b"{" + b",".join(b'"%d":1' % i for i in range(MAX_NAMES_OF_ONE + 1)) + b"}"
    with pytest.raises(HTTPException, match="5001 names"):
        parse(b'{"logit_bias": %s}' % names)


class Unshown(str):
    """A string that must not be shown as a whole."""

    def __repr__(self) -> str:
        raise AssertionError("the whole text was shown")


def test_showing_a_value_costs_the_same_whatever_its_size() -> None:
    assert shown(Unshown("é" * 1_000_000)) == "'" + "é" * 99 + "..."
    assert shown("a" * 98) == repr("a" * 98)
    assert shown("a" * 99) == "'" + "a" * 99 + "..."
    message = fault(
        [{"type": "int_type", "loc": ("body", "n"), "msg": "Input should be a valid integer"}],
        {"n": Unshown("x" * 10**6)},
    )[1]
    assert message == "n is '" + "x" * 99 + "...; it should be a valid integer"
