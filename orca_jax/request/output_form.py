"""The form of a chat model's reply, in addition to its sampling parameters."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForm:
    """The form that a server gives to an output.

    `lark` is a grammar in llguidance's Lark, written by the server and not by a client. In it, `@body` stands
    for the grammar of the sampling parameters, `@schema_0` for JSON that follows the first of `schemas`
    (clients' JSON schemas as text), and `<[id]>` for a special token. An error about an impossible grammar
    names `field`. The special tokens in `shown` appear in the text by name, so that its reader can separate
    the parts of a reply; other special tokens have no text.
    """

    lark: str | None = None
    schemas: tuple[str, ...] = ()
    shown: frozenset[str] = frozenset()
    field: str = "tools"


PLAIN_TEXT = OutputForm()
