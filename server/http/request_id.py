"""The id that a client gives its request, or one that it is given: `X-Request-Id`, in and out."""

import re
import uuid
from collections.abc import Iterable

HEADER = b"x-request-id"

_USABLE = re.compile(rb"[!-~]{1,128}").fullmatch  # printable ASCII without spaces


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The one in the headers if it is 1 to 128 printable ASCII characters without spaces; else a new one."""
    for name, value in headers:
        if name == HEADER:
            return value.decode("ascii") if _USABLE(value) else uuid.uuid4().hex
    return uuid.uuid4().hex
