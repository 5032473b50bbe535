"""Vercel's AI SDK for JavaScript: text with a tool, whole and streamed, and an object."""

import json
from pathlib import Path

import pytest

from tests.clients import npm_programs
from tests.clients.page import MODEL, block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which a script finds the npm packages."""
    node_modules = npm_programs.FOLDER / "node_modules"
    (tmp_path / "node_modules").symlink_to(node_modules)
    return tmp_path


def run(script: str, folder: Path, *arguments: str) -> str:
    node = npm_programs.node()
    (folder / "script.mjs").write_text(script)
    return npm_programs.run([node, "script.mjs", *arguments], folder, folder / "home").stdout


def test_the_documented_program_prints_the_reply(errands: str, folder: Path) -> None:
    said = run(block("AI SDK", "javascript", errands), folder)
    assert said == "It says drizzle, as you asked.\n"


def test_a_stream_and_an_object(errands: str, url: str, folder: Path) -> None:
    script = (Path(__file__).parent / "ai_sdk.mjs").read_text()
    answer = json.loads(run(script, folder, errands + "/v1", MODEL, url, "demo"))
    assert "".join(answer["pieces"]) == "It says sleet, as you asked." and len(answer["pieces"]) > 3
    assert answer["steps"] == ["tool-calls", "stop"] and answer["usage"]["outputTokens"] > 20
    assert answer["object"]["place"] in ("Rome", "Oslo")
