"""`X-Request-Id`: the client's own id for a request, or a generated one."""

import re
import uuid
from collections.abc import Iterable

HEADER = b"x-request-id"

_USABLE = re.compile(rb"[!-~]{1,128}").fullmatch  # printable ASCII without spaces


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id in the headers if it is 1 to 128 printable ASCII characters without spaces, else a new id."""
    for name, value in headers:
        if name == HEADER:
            return value.decode("ascii") if _USABLE(value) else uuid.uuid4().hex
    return uuid.uuid4().hex
