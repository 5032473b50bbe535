"""Conversations as prompts of one model, for `LLM.chat` and the commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.chat.chat_template import ChatTemplate, Templates
from orca_jax.request.chat.conversation import prompt_text
from orca_jax.request.chat.template_files import template_from
from orca_jax.request.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompts:
    """A model's name, tokenizer and chat templates, and the directory of its tokenizer's files.

    `advice` tells the user of a model without templates what to do.
    """

    model: str
    tokenizer: Tokenizer | None
    templates: Templates | None
    directory: Path | None = None
    has_encoder: bool = False
    advice: str = "give one as chat_template, or prompts instead of messages"

    def template(self, given: str | Path | None = None, *, has_tools: bool = False) -> ChatTemplate:
        """The `given` template (a text, a file, or the name of one of the model's), or the model's choice.

        Raises NotSupported if there is none, or if it does not show tools to the model although there are
        some; UnknownTemplate for an unknown name; CorruptFile for an invalid template.
        """
        if self.has_encoder:
            message = f"{self.model} has an encoder, which reads one text; give prompts instead of messages"
            raise NotSupported(message, param="messages")
        if self.tokenizer is None:
            message = f"{self.model} has no tokenizer, so it reads no messages; give token ids as prompts"
            raise NotSupported(message, param="messages")
        if isinstance(given, Path) or (given is not None and "{" in given):
            template = template_from(given, self.directory)
        elif self.templates is None:
            raise NotSupported(f"{self.model} has no chat template; {self.advice}", param="messages")
        else:
            template = self.templates.choose(given, has_tools=has_tools)
        if has_tools and not template.reads("tools"):
            message = "the chat template does not show tools to the model; leave tools out"
            raise NotSupported(message, param="tools")
        return template

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a text rendered by a template, which contains the special tokens."""
        assert self.tokenizer is not None, "it has a template"
        return self.tokenizer.encode(text, add_special_tokens=False)

    def listed(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """The token ids of a conversation, or of each of a list of them. Raises InvalidRequest."""
        conversations = _listed(messages)
        template = self.template(chat_template, has_tools=bool(tools))
        prompts: list[list[int]] = []
        for i, conversation in enumerate(conversations):
            try:
                text = prompt_text(
                    template,
                    conversation,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=chat_template_kwargs,
                )
                prompts.append(self.token_ids(text))
            except InvalidRequest as error:
                if len(conversations) > 1:
                    error.args = (f"conversation {i}: {error}",)
                raise
        return prompts


def _listed(messages: Any) -> list[list[Any]]:
    """A list of conversations, from one or several. Raises InvalidRequest."""
    if not isinstance(messages, list | tuple):
        text = f"messages is {type(messages).__name__}; it must be a list of messages, or of conversations"
        raise InvalidRequest(text, param="messages")
    if not messages or isinstance(messages[0], Mapping):
        return [list(messages)]
    for i, conversation in enumerate(messages):
        if not isinstance(conversation, list | tuple):
            text = f"conversation {i} is {type(conversation).__name__}; it must be a list of messages"
            raise InvalidRequest(text, param="messages")
    return [list(conversation) for conversation in messages]
