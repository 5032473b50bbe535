"""Libraries preloaded for vLLM on a CPU."""

from pathlib import Path

import pytest

from bench.peers.preload import preloaded


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for folder in ("peer/bin", "peer/lib", "system"):
        (tmp_path / folder).mkdir(parents=True)
    # As in a virtual environment, the interpreter is a link to one elsewhere.
    (tmp_path / "peer/bin/python").symlink_to("/usr/bin/python3")
    return tmp_path


def test_both_libraries_are_found(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openmp = environment / "peer/lib/libiomp5.so"
    tcmalloc = environment / "system/libtcmalloc_minimal.so.4"
    openmp.touch()
    tcmalloc.touch()
    (environment / "system/libiomp5.so").touch()  # the environment's own comes first
    arguments = (str(environment / "peer/bin/python"), [str(environment / "system")])
    assert preloaded(*arguments) == (f"{tcmalloc}:{openmp}", ())
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")
    assert preloaded(*arguments) == (f"{tcmalloc}:{openmp}:/mine.so", ())


def test_what_is_missing_is_named(environment: Path) -> None:
    preload, missing = preloaded(str(environment / "peer/bin/python"), [str(environment / "system")])
    assert preload == ""
    assert missing == ("tcmalloc (libtcmalloc_minimal.so.4)", "OpenMP (libiomp5.so)")
