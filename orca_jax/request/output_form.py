"""The form of an output, besides what its sampling parameters say: that of a chat model's reply."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForm:
    """The form that a server gives to an output.

    `lark` is a grammar in llguidance's Lark, written by the server and not by a client; `@body` in it stands
    for the grammar of the sampling parameters, `@schema_0` for JSON by the first of `schemas`, which are
    clients' JSON schemas as text. A special token is `<[its id]>`. A grammar that cannot be
    followed is refused with the name `field`. `shown` are special tokens that appear in the text by their
    names, for a reader of it who tells its parts from each other; the others have no text.
    """

    lark: str | None = None
    schemas: tuple[str, ...] = ()
    shown: frozenset[str] = frozenset()
    field: str = "tools"


PLAIN_TEXT = OutputForm()
