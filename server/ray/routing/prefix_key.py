"""Turns a request into hashes, by which a router finds the engine that computed its prompt's beginning.

The router compares prompts before they are tokenized:

- The chain of a text or a list of token ids ends with its last whole step. Only the first prompt counts.
- Each message ends a step, whatever its length. So the chain of a conversation continues that of the turn
  before, with steps for the reply and the new message.
"""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from server.http.bodies.json_text import parse
from server.ray.routing.prefix_choice import NO_KEY, RoutingKey, step_hashes

# Fields that are rendered before the messages, or that choose how messages are rendered.
_BEFORE_MESSAGES = (
    *("tools", "documents", "chat_template", "chat_template_kwargs", "add_special_tokens"),
    *("system", "thinking"),  # in Anthropic's protocol
)
_KINDS = {"/v1/completions": "text", "/v1/chat/completions": "chat", "/v1/messages": "messages"}


def routing_key(path: str, tenant: bytes, body: bytes, base: str | None = None) -> RoutingKey:
    """Make a request's hashes, at most MOST_STEPS of its prompt; none without a readable prompt.

    Requests with different tenants, models or `cache_salt` share no hashes of prompts. `base` is the name of
    the engines' model, and other names are of adapters. 100 KB take about a millisecond, so call it by
    `run_for_request`.
    """
    kind = _KINDS.get(path)
    if kind is None:
        return NO_KEY
    try:
        request = parse(body)
        if not isinstance(request, dict):
            return NO_KEY
        if kind != "text":
            before = [request.get(name) for name in _BEFORE_MESSAGES]
            pieces, whole_steps = map(_canonical, _messages(request)), False
        else:
            kind, prompt = _prompt(request.get("prompt"))
            before, pieces, whole_steps = [request.get("add_special_tokens")], [prompt], True
        model = request.get("model")
        root = _canonical([kind, tenant.hex(), model, request.get("cache_salt"), before])
        chain = step_hashes(root, pieces, whole_steps=whole_steps)
        if isinstance(model, str) and base is not None and model != base:
            return RoutingKey(chain, _of_name(model))
        return RoutingKey(chain)
    except (HTTPException, TypeError, ValueError, OverflowError, RecursionError):
        return NO_KEY  # the engine says what is wrong with the request


def _messages(request: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError("messages are not a list of objects")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _prompt(prompt: Any) -> tuple[str, bytes]:
    """Return the first prompt's kind and bytes. Raises TypeError, and OverflowError for a huge token id."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return "text", prompt.encode()
    if isinstance(prompt, list):
        return "ids", array("i", prompt).tobytes()
    raise TypeError("prompt is neither text nor token ids")


def _of_name(adapter: str) -> int:
    digest = hashlib.blake2b(adapter.encode(), digest_size=8, person=b"adapter").digest()
    return int.from_bytes(digest, "little")


def _canonical(value: Any) -> bytes:
    """Write a JSON value with sorted names, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
