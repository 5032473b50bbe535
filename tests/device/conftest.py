"""Fixtures of tests with devices."""

import pytest

from orca_jax.execution import matmul_backend


@pytest.fixture
def whole_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by unpacked weights: the products with packed ones in C round activations to eight bits."""
    monkeypatch.setattr(matmul_backend, "has_packed_form", lambda x, form, n_out: False)
