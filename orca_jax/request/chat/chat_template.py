"""Chat templates: the checkpoint's Jinja template turns a conversation into the prompt the model expects."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jinja2

from orca_jax.errors import CorruptFile, InvalidRequest
from orca_jax.request.chat.template_probe import probe
from orca_jax.request.chat.template_reading import Message, TemplateReading
from orca_jax.request.chat.template_sandbox import Refusal, Sandbox, run

MAX_SOURCE = 1_000_000  # characters of a template, and bytes of its file
MAX_OUTPUT = 4_000_000  # characters
MAX_SECONDS = 2.0

# The names of a message's reasoning. Templates read the first; the others are older names.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Appended to the message to be continued, to find the message's end in the output. Templates that trim
# messages drop the space.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt")
_RESERVED = (*_FIELDS, "continue_final_message", "chat_template")


class BadConversation(InvalidRequest):
    """The model's chat template rejects these messages or fails on them."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class UnknownTemplate(InvalidRequest):
    """The model has no chat template of the requested name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="chat_template")


class BadTemplateVariable(InvalidRequest):
    """`chat_template_kwargs` sets something that is not a variable of the template."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, param=f"chat_template_kwargs.{name}")


class Templates(Protocol):
    """A model's chat templates."""

    @property
    def sources(self) -> Sequence[str]:
        """The texts of all templates."""
        ...

    def choose(self, name: str | None = None, *, has_tools: bool = False) -> "ChatTemplate":
        """The template called `name`, or the model's choice. Raises UnknownTemplate."""
        ...

    def read_ahead(self) -> None:
        """Find now how the templates read conversations, so that no request waits for it."""
        ...


class ChatTemplate:
    """A Jinja chat template in the form of Hugging Face's tokenizers, run in a sandbox. Thread-safe.

    The template sees `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens by name,
    further variables that the client sets, and the functions `raise_exception` and `strftime_now`. Its output
    contains the special tokens, so encode it without adding more.

    `source` has at most MAX_SOURCE characters, the output at most MAX_OUTPUT. Loops and calls stop after
    `max_seconds`. The cost of a single expression, such as `'a' * 10 ** 12`, is not limited: the template is
    the operator's own file. The messages come from clients and are data only: nothing in them is executed.

    Raises CorruptFile, which names `origin`, if `source` is not a valid template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the chat template",
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise CorruptFile(f"{origin} has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        try:
            compiled = Sandbox().compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise CorruptFile(f"{origin}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # Python's compiler has limits of its own, and many exceptions for them
            raise CorruptFile(f"{origin} is not a usable template: {_describe(error)}") from error
        self._source = source
        self._template = compiled.template
        self._reads = compiled.variables
        self._variables = compiled.variables - {*_FIELDS}
        self._special_tokens = dict(special_tokens or {})
        self._max_seconds = max_seconds
        self._readings = dict[bool, TemplateReading]()

    def __reduce__(self) -> tuple[Callable[[], "ChatTemplate"], tuple[()]]:
        """Another process makes the template again, of its source."""
        again = partial(ChatTemplate, special_tokens=self._special_tokens, max_seconds=self._max_seconds)
        return partial(again, self._source), ()

    @property
    def sources(self) -> Sequence[str]:
        """The text of this template."""
        return [self._source]

    def reads(self, variable: str) -> bool:
        """Whether the template has this variable."""
        return variable in self._reads

    def reading(self, *, has_tools: bool) -> TemplateReading:
        """The form in which the template shows the whole of a conversation, with or without tools.

        The first call finds it by rendering small conversations, in at most `max_seconds`.
        """
        known = self._readings.get(has_tools)
        if known is None:
            deadline = time.monotonic() + self._max_seconds

            def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
                return self._run(self._values(messages, tools), deadline - time.monotonic())

            known = probe(render, has_tools=has_tools, names_developer="developer" in self._source)
            self._readings[has_tools] = known
        return known

    def read_ahead(self) -> None:
        """Find now how the template reads conversations, so that no request waits for it."""
        self.reading(has_tools=False)
        if self.reads("tools"):
            self.reading(has_tools=True)

    def choose(self, name: str | None = None, *, has_tools: bool = False) -> "ChatTemplate":
        """Return this template. Raises UnknownTemplate for a name other than `default`."""
        if name not in (None, "default"):
            raise UnknownTemplate(_no_template(name, ["default"]))
        return self

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`, as `apply_chat_template` of Hugging Face's tokenizers renders it.

        With `add_generation_prompt` the text ends with the start of the model's reply; with
        `continue_final_message` it ends with the last message's content, which the model continues.
        `variables` are further variables of the template. Raises BadConversation and BadTemplateVariable.
        """
        self._check_variables(variables or {})
        if not messages:
            raise BadConversation("messages is an empty list; give at least one message")
        conversation = [_with_reasoning(message) for message in messages]
        final = _mark(conversation) if continue_final_message else ""
        values = self._values(conversation, tools) | {
            **(variables or {}),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(values, self._max_seconds)
        return _until_mark(text, final) if continue_final_message else text

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in _RESERVED:
                message = f"chat_template_kwargs has {name}, which is a field of the request; give it there"
                raise BadTemplateVariable(message, name)
            if name not in self._variables:
                known = ", ".join(sorted(self._variables - self._special_tokens.keys())[:20]) or "none"
                message = f"chat_template_kwargs has {name[:80]!r}, which the model's chat template does not "
                raise BadTemplateVariable(f"{message}read; its variables: {known}", name[:80])

    def _values(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "messages": messages,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": True,
        }

    def _run(self, variables: dict[str, Any], max_seconds: float) -> str:
        pieces = list[str]()
        length = 0
        try:
            for piece in run(self._template, variables, max_seconds):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT:
                    raise Refusal(f"the text would have more than {MAX_OUTPUT} characters")
        except Refusal as error:
            raise BadConversation(f"the model's chat template refuses the messages: {error}") from error
        except Exception as error:  # a template can raise anything that Python code can
            message = f"the model's chat template fails with these messages: {_describe(error)}"
            raise BadConversation(message) from error
        return "".join(pieces)


class NamedTemplates:
    """Several chat templates: `default`, `tool_use` for requests with tools, and others by name."""

    def __init__(self, templates: Mapping[str, ChatTemplate]) -> None:
        self._templates = dict(templates)

    @property
    def sources(self) -> Sequence[str]:
        """The texts of all templates."""
        return [source for template in self._templates.values() for source in template.sources]

    def read_ahead(self) -> None:
        """Find how they read conversations now, so that no request waits for it."""
        for template in self._templates.values():
            template.read_ahead()

    def choose(self, name: str | None = None, *, has_tools: bool = False) -> ChatTemplate:
        """The template called `name`; else `tool_use` if there are tools, else `default`."""
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise UnknownTemplate(_no_template(name, sorted(self._templates)))
        return template


def _no_template(name: str | None, known: Sequence[str]) -> str:
    asked = (name or "")[:80]
    return f"the model has no chat template {asked!r}; chat_template must be one of {', '.join(known)}"


def _with_reasoning(message: Message) -> dict[str, Any]:
    """A copy without null fields other than content, with the reasoning under each name in use."""
    copy = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((copy[name] for name in _REASONING if name in copy), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    return copy


def _mark(conversation: list[dict[str, Any]]) -> str:
    """Append the mark to the last text of the last message; returns the text without it."""
    content = conversation[-1].get("content")
    if isinstance(content, str):
        conversation[-1]["content"] = content + _MARK
        return content
    parts = [dict(part) for part in content or ()]
    for part in reversed(parts):
        if "text" in part:
            text = part["text"]
            part["text"] = text + _MARK
            conversation[-1]["content"] = parts
            return text
    message = "continue_final_message is set, but the final message has no content to continue"
    raise InvalidRequest(message, param="continue_final_message")


def _until_mark(text: str, final: str) -> str:
    """The text up to the mark; without the spaces before it if the template trims messages."""
    place = text.rfind(_MARK.strip())
    if place < 0 or final.strip() not in text:
        message = "continue_final_message is set, but the model's chat template changes the final message"
        raise InvalidRequest(message, param="continue_final_message")
    kept = text[:place]
    return kept if text.startswith(_MARK, place) else kept.rstrip()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
