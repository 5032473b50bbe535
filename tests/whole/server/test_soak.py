"""A minute of the soak test: the server under everything that clients do, and its state afterwards."""

import pytest

from bench.server.soak import soak


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_minute_of_everything_leaks_nothing() -> None:
    report = soak(minutes=1.0, seed=1)
    assert not report.failures, "\n".join(report.failures)
    kinds = {outcome.partition(":")[0] for outcome in report.outcomes}
    assert len(kinds) >= 6 and report.n_accepted > 100, f"too little was tried: {report.outcomes}"
    assert sum(report.ended.values()) == report.n_accepted
