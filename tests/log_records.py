"""The log records that a test is about."""

import logging

import pytest


def records_of(caplog: pytest.LogCaptureFixture, *loggers: str) -> list[logging.LogRecord]:
    """Return the records of the named loggers and of those below them.

    `caplog` has those of all loggers, among them what a thread that an earlier test left running, or the
    watchdog of a busy machine, logs meanwhile.
    """
    return [
        record
        for record in caplog.records
        if any(f"{record.name}.".startswith(f"{name}.") for name in loggers)
    ]


def messages_of(caplog: pytest.LogCaptureFixture, *loggers: str) -> list[str]:
    return [record.getMessage() for record in records_of(caplog, *loggers)]


def warnings_of(caplog: pytest.LogCaptureFixture, *loggers: str) -> list[logging.LogRecord]:
    return [record for record in records_of(caplog, *loggers) if record.levelno >= logging.WARNING]
