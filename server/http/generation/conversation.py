"""A conversation as the model sees it: one text, made by the model's chat template."""

from collections.abc import Sequence

from orca_jax.errors import NotSupported
from server.gateway.served_model import ServedModel
from server.http.fields.chat import ChatMessage


def text_of(model: ServedModel, messages: Sequence[ChatMessage]) -> str:
    """The text of `messages`, special tokens included; runs as `reading`, as it takes time with each of them.

    Raises NotSupported, and BadConversation.
    """
    if model.tokenizer is None:
        message = f"{model.name} has no tokenizer, so it reads no messages; give token ids to /v1/completions"
        raise NotSupported(message, param="messages")
    template = model.chat_template
    if template is None:
        message = f"{model.name} has no chat template; use /v1/completions, or start the server with "
        raise NotSupported(f"{message}--chat-template FILE", param="messages")
    conversation = [_plain(message) for message in messages]
    return template.render(conversation)


def _plain(message: ChatMessage) -> dict[str, str]:
    """Parts joined by line breaks; "developer" is a newer name of the role that templates know as system."""
    role = "system" if message.role == "developer" else message.role
    content = "\n".join(part.text or "" for part in message.content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **name}
