"""The sandbox for chat templates: Jinja's own, with a time limit and the functions that templates expect."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TICK = "each step"  # a context variable; templates cannot reach it, because its name has a space


class Refusal(jinja2.TemplateError):
    """The template refused the messages, or exceeded a limit."""


class Compiled(NamedTuple):
    """A template and its variables."""

    template: jinja2.Template
    variables: frozenset[str]


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face's chat templates. Each loop iteration and each call checks the time."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.filters["tojson"] = _to_json
        self.filters["in_steps"] = _in_steps

    def compiled(self, source: str) -> Compiled:
        """Compile `source`. Raises TemplateSyntaxError, and any error of Python's compiler."""
        tree = self.parse(source)
        variables = frozenset(meta.find_undeclared_variables(tree)) - self.globals.keys()
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "in_steps", [], [], None, None, lineno=loop.lineno)
        return Compiled(self.from_string(tree), variables)

    # A template cannot use the names of the first three parameters for keyword arguments.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context[_TICK]()
        return super().call(__context, __obj, *args, **kwargs)


def run(template: jinja2.Template, variables: dict[str, Any], max_seconds: float) -> Iterator[str]:
    """Yield the template's output in pieces.

    Raises Refusal at the first loop iteration or call after `max_seconds`, and any error of the template.
    """
    deadline = time.monotonic() + max_seconds

    def tick() -> None:
        if time.monotonic() > deadline:
            raise Refusal(f"it would take more than {max_seconds:g} seconds")

    ticking: dict[str, Callable[[], None]] = {_TICK: tick}
    return template.generate(variables | ticking)


class _Generation(Extension):
    """`{% generation %}` marks the model's own text, for training. Serving ignores the mark."""

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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's `tojson`, which escapes `<` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
