"""`orca convert`: the result gives the same tokens, and every mistake is one line."""

from pathlib import Path

import pytest

from orca_jax import LLM, SamplingParams
from server import cli

PROMPTS = ["a", "In the beginning", "1234567890", "zyx"]


def tokens(directory: Path) -> list[list[int]]:
    with LLM(directory, max_batch_size=2, max_batch_tokens=64) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return [result.token_ids for result in llm.generate(PROMPTS, params)]


def test_the_same_tokens_from_either_format(
    tiny_directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    orbax, back = tmp_path / "orbax", tmp_path / "back"
    assert cli.main(["convert", str(tiny_directory), str(orbax)]) == 0
    assert f"{orbax}: an Orbax checkpoint" in capfd.readouterr().err
    assert cli.main(["convert", str(orbax), str(back), "--dtype", "float32"]) == 0
    assert f"{back}: safetensors" in capfd.readouterr().err
    expected = tokens(tiny_directory)
    assert len({tuple(one) for one in expected}) > 1
    assert tokens(orbax) == tokens(back) == expected


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        ("missing/model/x", "new", "no directory"),
        ("{model}", "{model}", "already exists"),
        ("{empty}", "new", "has no config.json"),
    ],
)
def test_a_mistake_is_one_line(
    tiny_directory: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    source: str,
    destination: str,
    words: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"model": tiny_directory, "empty": tmp_path / "empty"}
    target = destination.format(**places) if "{" in destination else str(tmp_path / destination)
    assert cli.main(["convert", source.format(**places), target]) == 2
    stderr = capfd.readouterr().err
    assert words in stderr and stderr.startswith("orca: error: ") and stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_an_unknown_dtype(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "a", "b", "--dtype", "int8"]) == 2
    assert "int8" in capfd.readouterr().err
