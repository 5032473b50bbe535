"""A server with worker processes under clients that leave, kills, stops, pauses, sleeps and new weights."""

from pathlib import Path

import pytest

from bench.server.chaos import play
from bench.server.chaos_requests import write_changed
from orca_jax.model_files.found_model import DEMO_MODEL


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_wrong_whatever_happens_at_once(tmp_path: Path) -> None:
    write_changed(DEMO_MODEL, tmp_path / "other", seed=0)
    report = play(
        DEMO_MODEL, tmp_path / "other", n=200, n_clients=12, n_distinct=40, longest=60, seed=3, say=print
    )
    assert (report.mismatches, report.lost, report.blamed, report.failures) == ([], [], [], [])
    assert sum(report.verdicts.values()) == 200
    assert report.figures["recoveries"] >= 2 and report.happened["clients that left"] >= 10
