"""From a request to a chain of hashes of its prompt, by which a router finds who has computed its beginning.

The router compares prompts before they are tokenized:

- A text or a list of token ids ends with its last whole step. Of several prompts the first one counts.
- A message ends a step, whatever its length. So a conversation's chain goes on where it ended a turn ago, and
  the reply that has become part of the prompt since is among the steps that follow.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from server.http.bodies.json_text import parse
from server.ray.routing.prefix_choice import step_hashes

# What stands before the messages in a rendered prompt, or chooses the form that they are rendered in.
_BEFORE_MESSAGES = (
    *("tools", "documents", "chat_template", "chat_template_kwargs", "add_special_tokens"),
    *("system", "thinking"),  # of Anthropic's protocol
)
_KINDS = {"/v1/completions": "text", "/v1/chat/completions": "chat", "/v1/messages": "messages"}


def prefix_chain(path: str, tenant: bytes, body: bytes) -> tuple[int, ...]:
    """At most MOST_STEPS hashes of 64 bits; none if the request has no prompt or cannot be read.

    Requests of different tenants, models or `cache_salt` share nothing. 100 KB take about a millisecond, so
    call it by `run_for_request`.
    """
    kind = _KINDS.get(path)
    if kind is None:
        return ()
    try:
        request = parse(body)
        if not isinstance(request, dict):
            return ()
        if kind != "text":
            before = [request.get(name) for name in _BEFORE_MESSAGES]
            pieces, whole_steps = map(_canonical, _messages(request)), False
        else:
            kind, prompt = _prompt(request.get("prompt"))
            before, pieces, whole_steps = [request.get("add_special_tokens")], [prompt], True
        root = _canonical([kind, tenant.hex(), request.get("model"), request.get("cache_salt"), before])
        return step_hashes(root, pieces, whole_steps=whole_steps)
    except (HTTPException, TypeError, ValueError, OverflowError, RecursionError):
        return ()  # the engine that gets it says what is wrong


def _messages(request: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError("messages are not a list of objects")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _prompt(prompt: Any) -> tuple[str, bytes]:
    """The first prompt's kind and bytes. Raises TypeError, and OverflowError for a huge token id."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return "text", prompt.encode()
    if isinstance(prompt, list):
        return "ids", array("i", prompt).tobytes()
    raise TypeError("prompt is neither text nor token ids")


def _canonical(value: Any) -> bytes:
    """The same bytes for the same JSON value, whatever the order of an object's names."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
