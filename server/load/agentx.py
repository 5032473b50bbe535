"""AgentX's traces of coding agents: conversations as lists of requests, with hashes of their prompts' blocks.

SemiAnalysis publishes them, captured with Callan Fox's kv-cache-tester, whose repository has hundreds. An
object has `block_size` and `requests`, each with seconds since the conversation's start (`t`), tokens `in`
and `out`, and `hash_ids`, a number for each full block; the same number in one conversation is the same
block. Requests of a subagent are nested in a request of the type "subagent", with times from its start or
from the conversation's.

Requests are sent when the trace says, as AIPerf's fixed schedule does, whether or not earlier ones of the
conversation have ended; all conversations start at once. Hashes of different conversations share nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from server.load.drawn_prompts import Blocks, Draw
from server.load.trace import TracedRequest
from server.load.trace_fields import FieldError, count, hashes, seconds


def is_conversation(fields: Mapping[str, Any]) -> bool:
    """Whether an object is a conversation of AgentX."""
    return "requests" in fields and "block_size" in fields


def agentx_requests(conversations: Iterable[Mapping[str, Any]], draw: Draw) -> list[TracedRequest]:
    """The requests of all conversations in order of time. Raises FieldError."""
    found: list[TracedRequest] = []
    for number, fields in enumerate(conversations):
        size = count(fields, "block_size")
        blocks = Blocks(draw, size, number)
        for start, request in _flat(fields):
            n_input = count(request, "in")
            prompt = blocks.prompt(hashes(request, n_input // size, size), n_input)
            # A request without output was cancelled there; one token is the least that can be asked for.
            found.append(TracedRequest(prompt, max(1, count(request, "out", 0)), start))
    return sorted(found, key=lambda request: request.arrival)


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Each request with its time from the conversation's start, those of subagents too."""
    for request in _requests(fields):
        start = seconds(request, "t")
        if request.get("type") != "subagent":
            yield start, request
            continue
        nested = [(seconds(each, "t"), each) for each in _requests(request)]
        relative = any(at < start for at, _ in nested)
        yield from ((at + relative * start, each) for at, each in nested)


def _requests(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = fields.get("requests")
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise FieldError("requests", "must be a list of objects")
    return value
