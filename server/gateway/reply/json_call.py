"""Reads calls that are JSON objects with a name and arguments, in whichever order they are written."""

from collections.abc import Generator

from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Source

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")


def json_call(source: Source, reply: Reply) -> Generator[None, None, bool]:
    """Read `{"name": "f", "arguments": {...}}`, members in any order; `parameters` means `arguments`.

    True for a call of an offered function. Otherwise the recorded text becomes content; the caller has called
    `source.record()` before its marker.
    """
    yield from source.space()
    if (yield from source.marker("{")) is None:
        return _no_call(source, reply)
    name: str | None = None
    kept: list[str] | None = None  # arguments that came before the name
    begun = is_complete = False
    while True:
        yield from source.space()
        key = yield from source.string()
        yield from source.space()
        if key is None or (yield from source.marker(":")) is None:
            break
        yield from source.space()
        if key == "name" and name is None:
            name = yield from source.string()
            if name is None or name not in reply.offered:
                break
        elif key in _ARGUMENTS and not begun and kept is None:
            if name is None:
                kept = []
                whole = yield from source.json_object(kept.append)
            else:
                reply.begin(name)
                begun = True
                whole = yield from source.json_object(reply.arguments)
            if not whole:
                break
        elif key not in _IGNORED or (yield from source.string()) is None:
            break
        yield from source.space()
        end = yield from source.marker(",", "}")
        if end != ",":
            is_complete = end == "}"
            break
    if begun:
        return reply.end(is_complete, source.recorded())
    if not is_complete or name is None:
        return _no_call(source, reply)
    reply.begin(name)
    reply.arguments("".join(kept) if kept else "{}")
    return reply.end(True, source.recorded())


def named_call(source: Source, reply: Reply, name: str) -> Generator[None, None, bool]:
    """Read the arguments of a call whose function is known; otherwise like `json_call`."""
    yield from source.space()
    if name not in reply.offered or not (yield from source.at("{")):
        return _no_call(source, reply)
    reply.begin(name)
    is_complete = yield from source.json_object(reply.arguments)
    return reply.end(is_complete, source.recorded())


def _no_call(source: Source, reply: Reply) -> bool:
    reply.text(source.recorded())
    return False
