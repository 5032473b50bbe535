"""The sandbox that chat templates run in: Jinja's own, with a limit to its time and what templates expect."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TICK = "each step"  # a variable of the context; no template can write a name with a space


class Refusal(jinja2.TemplateError):
    """What a template raises on purpose, and what ends one that goes beyond a limit."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face's chat templates. Each pass of a loop and each call is a step."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self.filters["in_steps"] = _in_steps

    def template(self, source: str) -> jinja2.Template:
        """Compile `source`; raises TemplateSyntaxError, and whatever Python's compiler has against it."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "in_steps", [], [], None, None, lineno=loop.lineno)
        return self.from_string(tree)

    # The names of the first three parameters are none that a template could give an argument.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template."""
        __context[_TICK]()
        return super().call(__context, __obj, *args, **kwargs)


def run(template: jinja2.Template, variables: dict[str, Any], max_seconds: float) -> Iterator[str]:
    """The pieces of what `template` writes; raises Refusal at the first step after `max_seconds`.

    Also raises whatever the template's code runs into.
    """
    deadline = time.monotonic() + max_seconds

    def tick() -> None:
        if time.monotonic() > deadline:
            raise Refusal(f"it would take more than {max_seconds:g} seconds")

    step: dict[str, Callable[[], None]] = {_TICK: tick}
    return template.generate(variables | step)


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; nothing is made of it here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@jinja2.pass_context
def _in_steps(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    tick = context[_TICK]
    for item in items:
        tick()
        yield item


def _raise_exception(message: object) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own writes `<` as an escape, for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
