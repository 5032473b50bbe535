"""What a logger said, for a test to read."""

import logging


class Lines(logging.Handler):
    """Keeps each line in `lines`, instead of stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
