"""The `orca` commands of the documents run as they stand, with the demo model as every checkpoint."""

import shlex
from pathlib import Path

import pytest

from tests.documents import Block, blocks, orca_arguments
from tests.whole.documents.commands import prepare, run, serving

# What is in a command, and why it is not run here.
NOT_RUN = {
    "--workers": "several machines; tests/whole/workers",
    "worker": "several machines; tests/whole/workers",
    "--replicas": "needs Ray; tests/ray/test_launch.py",
    "--kv-events": "needs ZeroMQ; tests/scaleout/test_serve_kv_events.py",
    "--role": "two servers; tests/device/launch/test_travelling_blocks.py",
    "route": "three servers; tests/whole/server/test_apart.py",
    "--worker-processes": "tests/whole/workers",
    "/image/programs": "a folder of an image; tests/whole/commands/test_compile_ahead.py",
    "DST": "a form to fill in; tests/whole/commands/test_convert_command.py",
    "my_package.my_file:make_model": "a model to write; tests/whole/commands/test_own_model.py",
    "my_package.my_file:trainers_side": "a trainer to compare with; tests/whole/rollout/test_layer_gaps.py",
    "examples.train_own_model:saved": "a folder to train; tests/whole/commands/test_own_model.py",
    "serve path/to/checkpoint --pipeline-parallel 2 --tensor-parallel 8": "sixteen devices",
    "shortest_first:ShortestFirst": "a policy to write; test_policy_tutorial.py",
    "deepseek-ai/DeepSeek-V3": "a checkpoint with a head; tests/device/engine/test_draft_heads.py",
    "eagle3:path/to/head": "a head to download; tests/device/engine/test_eagle3.py",
    "draft:Qwen/Qwen3-0.6B": "a second model to download; tests/whole/training/test_draft_model.py",
    "--lora": "needs adapters; tests/whole/adapters",
    "model.gguf": "a file to download; tests/whole/commands/test_real_models.py",
    "bench": "needs a server, and minutes; tests/endpoint/load",
    "gpt2": "measures this machine for 15 seconds; tests/endpoint/settings/test_plan_command.py",
}
# Commands of other programs are not run: what they need is a GPU, a cluster, or hours.


def reasons(words: list[str]) -> list[str]:
    """The reasons of NOT_RUN that hold for a command of `orca`."""
    command = f" {' '.join(words)} "
    return [phrase for phrase in NOT_RUN if f" {phrase} " in command and orca_arguments(words)]


RUN = [
    (block, number, words)
    for block in blocks("sh")
    for number, words in enumerate(block.commands())
    if orca_arguments(words) and not reasons(words)
]
COMMANDS = [pytest.param(block, words, id=f"{block}-{words[0]}-{number}") for block, number, words in RUN]


def test_what_is_not_run_is_there() -> None:
    used = {phrase for block in blocks("sh") for words in block.commands() for phrase in reasons(words)}
    assert used == set(NOT_RUN)


def arguments(words: list[str]) -> list[str]:
    found = orca_arguments(words)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands, in the documents' order: some read what an earlier one wrote."""
    folder = tmp_path_factory.mktemp("commands")
    prepare(folder)
    (settings,) = (block for block in blocks("yaml") if block.first == "# serve.yaml")
    (folder / "serve.yaml").write_text(settings.text, encoding="utf-8")
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block, words", COMMANDS)
def test_it_runs(block: Block, words: list[str], folder: Path) -> None:
    of_block = [own for other, _, own in RUN if other == block]
    for earlier in of_block[: of_block.index(words)]:  # they may have run in another process, or not at all
        if any("--record" in word for word in earlier):
            check(earlier, folder)
    check(words, folder)


def check(words: list[str], folder: Path) -> None:
    command = ["orca", *arguments(words)]
    if command[1] == "serve":
        with serving(command, folder) as url:
            assert run(["curl", "--fail", "--silent", f"{url}/ready"], folder).returncode == 0
    else:
        done = run(command, folder)
        assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [one for one in blocks("console") if "$ orca" in one.text], ids=str)
def test_it_prints_what_the_document_shows(block: Block, folder: Path) -> None:
    command, _, shown = block.text.replace("\\\n", " ").partition("\n")
    done = run(["orca", *arguments(shlex.split(command)[1:])], folder)
    printed = " ".join((done.stdout + done.stderr).split())
    missing = [line for line in shown.splitlines() if line != "..." and " ".join(line.split()) not in printed]
    assert not missing, done.stdout + done.stderr
