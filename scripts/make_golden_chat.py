"""Writes golden renderings of chat templates by transformers, for tests/endpoint/gateway/test_golden_chat.py.

Runs in an environment of its own, with transformers: tests/endpoint/data/chat_templates/README.md says how.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers.utils import chat_template_utils

DATA = Path(__file__).resolve().parents[1] / "tests" / "endpoint" / "data" / "chat_templates"
TODAY = datetime(2026, 11, 22, 12, 0)


class FixedDate(datetime):
    """A clock that has stopped."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return TODAY


def main() -> None:
    """Write golden.json."""
    chat_template_utils.datetime = FixedDate
    conversations = json.loads((DATA / "conversations.json").read_text("utf-8"))
    special_tokens = json.loads((DATA / "special_tokens.json").read_text("utf-8"))
    golden: dict[str, dict[str, Any]] = {}
    for family, tokens in special_tokens.items():
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **tokens
        )
        tokenizer.chat_template = templates_of(family)
        for conversation in conversations:
            if family in conversation.get("families", [family]):
                golden.setdefault(family, {})[conversation["name"]] = rendered(tokenizer, conversation)
    lines = [
        f"{json.dumps(family)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
        + "\n}"
        for family, cases in golden.items()
    ]
    (DATA / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{sum(map(len, golden.values()))} renderings by transformers {transformers.__version__}")


def templates_of(family: str) -> str | dict[str, str]:
    """A family's only template, or several by name."""
    folder = DATA / family
    if folder.is_dir():
        return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
    return (DATA / f"{family}.jinja").read_text("utf-8")


def rendered(tokenizer: Any, conversation: dict[str, Any]) -> dict[str, str]:
    """What transformers renders, as `text`; or what it raises, as `error`."""
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


if __name__ == "__main__":
    main()
