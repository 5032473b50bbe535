"""Settings of every test run; it imports no JAX, for the host tests run where there is none."""

import atexit
import os
import shutil
import tempfile

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
