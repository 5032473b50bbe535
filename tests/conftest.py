"""Settings of every test run; it imports no JAX, for the host tests run where there is none."""

from hypothesis import HealthCheck, settings

# No deadline for one example: on shared cores a slow one says nothing about the code. What is drawn is
# random; a failure prints the line that draws it again.
settings.register_profile(
    "orca", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("orca")
