"""Conversations as text, in the form of ShareGPT's files: lists of messages, by whom and what.

A message has `from` and `value` (human and gpt), or `role` and `content` (user and assistant). A turn is the
messages before an answer; its prompt is the conversation so far, with the server's own answers. An answer's
length is that of the file. The files have no times, so all conversations arrive at once.

There is no tokenizer here: a token is a piece of up to four letters of a word, or one other character, which
is about what tokenizers make of English. Equal texts give equal tokens.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from server.load.trace import TracedRequest
from server.load.trace_fields import FieldError

_PIECE = re.compile(r"\w{1,4}|[^\w\s]")
_ANSWERS = {"gpt", "chatgpt", "bing", "bard", "assistant", "model"}


def is_conversation(fields: Mapping[str, Any]) -> bool:
    """Whether an object is a conversation as text."""
    return "conversations" in fields or "messages" in fields


def sharegpt_requests(conversations: Iterable[Any], vocab_size: int) -> Iterator[TracedRequest]:
    """The turns of each conversation. Raises FieldError."""
    n = 0
    for fields in conversations:
        before: int | None = None
        prompt: list[int] = []
        for sender, text in _messages(fields):
            ids = [zlib.crc32(piece.encode()) % vocab_size for piece in _PIECE.findall(text)]
            if sender not in _ANSWERS:
                prompt += ids
            elif prompt and ids:
                yield TracedRequest(tuple(prompt), len(ids), 0.0, before)
                before, prompt = n, []
                n += 1


def _messages(fields: Any) -> Iterator[tuple[str, str]]:
    messages = fields.get("conversations", fields.get("messages")) if isinstance(fields, dict) else None
    if not isinstance(messages, list):
        raise FieldError("conversations", "must be a list of messages")
    for message in messages:
        sender = message.get("from", message.get("role")) if isinstance(message, dict) else None
        text = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if not isinstance(sender, str) or not isinstance(text, str):
            raise FieldError("a message", "must have from and value, or role and content")
        yield sender, text
