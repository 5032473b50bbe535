"""The chat template that a request to the served model is rendered with."""

from orca_jax.errors import NotSupported
from orca_jax.request.chat.chat_template import ChatTemplate
from server.gateway.served_model import ServedModel


def template_for(model: ServedModel, name: str | None, *, has_tools: bool) -> ChatTemplate:
    """The template called `name`, or the model's choice.

    Raises NotSupported if the model reads no conversations, or no tools and there are some; UnknownTemplate.
    """
    if model.tokenizer is None:
        message = f"{model.name} has no tokenizer, so it reads no messages; give token ids to /v1/completions"
        raise NotSupported(message, param="messages")
    if model.chat_template is None:
        message = f"{model.name} has no chat template; use /v1/completions, or start the server with "
        raise NotSupported(f"{message}--chat-template FILE", param="messages")
    template = model.chat_template.choose(name, has_tools=has_tools)
    if has_tools and not template.reads("tools"):
        message = "the model's chat template does not show tools to the model; leave tools out, or set "
        raise NotSupported(message + 'tool_choice to "none"', param="tools")
    return template
