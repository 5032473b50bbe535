"""The formats of reasoning: text between two markers, at the beginning of the reply."""

from dataclasses import dataclass

from server.gateway.reply.reply import Read, Reply
from server.gateway.reply.source import Reading, Source, stops


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """Reasoning between `open` and `close`. Chat templates that contain all of `signs` have this format."""

    name: str
    open: str
    close: str
    signs: tuple[str, ...]

    def is_of(self, template: str) -> bool:
        """Whether a model with this chat template writes reasoning in this format."""
        return all(sign in template for sign in self.signs)

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that are special tokens in some tokenizers."""
        return self.open, self.close

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends with the marker that begins reasoning."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends with the marker that ends reasoning, so that the reply has none."""
        return prompt.rstrip().endswith(self.close)

    def reading(self, then: Read, *, opened: bool) -> Read:
        """A function that reads optional reasoning, and then what `then` reads."""
        close = stops(self.close)

        def read(source: Source, reply: Reply) -> Reading:
            if not opened:
                source.record()
                yield from source.space()
                if (yield from source.marker(self.open)) is None:
                    reply.text(source.recorded())
                    yield from then(source, reply)
                    return
                begin = source.offset - len(source.recorded())
            else:
                begin = 0
            reply.begin_reasoning(begin)
            if (yield from source.pass_text(close, reply.reasoning)) is not None:
                reply.end_reasoning(source.offset)
                yield from then(source, reply)

        return read


def plain_text(source: Source, reply: Reply) -> Reading:
    """Read a reply that is only text."""
    yield from source.rest(reply.text)


THINK = ReasoningFormat(name="think", open="<think>", close="</think>", signs=("</think>",))
MISTRAL_REASONING = ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]", signs=("[THINK]",))
GRANITE = ReasoningFormat(
    name="granite",
    open="Here is my thought process:",
    close="Here is my response:",
    signs=("Here is my thought process:", "Here is my response:"),
)
