"""What a format of tool calls is."""

from dataclasses import dataclass

from server.gateway.reply.reply import Read


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """How calls are written: `open`, then for each call `before` NAME `between` ARGUMENTS `after`, with
    `separator` between two, then `close`. The arguments are a JSON object. The text that comes first, that of
    `open` or `before`, is the marker that a call begins with.
    """

    open: str = ""
    before: str
    between: str
    after: str
    separator: str
    close: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """A format: its name, how its calls are written and read, and the `markers` that are special tokens in
    some
    tokenizers.

    A chat template has this format if it has all of `signs`, and none of `not_signs`. Where calls have no
    marker (`is_whole`) a reply is either text or calls.
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
        """What a call begins with."""
        return self.shape.open or self.shape.before

    def is_of(self, template: str) -> bool:
        """Whether this chat template tells the model to write calls so."""
        return all(sign in template for sign in self.signs) and not any(
            sign in template for sign in self.not_signs
        )
