"""The default name of a served model."""

from pathlib import Path

import pytest

from server.settings.serve_settings import model_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "demo"),
        ("gpt2", "gpt2"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("my_package.my_file:make", "my_package.my_file:make"),
        ("/data/models/llama", "llama"),
        ("/data/models/llama/", "llama"),
        ("/data/models/other/../llama/.", "llama"),
        ("models/llama/", "llama"),
        ("./llama", "llama"),
        ("~/models/llama", "llama"),
        ("/c/models--org--name/snapshots/0123abc", "org/name"),
        ("/c/models--org--a-name/snapshots/0123abc/", "org/a-name"),
        ("/c/models--gpt2/snapshots/0123abc", "gpt2"),
        ("/runs/snapshots/40", "40"),
        ("/", "/"),
    ],
)
def test_the_default_name_is_short_and_without_folders(model: str | None, name: str) -> None:
    assert model_name(model) == name


def test_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "org" / "model")
    assert (model_name("."), model_name("./"), model_name("..")) == ("model", "model", "org")
    monkeypatch.chdir(tmp_path)
    assert model_name("org/model") == "model"  # a directory, and not on the hub


def test_a_link_has_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "assistant").symlink_to(tmp_path / "checkpoint-500")
    assert model_name(str(tmp_path / "assistant")) == "assistant"
