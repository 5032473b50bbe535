"""The machine's C compiler makes the CPU's operations, each for given sizes once a process."""

import ctypes
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import jax

_SOURCES = Path(__file__).parent
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
_PROCESSOR = ("-march=native", "-mprefer-vector-width=512")

_building = threading.Lock()  # a name can be registered once


class NotBuilt(Exception):
    """There is no compiler, or it could not; the message says what is missing."""


def target(operation: str, **sizes: int) -> str:
    """The name of a custom call of `operation`, a C file and its function, with these names set in it.

    The first call builds it, in a temporary folder that is gone when this returns. Raises NotBuilt.
    """
    with _building:
        return _built(operation, tuple(sizes.items()))


@cache
def _built(operation: str, sizes: tuple[tuple[str, int], ...]) -> str:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotBuilt("no C compiler was found")
    with tempfile.TemporaryDirectory(prefix="orca-native-") as folder:
        library = Path(folder) / f"{operation}.so"
        given = [f"-I{jax.ffi.include_dir()}", *(f"-D{name}={value}" for name, value in sizes)]
        source = _SOURCES / f"{operation}.c"
        said = _said([compiler, *_FLAGS, *_PROCESSOR, *given, str(source), "-o", str(library)])
        if not library.exists():
            raise NotBuilt(f"{compiler} could not build it: {said}")
        try:
            built = ctypes.CDLL(str(library))
        except OSError as error:
            raise NotBuilt(f"it was built but cannot be loaded: {error}") from error
    name = "_".join(("orca", operation, *(str(value) for _, value in sizes)))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(built, operation)), platform="cpu")
    return name


def _said(command: list[str]) -> str:
    """The first error, or line, of what a compiler that failed said; empty if it did not."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.splitlines() or ["it said nothing"]
    return next((line[line.index("error: ") :] for line in lines if "error: " in line), lines[0])
