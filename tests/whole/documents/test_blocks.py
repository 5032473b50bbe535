"""Code blocks of the documents: each has a language, and is well formed in it."""

import json
import re

import pytest
import yaml

from scripts.site.commands import command_parsers
from server.cli import parser
from tests.documents import DOCUMENTS, Block, blocks, orca_arguments, relative
from tests.places import ROOT

LANGUAGES = {
    *("python", "sh", "console", "json", "yaml", "text", "mermaid", "promql"),
    *("toml", "javascript"),  # settings and programs of clients; tests/clients runs them
}
_INLINE = re.compile(rf"`(?:\.venv/bin/)?orca ({'|'.join(command_parsers())})\b([^`]*)`")


def test_every_block_says_its_language() -> None:
    wrong: list[str] = []
    for document in DOCUMENTS:
        open_fence, before = False, ""
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("```"):
                open_fence = not open_fence
                if open_fence and line.strip("` ") not in LANGUAGES:
                    wrong.append(f"{relative(document)}:{number} {line}")
            elif not open_fence and line.startswith("    ") and not before:
                wrong.append(f"{relative(document)}:{number} is indented; give it a fence")
            before = line
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text if block.text.startswith("{") else f"{{{block.text}}}")


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_yaml(block: Block) -> None:
    assert yaml.safe_load(block.text)


@pytest.mark.parametrize("block", blocks("sh", "console"), ids=str)
def test_orca_takes_its_arguments(block: Block) -> None:
    for words in block.commands():
        arguments = orca_arguments(words)
        if arguments is not None:
            parser().parse_args(arguments)


def test_commands_in_sentences_have_flags_that_exist() -> None:
    wrong: list[str] = []
    for document in DOCUMENTS:
        for name, rest in _INLINE.findall(" ".join(document.read_text(encoding="utf-8").split())):
            flags = {
                word.strip("[]").split("=")[0] for word in rest.split() if word.strip("[").startswith("--")
            }
            known = command_parsers()[name].format_help()
            wrong += [f"{relative(document)}: orca {name} {flag}" for flag in flags if flag not in known]
    assert not wrong


@pytest.mark.parametrize("block", blocks("sh", "console"), ids=str)
def test_make_has_the_targets(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in block.commands():
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets
