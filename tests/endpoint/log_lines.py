"""Captures a logger's lines for tests."""

import logging


class Lines(logging.Handler):
    """A handler that stores each line in `lines` instead of writing to stderr.

    Except the watchdog's: how long a busy machine holds the event loop is chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != "watchdog":
            self.lines.append(record.getMessage())
