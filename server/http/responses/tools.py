"""The tools of the Responses API: functions, custom tools, namespaces of both, and hosted tools.

The chat template and the grammar of calls know functions only. So a tool in a namespace becomes a function
with a joined name, and a custom tool, whose input is a text, becomes a function with one argument, `input`.
`OfferedTools.called` finds the client's tool for a call of such a function.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, Tag

from server.http.fields.strict import NotBuilt, Strict, by_type

CUSTOM_INPUT = "input"  # the argument of a custom tool's function
_PLACE = "tools of responses"
_Callers = Annotated[list[str] | None, NotBuilt(["direct"], why="the model would call it directly")]


class FunctionTool(Strict):
    """A function that the model may call."""

    place: ClassVar = _PLACE

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="the JSON schema of its arguments")] = None
    strict: Annotated[bool | None, Field(description="whether arguments must follow their schema")] = None

    allowed_callers: _Callers = None

    def for_chat(self) -> dict[str, Any]:
        """Convert the tool to the form that chat templates read."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": given}


class CustomFormat(Strict):
    """The format of a custom tool's input. The model reads the grammar, but is not forced to follow it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Strict):
    """A tool whose input is a text."""

    place: ClassVar = _PLACE

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None

    allowed_callers: _Callers = None

    def for_chat(self) -> dict[str, Any]:
        """Convert the tool to the form that chat templates read: a function with one text as its argument."""
        texts = [self.description] if self.description else []
        if self.format is not None and self.format.definition:
            texts.append(
                f"The input follows this {self.format.syntax or 'lark'} grammar:\n{self.format.definition}"
            )
        schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}}
        parameters = {**schema, "required": [CUSTOM_INPUT], "additionalProperties": False}
        function: dict[str, Any] = {"name": self.name, "parameters": parameters}
        if texts:
            function["description"] = "\n\n".join(texts)
        return {"type": "function", "function": function}


class HostedTool(Strict):
    """A tool that OpenAI runs itself, or one of another type that is not built."""

    types: ClassVar = "types of tools of responses"

    type: Annotated[str, NotBuilt("function", "custom", "namespace", why="the model would not know the tool")]


OneTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    by_type("function", "custom", other="hosted"),
]


class NamespaceTool(Strict):
    """Functions and custom tools under a common name."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: list[OneTool]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    by_type("function", "custom", "namespace", other="hosted"),
]


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


class ToolName(NamedTuple):
    """A tool as the client names it."""

    name: str
    namespace: str | None
    is_custom: bool


class OfferedTools:
    """A request's tools as functions, and the paths of their fields in the request."""

    def __init__(self, tools: Sequence[Strict]) -> None:
        self.functions = list[dict[str, Any]]()
        self.paths = list[str]()
        self.grammars = list[str]()  # the paths of custom tools whose input has a grammar
        self._names: dict[str, ToolName] = {}
        for path, tool, within in _each(tools):
            chat = tool.for_chat()
            function = chat["function"]
            namespace = None if within is None else within.name
            function["name"] = joined_name(namespace, tool.name)
            if within is not None and within.description and tool is within.tools[0]:
                texts = [within.description, function.get("description")]
                function["description"] = "\n\n".join(text for text in texts if text)
            if isinstance(tool, CustomTool) and tool.format is not None and tool.format.type == "grammar":
                self.grammars.append(path)
            self.functions.append(chat)
            self.paths.append(path)
            self._names[function["name"]] = ToolName(tool.name, namespace, isinstance(tool, CustomTool))

    def called(self, name: str) -> ToolName:
        """The client's tool for the function that the model calls."""
        return self._names.get(name, ToolName(name, None, is_custom=False))


def _each(tools: Sequence[Strict]) -> Iterator[tuple[str, FunctionTool | CustomTool, NamespaceTool | None]]:
    """The functions and custom tools with their paths and namespaces."""
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | CustomTool):
            yield f"tools.{i}", tool, None
        elif isinstance(tool, NamespaceTool):
            for j, inner in enumerate(tool.tools):
                if isinstance(inner, FunctionTool | CustomTool):
                    yield f"tools.{i}.tools.{j}", inner, tool
