"""Shared libraries kept on disk between processes: each file is whole, or is taken for missing."""

import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST_BYTES = 32


def file_name(operation: str, parts: list[bytes]) -> str:
    """The name of a library: by the operation, and by all that its code follows from."""
    key = hashlib.sha256()
    for part in parts:
        key.update(len(part).to_bytes(8, "little") + part)
    return f"{operation}-{key.hexdigest()}.so"


def read(path: Path) -> bytes | None:
    """A library that was kept, or None: there is none, or it is broken or cut short."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    library, digest = kept[:-_DIGEST_BYTES], kept[-_DIGEST_BYTES:]
    return library if digest == _digest(path, library) else None


def write(path: Path, library: bytes) -> None:
    """Keep a library, if its folder can be written to. Readers see the old file or the whole new one."""
    unfinished = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            unfinished = Path(file.name)
            file.write(library + _digest(path, library))
        unfinished.replace(path)
    except OSError:  # the library is built anew next time
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _digest(path: Path, library: bytes) -> bytes:
    return hashlib.sha256(os.fsencode(path.name) + library).digest()
