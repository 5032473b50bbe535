"""Turns a conversation in OpenAI's form into the prompt's text, with the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.chat.chat_template import ChatTemplate, Message


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
    text parts or None, and arguments of tool calls are an object or its text. By default
    the text ends with the start of the model's reply; with `continue_final_message`
    it ends with the last message's content. `reasoning_effort` and `variables` are variables of the template,
    the former refused if it does not read them.

    Raises InvalidRequest, which names the field, and its subclasses BadConversation and NotSupported.
    """
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return template.render(
        [_plain(message, i, template) for i, message in enumerate(messages)],
        tools=tools or None,
        documents=documents or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables={**_effort(template, reasoning_effort), **(variables or {})},
    )


def _effort(template: ChatTemplate, effort: str | None) -> dict[str, Any]:
    """The template's variables for this effort: of its own name, or for "none" the one that turns reasoning
    off.

    Raises NotSupported if there is none, but a model without reasoning makes no effort anyway.
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


def _plain(message: Message, index: int, template: ChatTemplate) -> dict[str, Any]:
    """A message for the template, as a JSON object without null fields.

    A content of several parts stays a list only if the template reads lists; otherwise the texts are joined
    by line breaks. The role "developer" becomes "system" unless the template knows it: it is OpenAI's newer
    name for that role.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "developer" and not template.knows_developer:
        plain["role"] = "system"
    content = plain.get("content")
    if isinstance(content, list):
        texts = [part.get("text") or "" for part in content]
        plain["content"] = "\n".join(texts)
        if template.reads_parts:
            plain["content"] = [{"type": "text", "text": text} for text in texts]
    if calls := plain.pop("tool_calls", None):
        path = f"messages.{index}.tool_calls"
        plain["tool_calls"] = [_call(call, f"{path}.{i}") for i, call in enumerate(calls)]
    return plain


def _call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates expect; OpenAI's API has them as text."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            path = f"{path}.function.arguments"
            raise InvalidRequest(f"{path} is not the text of a JSON object", param=path)
    plain = {key: value for key, value in call.items() if value is not None}
    return {**plain, "function": {"name": call["function"]["name"], "arguments": arguments}}
