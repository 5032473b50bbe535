"""Turns a conversation in OpenAI's form into the prompt's text, with the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.chat.chat_template import ChatTemplate, Templates, UnknownTemplate
from orca_jax.request.chat.template_reading import Message, TemplateReading, fitted, fitted_tools
from orca_jax.request.chat.tools import check_tools

ROLES = ("system", "developer", "user", "assistant", "tool")


def prompt_text(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    reasoning_effort: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text, special tokens included.

    `messages` and `tools` have the form of OpenAI's chat API, as parsed JSON: content is a text, a list of
    text parts or None, and arguments of tool calls are an object or its text. The template gets them in the
    form that it reads whole. By default the text ends with the start of the model's reply; with
    `continue_final_message` it ends with the last message's content. `reasoning_effort` and `variables` are
    variables of the template, the former refused if it does not read them.

    Raises InvalidRequest, which names the field, and its subclasses BadConversation and NotSupported.
    """
    if add_generation_prompt and continue_final_message:
        message = "add_generation_prompt and continue_final_message are both true; set one of them"
        raise InvalidRequest(message, param="continue_final_message")
    check_tools(tools or ())
    reading = template.reading(has_tools=bool(tools))
    for i, message in enumerate(messages):
        _check(message, f"messages.{i}")
        _check_shown(message, f"messages.{i}", reading)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return template.render(
        fitted(messages, reading),
        tools=fitted_tools(tools, reading) if tools else None,
        documents=documents or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables={**_effort(template, reasoning_effort), **(variables or {})},
    )


def left_out(templates: Templates) -> str | None:
    """Describe what the model's template leaves out of a conversation with tools; None for nothing."""
    try:
        template = templates.choose(None, has_tools=True)
    except UnknownTemplate:
        return None
    if not template.reads("tools"):
        return None
    reading = template.reading(has_tools=True)
    hidden = ["the calls of earlier replies"] * reading.hides_calls
    hidden += ["the results of tools"] * reading.hides_results
    return f"the chat template shows tools to the model, but not {' and '.join(hidden)}" if hidden else None


def reads_effort(template: ChatTemplate, effort: str) -> bool:
    """Whether `prompt_text` accepts this effort; "none" is always accepted."""
    return effort == "none" or template.reads("reasoning_effort")


def _effort(template: ChatTemplate, effort: str | None) -> dict[str, Any]:
    """The template's variables for this effort: `reasoning_effort`, or for "none" a switch of reasoning.

    Raises NotSupported if the template has neither, except for "none", since it then has no reasoning.
    """
    if effort is None:
        return {}
    if template.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort == "none":
        switch = next((name for name in ("enable_thinking", "thinking") if template.reads(name)), None)
        return {} if switch is None else {switch: False}
    message = f"reasoning_effort is {effort!r}, and the model's chat template does not read it; leave it out"
    raise NotSupported(message, param="reasoning_effort")


def _check(message: Any, path: str) -> None:
    """Raise InvalidRequest, which names the field, unless the message has the form of OpenAI's chat API."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} is not an object with a role and a content", param=path)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        text = f"{path}.role is {str(role)[:80]!r}; it must be one of {', '.join(ROLES)}"
        raise InvalidRequest(text, param=f"{path}.role")
    if content is None and role != "assistant":
        text = f"{path}.content is missing; give a text, or a list of parts of type text"
        raise InvalidRequest(text, param=f"{path}.content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str | None):
            text = f'{path}.content.{i} is no part of type text: {{"type": "text", "text": ...}}'
            raise InvalidRequest(text, param=f"{path}.content.{i}")
        if part.get("type") != "text":
            text = f"{path}.content.{i} is of type {str(part.get('type'))[:80]!r}; only text is supported"
            raise NotSupported(text, param=f"{path}.content.{i}.type")
    if not isinstance(content, str | list | None):
        text = f"{path}.content must be a text, or a list of parts of type text"
        raise InvalidRequest(text, param=f"{path}.content")
    for field, of_role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message.get(field) and role != of_role:
            text = f"{path}.{field} is for the role {of_role}, and this message's role is {role}"
            raise InvalidRequest(f"{text}; leave it out", param=f"{path}.{field}")
    if not isinstance(calls, list | None):
        raise InvalidRequest(f"{path}.tool_calls must be a list of calls", param=f"{path}.tool_calls")
    for i, call in enumerate(calls or ()):
        _check_call(call, f"{path}.tool_calls.{i}")


def _check_call(call: Any, path: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path} must have a function with a name and arguments", param=path)
    if not isinstance(function.get("arguments"), str | Mapping | None):
        path = f"{path}.function.arguments"
        raise InvalidRequest(f"{path} must be a JSON object, or its text", param=path)
    if not isinstance(call.get("id"), str | None):
        raise InvalidRequest(f"{path}.id must be a text", param=f"{path}.id")


def _check_shown(message: Message, path: str, reading: TemplateReading) -> None:
    """Raise NotSupported for a message that the template would silently leave out of the prompt."""
    if message["role"] == "tool" and reading.hides_results:
        text = f"{path}: the model's chat template leaves messages of the role tool out of the prompt; send "
        raise NotSupported(f"{text}the result in a message of the role user", param=path)
