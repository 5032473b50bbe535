"""`--record` and `orca replay` on a real engine: the same batches and bits, and what differs is found."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.service.recording import read_recording
from server import cli
from tests.places import ROOT

SIZES: dict[str, Any] = {"max_batch_size": 3, "max_batch_tokens": 64, "n_slots": 256}


def serve_a_little(llm: LLM) -> None:
    """Serve five users at once, one of whom disconnects."""

    def user(number: int) -> None:
        for i in range(2):
            sampling = SamplingParams(max_tokens=6 + number, logprobs=1, ignore_eos=True)
            with llm.stream([65 + number] * (5 * i + number + 1), sampling) as stream:
                next(stream)
                if number != 3:
                    stream.result(60)

    threads = [threading.Thread(target=user, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.fixture(scope="module")
def recording(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "traffic.jsonl"
    with LLM(tiny_directory, **SIZES, deterministic=True, seed=5, record=path, speculative="ngram") as llm:
        serve_a_little(llm)
    return path


def test_the_same_batches_and_bits(recording: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorded = read_recording(recording)
    assert cli.main(["replay", str(recording)]) == 0
    n_tokens = sum(len(end.output_ids) for end in recorded.ends.values())
    stdout = capfd.readouterr().out
    assert stdout.splitlines() == [
        f"10 requests, {len(recorded.iterations)} iterations, {n_tokens} output tokens",
        "the same batches in every iteration",
        "10 of 10 outputs are the same",
    ]
    assert all(end.logprobs for end in recorded.ends.values() if end.output_ids)


@pytest.mark.matrix(but=["deterministic"])
@pytest.mark.parametrize("name", ["default", "deterministic"])
def test_recordings_of_an_earlier_version_have_the_same_batches(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Recorded at commit 81d2993: chunked prompts, log-probabilities, beams, embeddings, scored outputs."""
    cli.main(["replay", str(ROOT / "tests" / "data" / "recordings" / f"{name}.jsonl")])
    assert "the same batches in every iteration" in capfd.readouterr().out


def test_another_bit_is_found(recording: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A log-probability that is the next float32 is reported as a difference."""
    lines = [json.loads(line) for line in recording.read_text(encoding="utf-8").splitlines()]
    end = next(line for line in lines if "finished" in line and len(line["output"]) > 2)
    end["logprobs"][2] *= 1 + 2**-22
    changed = tmp_path / "changed"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert cli.main(["replay", str(changed)]) == 1
    stdout = capfd.readouterr().out
    assert "9 of 10 outputs" in stdout and "differs from its token 2 on" in stdout


def test_the_schedule_alone_needs_no_jax(recording: Path) -> None:
    hides = "import sys; sys.modules.update(jax=None, flax=None); from server.cli import main; "
    code = f"{hides}sys.exit(main(['replay', '--simulate', {str(recording)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the same batches in every iteration" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "cannot be read"),
        (["{file}", "--simulate", "--model", "x"], "leave MODEL out"),
        (["{file}", "--model", "{demo}"], "pass the place of the recorded one"),
    ],
)
def test_a_mistake_is_one_line(
    recording: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    demo = ROOT / "orca_jax" / "demo_model"
    assert cli.main(["replay", *[a.format(file=recording, demo=demo) for a in arguments]]) == 2
    stderr = capfd.readouterr().err
    assert words in stderr and stderr.startswith("orca: error: ") and stderr.count("\n") == 1
