"""Settings of every test run; it imports no JAX, for the host tests run where there is none."""

import atexit
import gc
import os
import shutil
import tempfile
import zlib

import pytest
from hypothesis import HealthCheck, settings

from tests.xla_flags import DEVICES, xla_flags

# As many devices as the largest split that is tested; a test that needs one device takes the first. Worker
# processes of pytest inherit it.
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(n_devices=16)}".strip()

# Programs that several tests need, and the processes that they start, are compiled once in a run. JAX reads
# these when it is imported; worker processes of pytest find them set.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="orca-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# No deadline for one example: on shared cores a slow one says nothing about the code. What is drawn is
# random; a failure prints the line that draws it again.
settings.register_profile(
    "orca", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("orca")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze everything imported and collected, so that the garbage collector need not visit it."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of N parts of the tests run the K-th, from 1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts. A test is in the same part in every run, whatever else there is."""
    part = config.getoption("--part")
    if part is None:
        return
    k, n = map(int, part.split("/"))
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part is {part}; it must be K/N with K from 1 to N")
    own = [item for item in items if zlib.crc32(item.nodeid.encode()) % n == k - 1]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(own)])
    items[:] = own
