"""Turns a request's conversation into prompt text with the model's chat template."""

from typing import Any

from orca_jax.request.chat.chat_template import ChatTemplate, Templates
from orca_jax.request.chat.conversation import prompt_text
from server.gateway.chat_template import template_for
from server.gateway.served_model import ServedModel
from server.http.fields.conversation import ChatMessage, ConversationFields
from server.http.fields.tools import check_tools


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
    has_tools = use_tools and bool(conversation.tools)
    template = template_for(model, conversation.chat_template, has_tools=has_tools)
    return _rendered(template, conversation, use_tools, reasoning_effort)


def rendered(
    templates: Templates,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The text of a conversation. Raises InvalidRequest, of which BadConversation and NotSupported."""
    has_tools = use_tools and bool(conversation.tools)
    template = templates.choose(conversation.chat_template, has_tools=has_tools)
    return _rendered(template, conversation, use_tools, reasoning_effort)


def _rendered(
    template: ChatTemplate, conversation: ConversationFields, use_tools: bool, reasoning_effort: str | None
) -> str:
    check_tools(conversation.tools or ())
    return prompt_text(
        template,
        [_as_json(message) for message in conversation.messages],
        tools=conversation.tools if use_tools else None,
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=bool(conversation.continue_final_message),
        reasoning_effort=reasoning_effort,
        variables=conversation.chat_template_kwargs,
    )


def _as_json(message: ChatMessage) -> dict[str, Any]:
    """The message as parsed JSON; values in the arguments of tool calls are kept as they are, also null."""
    plain = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    content: str | list[Any] | None = message.content
    if isinstance(content, list):
        content = [part.model_dump(exclude_none=True) for part in content]
    plain["content"] = content
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                **call.model_dump(exclude_none=True, exclude={"function"}),
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return plain
