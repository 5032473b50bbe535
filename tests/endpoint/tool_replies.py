"""A model that reasons and calls tools: its template, and engines that generate given replies."""

from collections.abc import Callable

from orca_jax.request.request import Request
from tests.endpoint.harness import END

# A template of Hermes's form, with reasoning that a client may turn off.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Replies:
    """An engine's tokens: `text`, then the end; it records the last prompt."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.prompt = ""

    def __call__(self, request: Request, index: int) -> int:
        self.prompt = bytes(request.prompt_ids).decode()
        data = self.text.encode()
        return data[index] if index < len(data) else END


def ending(text: str) -> Callable[[Request, int], int]:
    """An engine's tokens that spell `text`, and then the end."""
    return Replies(text)
