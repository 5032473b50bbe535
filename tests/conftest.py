"""Settings of every test run; it imports no JAX, for the host tests run where there is none."""

import os

from hypothesis import HealthCheck, settings

# As many devices as the largest split that is tested; a test that needs one device takes the first.
_DEVICES = "--xla_force_host_platform_device_count=16"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

# No deadline for one example: on shared cores a slow one says nothing about the code. What is drawn is
# random; a failure prints the line that draws it again.
settings.register_profile(
    "orca", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("orca")
