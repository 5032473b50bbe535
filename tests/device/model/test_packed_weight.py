"""Packed weights: their numbers, to the bit, and a model's tokens with weights in each form."""

import jax
import numpy as np
import pytest

from orca_jax.families.packed_form import PackedForm
from orca_jax.model.packed_weight import unpacked
from tests.packed_planes import EVERY_FORM, literal_numbers, random_planes


@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_the_numbers_are_those_that_the_form_describes(form: PackedForm) -> None:
    planes = random_planes(form, (5, 512), 0)
    found = jax.jit(lambda planes: unpacked(form, planes, np.float32))(planes)
    expected = literal_numbers(form, planes)
    assert 0.01 < np.abs(expected).mean() < 0.2
    np.testing.assert_array_equal(found, expected)
