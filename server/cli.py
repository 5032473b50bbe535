"""The command `orca`."""

import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from orca_jax.errors import EngineError, OrcaError
from server.parser import parser

INTERRUPTED = 130  # the shells' convention: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake never ends in a traceback."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA reads it when loaded
    try:
        args = parser().parse_args(argv)
        for hint in getattr(args, "hints", ()):
            print(f"orca: {hint}", file=sys.stderr)
        with _quiet() if args.quiet else nullcontext():
            return pkgutil.resolve_name(args.run)(args)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout is gone; a flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OrcaError as error:
        print(f"orca: error: {_one_line(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 1000 else f"{line[:1000]}..."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep libraries' warnings and logs off the terminal; errors are raised as exceptions."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
