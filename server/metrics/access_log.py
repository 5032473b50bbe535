"""The access log: one line per HTTP or gRPC request, as text or JSON.

Clients cannot forge or hide lines: everything but printable ASCII is escaped.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from server.process.log_writer import LogHandler, LogWriter
from server.settings.endpoint_options import AccessLog

LOGGER = logging.getLogger("orca.access")

_MOST_CHARACTERS = 256  # of one value
_encode = json.JSONEncoder(default=str).encode  # once: json.dumps with options makes one each time
_BARE = re.compile(r"[A-Za-z0-9_./:@+-]+").fullmatch


def configure_access_log(style: AccessLog, handler: logging.Handler | None = None) -> None:
    """Send access log lines to `handler` (default: stderr), and no longer to that of an earlier call."""
    LOGGER.propagate = False
    for earlier in list(LOGGER.handlers):
        LOGGER.removeHandler(earlier)
        earlier.close()
    if style == "off":
        LOGGER.setLevel(logging.CRITICAL)
        return
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)


def configure_logging(style: AccessLog, log: LogWriter) -> None:
    """Write the access log in this style, and warnings and errors from everything else, to `log`."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler(log, form)])
    configure_access_log(style, LogHandler(log))


def log_access(style: AccessLog, record: Mapping[str, object]) -> None:
    """Write one request's record, preceded by the time. Records hold no prompts, output text or API keys."""
    if style != "off" and LOGGER.isEnabledFor(logging.INFO):
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        LOGGER.info("%s", _LINES[style]({"time": now, **record}))


def _text(record: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in record.items() if value is not None)


def _value(value: object) -> str:
    text = value if isinstance(value, str) else _encode(value)
    return text if len(text) <= _MOST_CHARACTERS and _BARE(text) else _quoted(text)


def _json(record: Mapping[str, object]) -> str:
    members = (f"{_quoted(name)}: {_member(value)}" for name, value in record.items() if value is not None)
    return "{" + ", ".join(members) + "}"


def _member(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else _encode(value)


def _quoted(text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "..."
    return _encode(text).replace("\x7f", "\\u007f")


_LINES = {"text": _text, "json": _json}
