"""Two checkpoints of one model with different weights."""

from pathlib import Path

import pytest

from tests.whole.training.weights import checkpoint


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("old"), 1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("new"), 2)
