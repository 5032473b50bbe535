"""Fits a synthetic trace to a file: `python -m bench.fit_trace FILE > fitted.json`.

Any number of requests can then be drawn with a seed, by everything that reads traces: `orca bench --trace
fitted.json --requests 1000 --seed 3`. server/load/fitted.py says what of the file is kept.
"""

import argparse
import json
from pathlib import Path

from server.errors import TraceError
from server.load.fitted import fit
from server.load.trace_files import read_trace


def main() -> None:
    """Read, fit and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.fit_trace", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, help="only the first N")
    flags = parser.parse_args()
    try:
        trace = read_trace(flags.file, vocab_size=2, most=flags.requests)
    except (TraceError, OSError) as error:
        parser.error(str(error))
    if len(trace) < 2 or any(request.after is not None for request in trace):
        parser.error(f"{flags.file} must have two requests or more, and none that depends on an answer")
    print(json.dumps(fit(trace, flags.file.name)))


if __name__ == "__main__":
    main()
