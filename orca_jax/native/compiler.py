"""The machine's C compiler makes the CPU's attention for one head size and block size, once a process."""

import ctypes
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import jax

_SOURCE = Path(__file__).with_name("split_attention.c")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60.0  # it takes less than one
# No leave to reorder sums: a request's tokens must not depend on a compiler's mood.
_FLAGS = (
    "-std=c11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
_THIS_MACHINE = ("-march=native", "-mprefer-vector-width=512")  # where the compiler knows them

_building = threading.Lock()  # a name can be registered once


class NotBuilt(Exception):
    """There is no compiler, or it could not; the message says what is missing."""


def target(head_size: int, block_size: int) -> str:
    """The name of a custom call that computes split attention for these sizes.

    The first call builds it, in a temporary folder that is gone when this returns. Raises NotBuilt.
    """
    with _building:
        return _built(head_size, block_size)


@cache
def _built(head_size: int, block_size: int) -> str:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotBuilt("no C compiler was found")
    with tempfile.TemporaryDirectory(prefix="orca-native-") as folder:
        library = Path(folder) / "split_attention.so"
        sizes = (f"-DHEAD_SIZE={head_size}", f"-DBLOCK_SIZE={block_size}", f"-I{jax.ffi.include_dir()}")
        said = ""
        for machine in (_THIS_MACHINE, ()):
            said = _said([compiler, *_FLAGS, *machine, *sizes, str(_SOURCE), "-o", str(library)])
            if library.exists():
                break
        else:
            raise NotBuilt(f"{compiler} could not build it: {said}")
        try:
            built = ctypes.CDLL(str(library))
        except OSError as error:
            raise NotBuilt(f"it was built but cannot be loaded: {error}") from error
    name = f"orca_split_attention_{head_size}_{block_size}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(built.split_attention), platform="cpu")
    return name


def _said(command: list[str]) -> str:
    """The first line of what a compiler that failed said; empty if it did not."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if ended.returncode == 0 else next(iter(ended.stderr.splitlines()), "it said nothing")
