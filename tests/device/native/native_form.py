"""What the C of orca_jax/native needs of a machine; without it the tests of that C have nothing to test."""

import pytest

from orca_jax.native.compiler import NotBuilt
from orca_jax.native.linear import linear_target


def has_native() -> bool:
    """Whether this machine can build and run it."""
    try:
        return bool(linear_target())
    except NotBuilt:
        return False


needs_native = pytest.mark.skipif(not has_native(), reason="no C compiler, or a processor without AVX-512")
