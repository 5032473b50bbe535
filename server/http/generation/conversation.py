"""Turns a conversation into prompt text with the model's chat template."""

from collections.abc import Sequence

from orca_jax.errors import NotSupported
from server.gateway.served_model import ServedModel
from server.http.fields.chat import ChatMessage


def text_of(model: ServedModel, messages: Sequence[ChatMessage]) -> str:
    """The prompt text for `messages`, special tokens included. Raises NotSupported and BadConversation.

    Call it in `run_for_request`: its cost grows with the messages.
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
    """A message for the template: parts joined by line breaks, and the role "developer" as "system".

    "developer" is OpenAI's newer name for that role, which chat templates do not know.
    """
    role = "system" if message.role == "developer" else message.role
    content = "\n".join(part.text or "" for part in message.content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **name}
