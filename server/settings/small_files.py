"""Files that a person wrote by hand: read whole, and no further than such a file goes."""

import os
import stat
from pathlib import Path


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a regular file of at most `max_bytes` in UTF-8.

    Raises ValueError, which names the file and what is wrong with it. Nothing of the content is in there.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
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
        wrong = error.start
    # Raised out here, for the error above carries all that was read.
    raise ValueError(f"{path} is not UTF-8: a wrong byte at {wrong}")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would have us wait for its writer
