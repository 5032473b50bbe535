"""Settings of every test run; it imports no JAX, for the host tests run where there is none."""

import atexit
import gc
import os
import shutil
import tempfile
import zlib

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

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


# Imports and collection make only objects that stay to the end.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze everything imported and collected, so that the garbage collector need not visit it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run only the K-th of N parts of the tests, from 1")
    parser.addoption("--fewer-examples", action="store_true", help="draw a third of hypothesis' examples")


def _unmark_kept_combinations(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the mark `matrix` off the parameters that `but` names, by their ids."""
    unknown = dict[str, set[str]]()
    for item in items:
        mark = item.get_closest_marker("matrix")
        if mark is None or not mark.kwargs:
            continue
        assert isinstance(item, pytest.Function)
        left = unknown.setdefault(item.nodeid.partition("[")[0], set(mark.kwargs["but"]))
        if item.callspec.id in mark.kwargs["but"]:
            item.own_markers.remove(mark)
            left.discard(item.callspec.id)
    unknown = {test: left for test, left in unknown.items() if left}
    if unknown and not any("::" in argument for argument in config.args):  # whole files were collected
        raise pytest.UsageError(f"the mark `matrix` keeps parameters that are not there: {unknown}")


def _draw_fewer_examples(items: list[pytest.Item]) -> None:
    """Draw a third of each test's examples; those that are written out are run all the same."""
    tests = {id(item.obj): item.obj for item in items if isinstance(item, pytest.Function)}
    for test in tests.values():
        drawn = getattr(test, "_hypothesis_internal_use_settings", None)
        if is_hypothesis_test(test) and drawn is not None:
            fewer = settings(drawn, max_examples=-(-drawn.max_examples // 3))
            test._hypothesis_internal_use_settings = fewer


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts. A test is in the same part in every run, whatever else there is."""
    _unmark_kept_combinations(config, items)
    if config.getoption("--fewer-examples"):
        _draw_fewer_examples(items)
    part = config.getoption("--part")
    if part is None:
        return
    k, n = map(int, part.split("/"))
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part is {part}; it must be K/N with K from 1 to N")
    own = [item for item in items if zlib.crc32(item.nodeid.encode()) % n == k - 1]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(own)])
    items[:] = own
