"""Reading small files written by hand, with a limit on their size."""

import os
import stat
from pathlib import Path


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a regular file of at most `max_bytes`.

    Raises ValueError, which names the file and the problem but shows none of the content.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = error.start
    # Raised outside the handler: as its context, the UnicodeDecodeError would carry the whole content.
    raise ValueError(f"{path} is not UTF-8: a wrong byte at {position}")


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # otherwise opening a pipe waits for its writer
