"""New weights by name, from every tree that holds them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from orca_jax.launch.new_weights import named_arrays
from orca_jax.user_model.functions import FunctionModel


@jax.tree_util.register_dataclass
@dataclass
class Linear:
    """A module as Equinox and Haliax have them: a pytree that is no dict. Without a bias that is None."""

    weight: Any
    bias: Any = None


def test_names_of_a_pytree_are_those_of_the_model_made_of_it() -> None:
    a, b, c, d = (np.full(2, i, np.float32) for i in range(4))
    given: Any = {"outside": {"head": Linear(a)}, "layers": [{"q": Linear(b, c)}, {"q": (Linear(d), [a])}]}
    found = named_arrays(given)
    assert found == {
        "outside.head.weight": a,
        "layers.0.q.weight": b,
        "layers.0.q.bias": c,
        "layers.1.q.0.weight": d,
        "layers.1.q.1.0": a,
    }
    sizes = dict.fromkeys(
        ("vocab_size", "n_positions", "hidden_size", "n_heads", "n_kv_heads", "head_size"), 2
    )

    def unused(*_: Any) -> Any:
        raise AssertionError

    model = FunctionModel(embed=unused, layer=unused, unembed=unused, **given, **sizes)
    assert named_arrays(model).keys() == found.keys()
