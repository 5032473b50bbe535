"""The description of a format of tool calls."""

from dataclasses import dataclass

from server.gateway.reply.reply import Read


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """The form of calls: `open`, then for each call `before` NAME `between` ARGUMENTS `after`, with
    `separator` between two, then `close`. The arguments are a JSON object. A call is recognised by the text
    that it begins with, which is that of `open`, or else of `before`.
    """

    open: str = ""
    before: str
    between: str
    after: str
    separator: str
    close: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """The form and the parser of calls, and the `markers` that are special tokens in some tokenizers.

    A chat template that contains all of `signs` and none of `not_signs` has this format. With `is_whole`
    calls have no marker, and a reply is either text or calls.
    """

    name: str
    shape: CallShape
    read: Read
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    not_signs: tuple[str, ...] = ()
    is_whole: bool = False

    @property
    def first_marker(self) -> str:
        """The text that a call begins with."""
        return self.shape.open or self.shape.before

    def is_of(self, template: str) -> bool:
        """Whether this chat template makes the model write calls in this format."""
        return all(sign in template for sign in self.signs) and not any(
            sign in template for sign in self.not_signs
        )
