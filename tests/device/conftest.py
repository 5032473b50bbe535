"""Fixtures of tests with devices."""

import os
from pathlib import Path

import pytest

from orca_jax.execution import matmul_backend
from orca_jax.native.compiler import keep_libraries

# As compiled programs, libraries in C are built once in a run, whichever process needs them first.
keep_libraries(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))


@pytest.fixture
def whole_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by unpacked weights: the products with packed ones in C round activations to eight bits."""
    monkeypatch.setattr(matmul_backend, "has_packed_form", lambda x, form, n_out: False)
