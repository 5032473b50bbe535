"""Iteration-level scheduling as a client sees it: a short request does not wait for long ones."""

from tests.endpoint.harness import serving
from tests.endpoint.short_requests import Traffic, check


def test_a_short_request_overtakes_long_ones() -> None:
    with serving(seconds=0.002) as server:
        timeline = server.service.timeline
        check(server.url, "test", timeline, Traffic(n_long=4, long=500, n_short=8, short=3))
