"""The benchmark of perplexity: windows and mean by hand, and the loss that the demo model's card states."""

import json
import math

import pytest

from bench.perplexity import main, perplexity, windows
from orca_jax.model_files.found_model import DEMO_MODEL


def test_windows_begin_with_the_start_token_and_drop_the_rest() -> None:
    assert windows([1, 2, 3, 4, 5], [], 2) == [[1, 2], [3, 4]]
    assert windows([1, 2, 3, 4, 5, 6], [9], 3) == [[9, 1, 2], [9, 3, 4], [9, 5, 6]]
    assert windows([1, 2], [9], 4) == []


def test_the_mean_is_over_all_tokens() -> None:
    halves, quarter = [math.log(0.5)] * 3, [math.log(0.25)]
    assert perplexity([halves, quarter]) == pytest.approx((2**3 * 4) ** (1 / 4))


def test_the_demo_model_has_the_loss_of_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DEMO_MODEL), "--tokens", "4096"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["windows"] == 8
    (value,) = found["perplexity"].values()
    # The card's 3.32 is of documents with their end tokens, in the same windows of 512.
    assert math.log(value) == pytest.approx(3.32, abs=0.1)
