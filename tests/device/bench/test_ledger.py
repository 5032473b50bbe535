"""The layers that the ledger compiles in place of a whole model, and what it multiplies them by."""

from collections import Counter

import pytest

from bench.compiled.ledger import MODELS, Case, cases, shortened
from orca_jax.families.presets import PRESETS


@pytest.mark.parametrize("name", MODELS)
def test_one_of_each_kind_and_the_last_then_one_more_of_each_that_repeats(name: str) -> None:
    model = PRESETS[name]
    few, more = shortened(model)
    assert set(few) == set(model.layers) and few[-1] == model.layers[-1]
    assert len(few) <= len(set(model.layers)) + 1
    missing = Counter(model.layers) - Counter(few)
    assert set(more) == set(missing)
    for kind, layers in more.items():
        assert Counter(layers) - Counter(few) == Counter([kind]) and layers[-1] == model.layers[-1]


def test_every_number_of_rows_with_every_context_then_prompts() -> None:
    made = [*cases([1, 32], [64, 4096], [512])]
    assert [str(case) for case in made] == [
        "decode 1 x 64",
        "decode 32 x 64",
        "decode 1 x 4096",
        "decode 32 x 4096",
        "prefill 512",
    ]
    assert made[-1] == Case(rows=1, tokens=512, context=512)
