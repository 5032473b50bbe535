"""Experts in the engine: routing by hand, extreme routings, padding, and the products in C."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward
from orca_jax.model.context import Iteration, Tokens
from orca_jax.model.feed_forward import between
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.mixture import Mixture, choose, chosen_by_counting, chosen_by_sorting
from orca_jax.model.ranks import group_sizes, places_by_counting, ranks, sizes_across, sorted_places
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness
from tests.device.model.drawn_weights import drawn
from tests.device.model.mixture_models import SERVING, mixture_model, requests

LOGITS = [[2.0, 1.0, 0.0, -1.0], [-1.0, 3.0, 1.0, 2.5]]


def routed(experts: Experts, correction: Sequence[float] | None = None) -> list[dict[int, float]]:
    """Each token's experts and their weights."""
    own = None if correction is None else jnp.array(correction)
    weights, chosen = choose(experts, jnp.array(LOGITS), own)
    rows = zip(np.asarray(chosen), np.asarray(weights), strict=True)
    return [dict(zip(ids.tolist(), row.tolist(), strict=True)) for ids, row in rows]


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def close(found: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    assert [set(row) for row in found] == [set(row) for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_routing_by_hand() -> None:
    e = np.exp
    sums = [float(e(row).sum()) for row in np.array(LOGITS)]
    plain = [{0: e(2) / sums[0], 1: e(1) / sums[0]}, {1: e(3) / sums[1], 3: e(2.5) / sums[1]}]
    close(routed(Experts(number=4, top_k=2)), plain)
    share = float(1 / (1 + e(-1))), float(1 / (1 + e(-0.5)))
    of_two = [{0: share[0], 1: 1 - share[0]}, {1: share[1], 3: 1 - share[1]}]
    close(routed(Experts(number=4, top_k=2, renormalised=True)), of_two)
    close(routed(Experts(number=4, top_k=2, scores="softmax_of_chosen")), of_two)


@pytest.mark.parametrize(
    "own",
    [
        Experts(number=24, top_k=5),
        Experts(number=24, top_k=4, scores="sigmoid", correction_bias=True, n_groups=6, top_groups=2),
        Experts(number=24, top_k=3, n_groups=4, top_groups=3),
    ],
    ids=["all", "groups by two scores", "groups by one"],
)
def test_counting_chooses_the_experts_that_sorting_chooses(own: Experts) -> None:
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.standard_normal((50, 24)), jnp.float32)
    rating = jnp.asarray(rng.integers(-4, 5, (50, 24)), jnp.float32)  # of equal ones the first is chosen
    for found, wanted in zip(
        chosen_by_counting(own, scores, rating), chosen_by_sorting(own, scores, rating), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    of_nan = chosen_by_counting(own, scores, jnp.full_like(rating, jnp.nan))[1]
    assert np.asarray(of_nan).min() >= 0 and np.asarray(of_nan).max() < 24


def test_counting_sorts() -> None:
    keys = jnp.asarray(np.random.default_rng(1).integers(0, 9, 70), jnp.int32)
    for found, wanted in zip(places_by_counting(keys), sorted_places(keys), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert ranks(jnp.array([[1.0, 3.0, 3.0, -jnp.inf], [0.0, 0.0, 0.0, 0.0]])).tolist() == [
        [2, 0, 1, 3],
        [0, 1, 2, 3],
    ]


def test_groups_are_counted_without_what_belongs_to_none() -> None:
    keys = np.random.default_rng(2).integers(0, 10, 70).astype(np.int32)
    wanted = np.bincount(keys, minlength=10)[:9]  # 9 is no group
    for counted in (group_sizes, sizes_across):
        found = counted(jnp.asarray(keys), 9)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, wanted)


def test_a_correction_changes_the_choice_and_not_the_weights() -> None:
    own = Experts(number=4, top_k=1, scores="sigmoid", correction_bias=True, multiplier=2.5)
    close(routed(own, [0, 0, 0, 0]), [{0: 2.5 * sigmoid(2)}, {1: 2.5 * sigmoid(3)}])
    close(routed(own, [0, 0, 1, 0]), [{2: 2.5 * sigmoid(0)}, {2: 2.5 * sigmoid(1)}])


def test_a_sum_of_weights_counts_for_at_least_the_least() -> None:
    own = Experts(number=4, top_k=1, scores="sigmoid", renormalised=True)
    close(routed(own), [{0: 1.0}, {1: 1.0}])
    close(routed(replace(own, least_sum=0.9)), [{0: sigmoid(2) / 0.9}, {1: 1.0}])
    nothing = jnp.full((1, 4), -200.0)  # whose sigmoids are zero in float32
    weights, _ = choose(replace(own, least_sum=1e-20), nothing, None)
    assert weights.tolist() == [[0.0]]


def test_groups_are_chosen_by_their_best_scores() -> None:
    # Groups are experts 0 and 1, and 2 and 3. Of the second token each has one that is high.
    own = Experts(number=4, top_k=2, scores="sigmoid", n_groups=2, top_groups=1)
    close(routed(own), [{0: sigmoid(2), 1: sigmoid(1)}, {1: sigmoid(3), 0: sigmoid(-1)}])
    # With a correction the two best of a group count: the second group's.
    corrected = replace(own, correction_bias=True)
    close(routed(corrected, [0] * 4), [{0: sigmoid(2), 1: sigmoid(1)}, {2: sigmoid(1), 3: sigmoid(2.5)}])


def to_experts(parameters: dict[str, jax.Array], wanted: Sequence[int]) -> dict[str, jax.Array]:
    """Parameters whose router bias sends every token to the experts `wanted`."""
    bias = np.full(len(parameters["layers.0.router.bias"]), -50.0, np.float32)
    bias[list(wanted)] = 50.0
    return {name: jnp.array(bias) if "router.bias" in name else value for name, value in parameters.items()}


FORMS = ("one call in C", "products in C", "in JAX")
# Of one expert and of two the quick tests are those in one call; of three, and of any, all three.
ROUTINGS: list[Any] = [
    *(([2, 3, 4], form) for form in FORMS),
    *((None, form) for form in FORMS),
    *((wanted, FORMS[0]) for wanted in ([5], [0, 7])),
    *(pytest.param(wanted, form, marks=pytest.mark.long) for wanted in ([5], [0, 7]) for form in FORMS[1:]),
]


@pytest.mark.matrix(but=["[2, 3, 4]-in JAX", "None-one call in C", "None-products in C"])
@pytest.mark.parametrize(("wanted", "form"), ROUTINGS, ids=str)
def test_extreme_routings_keep_the_tokens(wanted: list[int] | None, form: str) -> None:
    """All tokens choose the same experts; the engine's tokens are the reference's."""
    # Sizes for which C has a form, and others; biases are for its products alone.
    size, bias = 40 if form == "in JAX" else 48, form == "products in C"
    top_k = 2 if wanted is None else len(wanted)
    model = mixture_model(hidden=32, size=size, top_k=top_k, bias=bias)
    parameters = drawn(model, 3)
    if wanted is not None:
        parameters = to_experts(parameters, wanted)
    engine = harness(model, parameters, SERVING, buckets=(4, 48))
    asked = requests()
    engine.run(asked, arrivals=[0, 0, 1, 2, 5, 6])
    reference = GreedyReference(model, parameters)
    assert sum(reference.sure(request) for request in asked) > 0.8 * sum(len(r.output_ids) for r in asked)


def test_padding_belongs_to_no_expert() -> None:
    """Real tokens' results do not depend on padding, and no product has a row for it."""
    seen: list[int] = []

    def watched(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        seen.append(int(sizes.sum()))
        return matmul.grouped(x, weight, sizes)

    model = mixture_model(hidden=32, size=16, top_k=3)
    values = drawn(model, 5)
    mixture = Mixture(model.feed_forward, lambda name: values.get(f"layers.0.{name}"))
    x = jax.random.normal(jax.random.key(0), (9, 32))
    padded = jnp.concatenate([x, jnp.full((7, 32), jnp.nan)])

    def mixed(x: jax.Array, product: Matmul) -> tuple[jax.Array, jax.Array | None]:
        cache = LayerCache(jnp.zeros(()), jnp.zeros(()))
        tokens = Tokens(lambda q, *_: q, product)
        ctx = Iteration(jnp.arange(len(x)), None, tokens).context(model.layers[0], x, cache, None)
        return mixture(x, ctx), ctx.chosen

    given, chosen = mixed(padded, Matmul(grouped=watched, n_tokens=jnp.array([9], jnp.int32)))
    assert seen == [27, 27]
    alone, same = mixed(x, matmul)
    assert chosen is not None and same is not None
    np.testing.assert_allclose(given[:9], alone, atol=1e-5)
    np.testing.assert_array_equal(chosen[:9], same)


def test_a_request_with_nan_disturbs_no_other() -> None:
    model = mixture_model(hidden=32, size=48, top_k=2)
    parameters = drawn(model, 4)
    parameters["token_embedding"] = parameters["token_embedding"].at[7].set(jnp.nan)
    asked = requests()
    engine = harness(model, parameters, SERVING, buckets=(48,))
    poison = greedy_request("poison", [7] * 9, 6)
    engine.run([poison, *asked], arrivals=[0] * (1 + len(asked)))
    clean = parameters | {"token_embedding": parameters["token_embedding"].at[7].set(0.0)}
    reference = GreedyReference(model, clean)
    without = [request for request in asked if 7 not in (*request.prompt_ids, *request.output_ids)]
    assert len(without) >= 3 and sum(reference.sure(request) for request in without) > 10


def test_a_gate_is_clipped_on_the_right_sides() -> None:
    own = FeedForward(size=2, gated=True, gate_limit=7.0)
    gate, up = np.array([9.0, -9.0]), np.array([-8.0, 3.0])
    cut, limited = np.array([7.0, -9.0]), np.array([-7.0, 3.0])
    expected = cut / (1 + np.exp(-1.702 * cut)) * (limited + 1)
    found = between(jnp.array([[*gate, *up]]), own)
    np.testing.assert_allclose(np.asarray(found)[0], expected, rtol=1e-5)
