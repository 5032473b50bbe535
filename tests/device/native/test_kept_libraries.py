"""Built libraries are kept between processes, and built again when anything they depend on changes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.native import compiler
from tests.device.native.native_form import needs_native

pytestmark = needs_native

# Without optimizations: what is tested is which library is kept, not what it computes.
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "{version}";; *) echo built >> {log}; exec {real} "$@" -O0;; esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder that keeps libraries during a test."""
    before = compiler._kept_in
    compiler.keep_libraries(tmp_path / "kept")
    yield tmp_path / "kept" / "native"
    compiler._kept_in = before


class Compiler:
    """A script that calls the machine's compiler and counts the builds."""

    def __init__(self, place: Path, real: str) -> None:
        self.place, self._real, self._log = place, real, place / "log"
        self.version("1.0")

    def version(self, version: str) -> None:
        self.place.mkdir(exist_ok=True)
        script = self.place / "cc"
        script.write_text(COMPILER.format(version=version, log=self._log, real=self._real))
        script.chmod(0o755)

    @property
    def n_built(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


@pytest.fixture
def cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    real = next(filter(None, map(compiler.shutil.which, ("cc", "gcc", "clang"))))
    made = Compiler(tmp_path / "bin", real)
    monkeypatch.setenv("PATH", f"{made.place}:/usr/bin:/bin")
    return made


def build(**sizes: int) -> None:
    """Build as a new process would, whatever was loaded before."""
    assert compiler._library("linear", tuple(sizes.items())).linear


def test_a_library_is_built_once(folder: Path, cc: Compiler) -> None:
    for _ in range(3):
        build()
    assert cc.n_built == 1
    (file,) = folder.iterdir()
    assert file.name.startswith("linear-") and file.suffix == ".so"


def test_without_a_folder_nothing_is_kept(tmp_path: Path, folder: Path, cc: Compiler) -> None:
    compiler.keep_libraries(None)
    build()
    build()
    assert cc.n_built == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    "change", ["source", "header", "flags", "for processor", "processor", "version", "compiler", "sizes"]
)
def test_any_change_of_what_it_depends_on_rebuilds_it(
    folder: Path, cc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in [*compiler._SOURCES.glob("*.c"), *compiler._SOURCES.glob("*.h")]:
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compiler, "_SOURCES", sources)
    build()
    with monkeypatch.context() as patch:
        sizes: dict[str, int] = {}
        if change == "source":
            (sources / "linear.c").write_text((sources / "linear.c").read_text() + "\n/* another */\n")
        elif change == "header":
            (sources / "vectors.h").write_text((sources / "vectors.h").read_text() + "\n/* another */\n")
        elif change == "flags":
            patch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-Wall"))
        elif change == "for processor":
            patch.setattr(compiler, "_PROCESSOR", (*compiler._PROCESSOR, "-mtune=native"))
        elif change == "processor":
            patch.setattr(compiler, "_processor", lambda: "another one")
        elif change == "version":
            cc.version("2.0")
        elif change == "compiler":
            other = Compiler(tmp_path / "other", str(cc.place / "cc"))
            patch.setenv("PATH", f"{other.place}:/usr/bin:/bin")
        else:
            sizes["ANOTHER"] = 1
        build(**sizes)
        build(**sizes)
    assert cc.n_built == 2 and len([*folder.iterdir()]) == 2


@pytest.mark.long
def test_a_broken_file_is_rebuilt(folder: Path, cc: Compiler) -> None:
    build()
    (file,) = folder.iterdir()
    library = file.read_bytes()
    middle = len(library) // 2
    broken = [b"", library[:31], library[:4096], library[:-1], library + b"\0", b"\0" * len(library)]
    broken.append(library[:middle] + bytes([library[middle] ^ 1]) + library[middle + 1 :])
    for i, content in enumerate(broken):
        file.write_bytes(content)
        build()
        assert cc.n_built == 2 + i
        assert len(file.read_bytes()) == len(library)
        build()
        assert cc.n_built == 2 + i
    assert [*folder.iterdir()] == [file]


def test_a_library_under_another_s_name_is_rebuilt(folder: Path, cc: Compiler) -> None:
    build()
    (file,) = folder.iterdir()
    build(ANOTHER=1)
    (other,) = {*folder.iterdir()} - {file}
    other.write_bytes(file.read_bytes())
    build(ANOTHER=1)
    assert cc.n_built == 3


def test_a_library_that_cannot_be_loaded_is_rebuilt(folder: Path, cc: Compiler) -> None:
    build()
    (file,) = folder.iterdir()
    compiler.write_library(file, b"whole, but no library")
    build()
    build()
    assert cc.n_built == 2


def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path: Path, folder: Path, cc: Compiler) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    build()
    build()
    assert cc.n_built == 2 and folder.read_text() == "a file"


def test_a_failure_is_not_kept(folder: Path, cc: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_PROCESSOR", ())
    for _ in range(2):
        with pytest.raises(compiler.NotBuilt, match="needs a processor with AVX-512"):
            build()
    assert cc.n_built == 2 and not folder.exists()


PROCESS = """
import sys
from pathlib import Path
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.native.products import linear_target
from orca_jax.native.split_attention import attention_target

stage = (int(sys.argv[2]), 2) if len(sys.argv) > 2 else None
keep_compiled_programs(None if sys.argv[1] == "none" else sys.argv[1], stage=stage)
print("ready", flush=True)
sys.stdin.readline()
print(linear_target("float32", "float32"), attention_target(64, 16, "float32", "float32"))
"""
TARGETS = "orca_linear_X_BITS32_WEIGHT_BITS32 "
TARGETS += "orca_split_attention_HEAD_SIZE64_BLOCK_SIZE16_Q_BITS32_KV_BITS32"


def process(*args: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROCESS, *map(str, args)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.long
def test_processes_that_start_together_share_a_folder(tmp_path: Path, cc: Compiler) -> None:
    for n_built in (None, 0):  # each may build at first; then none does
        before = cc.n_built
        started = [process(tmp_path / "cache", stage) for stage in (0, 1)]
        for child in started:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for child in started:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        for child in started:
            out, _ = child.communicate(timeout=120)
            assert child.returncode == 0 and out == f"{TARGETS}\n"
        assert n_built is None or cc.n_built - before == n_built
        kept = [path.name.split("-")[0] for path in sorted((tmp_path / "cache" / "native").iterdir())]
        assert kept == ["linear", "split_attention"]


def test_without_a_compile_cache_nothing_is_kept(tmp_path: Path, cc: Compiler) -> None:
    before = {*tmp_path.rglob("*")}
    out, _ = process("none").communicate("\n", timeout=120)
    assert out.splitlines()[1] == TARGETS
    assert cc.n_built == 2
    assert {*tmp_path.rglob("*")} - before == {tmp_path / "bin" / "log"}
