"""The parts of a reply as events, in the order of generation. Every chat route reads these.

    parser = plan.parser()
    for piece in request:
        events = parser.feed(piece.text)
    events = parser.finish()

Texts come in fragments of any size. A call begins once its function is known, and its arguments, the text of
a JSON object, follow in fragments; calls do not overlap. How an output is cut into pieces affects only the
size of the fragments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """A fragment of the reply's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A fragment of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function that the request offers. `index` counts the reply's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete: its arguments are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallCut:
    """A call turned out to be invalid: it was cut off, or its arguments are not JSON. `text` is all of it.

    A stream has already sent its beginning. A whole reply leaves the call out, and has its text as content.
    """

    index: int
    text: str


ReplyEvent = Text | Reasoning | CallBegin | CallArguments | CallEnd | CallCut


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A complete reply. `reasoning` is None without reasoning; `content` is None for calls without text."""

    content: str | None
    reasoning: str | None
    calls: Sequence[Call] = field(default_factory=list[Call])


def whole_reply(events: Iterable[ReplyEvent]) -> WholeReply:
    """Combine events into a whole reply."""
    content, reasoning = list[str](), list[str]()
    begun = dict[int, tuple[CallBegin, list[str]]]()
    calls = list[Call]()
    for event in events:
        match event:
            case Text(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(index):
                begun[index] = event, []
            case CallArguments(index, text):
                begun[index][1].append(text)
            case CallEnd(index):
                begin, arguments = begun.pop(index)
                calls.append(Call(begin.id, begin.name, "".join(arguments)))
            case CallCut(index, text):
                del begun[index]
                content.append(text)
    assert not begun, "every call ends"
    text = "".join(content)
    return WholeReply(text if text or not calls else None, "".join(reasoning) or None, calls)
