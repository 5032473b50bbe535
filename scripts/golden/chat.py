"""Writes golden renderings of chat templates by transformers, for tests/endpoint/gateway/test_golden_chat.py.

Runs in an environment of its own, with transformers: tests/endpoint/data/chat_templates/README.md says how.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers.utils import chat_template_utils

DATA = Path(__file__).resolve().parents[2] / "tests" / "endpoint" / "data" / "chat_templates"
TODAY = datetime(2026, 11, 22, 12, 0)


class FixedDate(datetime):
    """A clock that always shows the same date."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return TODAY


def make_files(only: Sequence[str]) -> None:
    """Write golden.json and golden_openai.json."""
    chat_template_utils.datetime = FixedDate
    special_tokens = json.loads((DATA / "special_tokens.json").read_text("utf-8"))
    tokenizers_of = {family: tokenizer_of(family, tokens) for family, tokens in special_tokens.items()}
    write("golden.json", tokenizers_of, "conversations.json", rendered)
    write("golden_openai.json", tokenizers_of, "openai_conversations.json", rendered_twice)


def tokenizer_of(family: str, special_tokens: dict[str, str]) -> Any:
    """A tokenizer that has the family's templates and special tokens, and no vocabulary."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **special_tokens
    )
    tokenizer.chat_template = templates_of(family)
    return tokenizer


def write(
    name: str,
    tokenizers_of: dict[str, Any],
    conversations: str,
    render: Callable[[Any, dict[str, Any]], dict[str, Any]],
) -> None:
    """Write a file with each family's renderings of the conversations."""
    cases = json.loads((DATA / conversations).read_text("utf-8"))
    golden = {
        family: {
            case["name"]: render(tokenizer, case)
            for case in cases
            if family in case.get("families", [family])
        }
        for family, tokenizer in tokenizers_of.items()
    }
    lines = [
        f"{json.dumps(family)}: {{\n"
        + ",\n".join(f"{json.dumps(case)}: {json.dumps(text)}" for case, text in texts.items())
        + "\n}"
        for family, texts in golden.items()
    ]
    (DATA / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{name}: {sum(map(len, golden.values()))} renderings by transformers {transformers.__version__}")


def rendered_twice(tokenizer: Any, conversation: dict[str, Any]) -> dict[str, Any]:
    """Transformers' rendering of a conversation in the form of OpenAI's clients.

    With `objects`, where the result differs, also the rendering with tool-call arguments as objects, the
    form that transformers documents.
    """
    as_held = rendered(tokenizer, conversation)
    parsed = json.loads(json.dumps(conversation))
    for message in parsed["messages"]:
        for call in message.get("tool_calls") or ():
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
            except ValueError:
                pass  # a reply that ended within a call
    with_objects = rendered(tokenizer, parsed)
    return as_held if with_objects == as_held else {**as_held, "objects": with_objects}


def templates_of(family: str) -> str | dict[str, str]:
    """A family's only template, or several by name."""
    folder = DATA / family
    if folder.is_dir():
        return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
    return (DATA / f"{family}.jinja").read_text("utf-8")


def rendered(tokenizer: Any, conversation: dict[str, Any]) -> dict[str, str]:
    """Transformers' rendering as `text`, or its exception as `error`."""
    options = {
        name: conversation[name]
        for name in ("tools", "documents", "continue_final_message", "chat_template")
        if name in conversation
    }
    try:
        text = tokenizer.apply_chat_template(
            conversation["messages"],
            tokenize=False,
            add_generation_prompt=conversation.get("add_generation_prompt", True),
            **options,
            **conversation.get("variables", {}),
        )
    except Exception as error:  # a template can raise anything
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    return {"text": text}
