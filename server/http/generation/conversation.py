"""Turns a conversation into prompt text with the model's chat template."""

import json
from typing import Any

from orca_jax.errors import InvalidRequest, NotSupported
from server.gateway.chat_template import ChatTemplate, Templates
from server.gateway.served_model import ServedModel
from server.http.fields.conversation import ChatMessage, ConversationFields, ToolCall


def text_of(
    model: ServedModel,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The prompt text of a conversation, special tokens included; without `use_tools` its tools are left out.

    `reasoning_effort` is a variable of some templates, and refused for the others.

    Raises NotSupported, InvalidRequest and its subclass BadConversation. Call it in `run_for_request`: its
    cost grows with the messages.
    """
    if model.tokenizer is None:
        message = f"{model.name} has no tokenizer, so it reads no messages; give token ids to /v1/completions"
        raise NotSupported(message, param="messages")
    templates = model.chat_template
    if templates is None:
        message = f"{model.name} has no chat template; use /v1/completions, or start the server with "
        raise NotSupported(f"{message}--chat-template FILE", param="messages")
    if use_tools and conversation.tools:
        template = templates.choose(conversation.chat_template, has_tools=True)
        if not template.reads("tools"):
            message = "the model's chat template does not show tools to the model; leave tools out, or set "
            raise NotSupported(message + 'tool_choice to "none"', param="tools")
    return rendered(templates, conversation, use_tools=use_tools, reasoning_effort=reasoning_effort)


def rendered(
    templates: Templates,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The text of a conversation. Raises InvalidRequest, of which BadConversation and NotSupported."""
    conversation.check_conversation()
    tools = (conversation.tools or None) if use_tools else None
    template = templates.choose(conversation.chat_template, has_tools=tools is not None)
    continues = bool(conversation.continue_final_message)
    begins_reply = conversation.add_generation_prompt
    return template.render(
        [_plain(message, i, template) for i, message in enumerate(conversation.messages)],
        tools=tools,
        documents=conversation.documents or None,
        add_generation_prompt=not continues if begins_reply is None else begins_reply,
        continue_final_message=continues,
        variables={**_effort(template, reasoning_effort), **(conversation.chat_template_kwargs or {})},
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


def _plain(message: ChatMessage, index: int, template: ChatTemplate) -> dict[str, Any]:
    """A message for the template, as a JSON object without null fields.

    A content of several parts stays a list only if the template reads lists; otherwise the texts are joined
    by line breaks. The role "developer" becomes "system" unless the template knows it: it is OpenAI's newer
    name for that role.
    """
    plain = message.model_dump(exclude_none=True, exclude={"tool_calls", "content"})
    if message.role == "developer" and not template.knows_developer:
        plain["role"] = "system"
    content: str | list[Any] | None = message.content
    if isinstance(content, list):
        texts = [part.text or "" for part in content]
        content = "\n".join(texts)
        if template.reads_parts:
            content = [{"type": "text", "text": text} for text in texts]
    if content is not None:
        plain["content"] = content
    if message.tool_calls:
        path = f"messages.{index}.tool_calls"
        plain["tool_calls"] = [_call(call, f"{path}.{i}") for i, call in enumerate(message.tool_calls)]
    return plain


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates expect; OpenAI's API has them as text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            path = f"{path}.function.arguments"
            raise InvalidRequest(f"{path} is not the text of a JSON object", param=path)
    plain = call.model_dump(exclude_none=True, exclude={"function"})
    return {**plain, "function": {"name": call.function.name, "arguments": arguments}}
