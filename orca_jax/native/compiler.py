"""Builds the CPU's operations with the machine's C compiler, each once per process for given sizes.

`keep_libraries` names a folder in which shared libraries are kept, so that the next process need not build
them. This file knows no JAX: building may begin while JAX is imported, which takes as long.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

_SOURCES = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 180.0  # building takes one to ten where the machine is idle
# Nothing here lets the compiler reorder sums: a request's tokens must not depend on its version.
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
# The fields of /proc/cpuinfo, on x86 and on ARM, that decide what -march=native means.
_CPUINFO = ("vendor_id", "cpu family", "model", "stepping", "flags")
_CPUINFO += ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")

_DIGEST_BYTES = 32

Key = tuple[str, tuple[tuple[str, int], ...]]  # an operation and its sizes

_lock = threading.Lock()  # for the next two
_kept_in: Path | None = None
_builds: dict[Key, "Future[ctypes.CDLL]"] = {}  # finished or under way


class NotBuilt(Exception):
    """No compiler was found, or it failed; the message says what is missing."""


def keep_libraries(folder: Path | None) -> None:
    """Keep libraries in a subfolder of `folder`, and look there before building; None keeps nothing.

    Libraries from there are executed: only users who may run code as this one should be able to write to it.
    """
    global _kept_in
    with _lock:
        _kept_in = None if folder is None else folder / "native"


def library(operation: str, **sizes: int) -> ctypes.CDLL:
    """The library of `operation`, which names a C file and its function, compiled with these macros.

    The first call in a process loads the kept library or builds it. Raises NotBuilt.
    """
    build, is_new = _build((operation, tuple(sizes.items())))
    if is_new:
        _run((operation, tuple(sizes.items())), build)
    return build.result()


def build_ahead(operation: str, **sizes: int) -> None:
    """Start building on a thread; `library` then waits for it, and raises what went wrong."""
    key = (operation, tuple(sizes.items()))
    build, is_new = _build(key)
    if is_new:
        threading.Thread(target=_run, args=(key, build), name=f"build {operation}", daemon=True).start()


def _build(key: Key) -> tuple["Future[ctypes.CDLL]", bool]:
    with _lock:
        is_new = key not in _builds
        return _builds.setdefault(key, Future()), is_new


def _run(key: Key, build: "Future[ctypes.CDLL]") -> None:
    try:
        build.set_result(_library(*key))
    except BaseException as error:
        with _lock:
            del _builds[key]  # what is missing may have been installed by the next call
        build.set_exception(error)


def _library(operation: str, sizes: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NotBuilt("no C compiler was found")
    defined = [f"-D{name}={value}" for name, value in sizes]
    kept_as = None if _kept_in is None else _kept_in / _file_name(operation, compiler, defined)
    with tempfile.TemporaryDirectory(prefix="orca-native-") as folder:
        # A kept library is loaded from a copy: if another process replaces the file, the code stays whole.
        path = Path(folder) / f"{operation}.so"
        if kept_as is not None and (kept := read_library(kept_as)) is not None:
            path.write_bytes(kept)
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # it was linked to libraries that this machine no longer has
                path.unlink()
        source = str(_SOURCES / f"{operation}.c")
        include = f"-I{_include_dir()}"
        error = _error_of([compiler, *_FLAGS, *_PROCESSOR, include, *defined, source, "-lm", "-o", str(path)])
        if not path.exists():
            raise NotBuilt(f"{compiler} could not build it: {error}")
        try:
            library = ctypes.CDLL(str(path))
        except OSError as failure:
            raise NotBuilt(f"it was built but cannot be loaded: {failure}") from failure
        if kept_as is not None:
            write_library(kept_as, path.read_bytes())
        return library


def _file_name(operation: str, compiler: str, defined: list[str]) -> str:
    """A library's file name, from a digest of all that its code depends on.

    That is the source, headers, compiler, flags, sizes and processor.
    """
    files = [_SOURCES / f"{operation}.c", *sorted(_SOURCES.glob("*.h"))]
    files.append(_include_dir() / "xla" / "ffi" / "api" / "c_api.h")
    texts = [compiler, _version_of(compiler), *_FLAGS, *_PROCESSOR, *defined, _processor()]
    key = hashlib.sha256()
    for part in (*(file.read_bytes() for file in files), *map(str.encode, texts)):
        key.update(len(part).to_bytes(8, "little") + part)
    return f"{operation}-{key.hexdigest()}.so"


def read_library(path: Path) -> bytes | None:
    """A kept library; None if there is none, or if its digest says that it is damaged."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    library, digest = kept[:-_DIGEST_BYTES], kept[-_DIGEST_BYTES:]
    return library if digest == _digest(path, library) else None


def write_library(path: Path, library: bytes) -> None:
    """Keep a library with its digest, if its folder can be written to.

    The file is replaced at once: a process that reads it sees the old library or the whole new one.
    """
    unfinished = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            unfinished = Path(file.name)
            file.write(library + _digest(path, library))
        unfinished.replace(path)
    except OSError:  # the next process builds it again
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _digest(path: Path, library: bytes) -> bytes:
    return hashlib.sha256(os.fsencode(path.name) + library).digest()


def _include_dir() -> Path:
    """jax.ffi.include_dir(), found without JAX."""
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise NotBuilt("jaxlib is not installed")
    return Path(spec.submodule_search_locations[0]) / "include"


def _version_of(compiler: str) -> str:
    try:
        command = [compiler, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout


def _processor() -> str:
    """A text that identifies the kind of processor."""
    try:
        core = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = [line for line in core if line.split(":")[0].strip() in _CPUINFO]
    return "\n".join([platform.machine(), *lines])


def _error_of(command: list[str]) -> str:
    """The first error, or else line, that a failing compiler printed; empty if it succeeded."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.splitlines() or ["it printed nothing"]
    return next((line[line.index("error: ") :] for line in lines if "error: " in line), lines[0])
