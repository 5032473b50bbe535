"""A feed-forward layer of experts: each token runs the few that the router chooses, and none is dropped.

Tokens are sorted by expert, so that an expert's tokens are adjacent rows, and two grouped products run all
experts, or one call does everything (`Matmul.mixture`). Shapes depend on the bucket alone. Padding belongs to
no expert; where each device has whole experts, neither do tokens whose expert is on another device.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward
from orca_jax.families.norm_config import Norm
from orca_jax.model.adapted import AdaptedWeight, ExpertPairs
from orca_jax.model.context import Context
from orca_jax.model.feed_forward import between
from orca_jax.model.layers import Matmul, RMSNorm, Weights, linear_of
from orca_jax.model.ranks import group_sizes, ranks, sorted_places
from orca_jax.model.shard import Shard


class Mixture(nnx.Module):
    """The router, the experts' weights [X, ...], and the shared expert."""

    def __init__(self, config: FeedForward, p: Weights) -> None:
        assert config.experts is not None
        self.config = config
        self.router = linear_of(p, "router")
        correction = p("router.correction")
        self.correction = None if correction is None else nnx.Param(correction)
        self.up = linear_of(p, "experts.up")
        self.down = linear_of(p, "experts.down")
        shares = config.experts.shared_size is not None
        self.shared_up = linear_of(p, "shared.up") if shares else None
        self.shared_down = linear_of(p, "shared.down") if shares else None
        gate = p("shared.gate")
        self.shared_gate = None if gate is None else nnx.Param(gate)
        narrows = config.experts.latent_size is not None
        self.router_norm, scales = _router_norm(config.experts, p), p("router.scales")
        self.scales = None if scales is None else nnx.Param(scales)
        self.narrow = linear_of(p, "latent.down") if narrows else None
        self.widen = linear_of(p, "latent.up") if narrows else None

    def __call__(self, x: jax.Array, ctx: Context, before: jax.Array | None = None) -> jax.Array:
        """x [T, H] to [T, H]; `ctx.chosen` gets the tokens' experts, [T, k] int32.

        `before` is x before the layer's norm, for a router with a norm of its own.

        Where devices exchange tokens, x is a slice of them, and `ctx.chosen` has the experts of all slices.
        """
        experts, product = self.config.experts, ctx.product
        assert experts is not None
        correction = None if self.correction is None else self.correction[...]
        asked = x if self.router_norm is None or before is None else self.router_norm(before)
        logits = self._logits(asked, product)
        if experts.router_multiplier != 1.0:
            logits = logits * experts.router_multiplier
        weights, chosen = choose(experts, logits, correction)  # [T, k]
        if self.scales is not None:
            weights = weights * self.scales[...].astype(jnp.float32).at[chosen].get(mode="clip")
        mix = partial(self._mixed, shard=ctx.shard)
        narrow = x if self.narrow is None else self.narrow(x, product)
        if ctx.slices is None:
            mixed, ctx.chosen = mix(narrow, weights, chosen, product), chosen
        else:
            exchanged = ctx.slices.exchanged(narrow, weights, chosen, product, mix, n_experts=experts.number)
            mixed, ctx.chosen = exchanged
        if self.widen is not None:
            mixed = self.widen(mixed, product)
        if self.shared_up is not None and self.shared_down is not None:
            inner = between(self.shared_up(x, product), self.config)
            shared = self.shared_down(inner, product)
            if self.shared_gate is not None:
                open_ = jax.nn.sigmoid((x * self.shared_gate[...]).astype(jnp.float32).sum(axis=1))
                shared = shared * open_[:, None].astype(x.dtype)
            mixed = mixed + shared
        if ctx.slices is None:
            mixed = ctx.shard.joined(mixed)
        if self.down.bias is None:
            return mixed
        bias = self.down.bias[...].at[chosen].get(mode="clip").astype(jnp.float32)  # [T, k, H]
        return mixed + jnp.einsum("tk,tkh->th", weights, bias).astype(x.dtype)

    def _logits(self, x: jax.Array, product: Matmul) -> jax.Array:
        """The router's logits [T, X] float32."""
        weight = self.router.weight[...]
        if x.dtype == weight.dtype == jnp.float32:
            logits = product(x, weight)
        else:
            by_row = (((1,), (1,)), ((), ()))
            logits = lax.dot_general(x, weight, by_row, preferred_element_type=jnp.float32)
        return logits if self.router.bias is None else logits + self.router.bias[...].astype(jnp.float32)

    def _mixed(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, product: Matmul, shard: Shard
    ) -> jax.Array:
        """Run this device's experts and sum their results for each token: [T, H]."""
        adapted_up, adapted_down = self.up.weight.get_value(), self.down.weight.get_value()
        up, down = _base(adapted_up), _base(adapted_down)
        adapters = product.adapters if isinstance(adapted_up, AdaptedWeight) else None
        n_tokens, top_k = chosen.shape
        n_here = jax.tree.leaves(up)[0].shape[0]  # in every form the experts are the first axis
        assert self.config.experts is not None
        first = shard.index * n_here if n_here < self.config.experts.number else 0
        expert = chosen - first
        real = True if product.n_tokens is None else jnp.arange(n_tokens)[:, None] < product.n_tokens
        expert = jnp.where((expert >= 0) & (expert < n_here) & real, expert, n_here)  # [T, k]
        mixture = product.mixture if self.config.is_plain and adapters is None else None
        if mixture is not None and isinstance(up, jax.Array) and isinstance(down, jax.Array):
            mixed = mixture(x, weights, expert, up, down)
            if mixed is not None:
                return mixed
        expert = expert.reshape(-1)
        order, place = sorted_places(expert)
        sizes = group_sizes(expert, n_here)
        token = order // top_k
        rows = x.at[token].get(mode="clip")  # [T k, H], sorted by expert
        if self.config.experts.weighs_inputs:
            rows, weights = rows * weights.reshape(-1)[order, None].astype(x.dtype), jnp.ones_like(weights)
        inner, pairs = product.by_expert(rows, up, sizes), None
        if adapters is not None and isinstance(adapted_up, AdaptedWeight):
            pairs = ExpertPairs.of(adapters, token, expert[order], n_here)
            inner = inner + adapted_up.change_of_experts(rows, pairs, product)
        if self.up.bias is not None:
            of_row = self.up.bias[...].reshape(n_here, -1).at[expert[order]]
            inner = inner + of_row.get(mode="clip")
        inner = between(inner, self.config)
        out = product.by_expert(inner, down, sizes)
        if pairs is not None and isinstance(adapted_down, AdaptedWeight):
            out = out + adapted_down.change_of_experts(inner, pairs, product)
        by_token = out.at[place].get(mode="clip").reshape(n_tokens, top_k, -1).astype(jnp.float32)
        return (weights[:, :, None] * by_token).sum(axis=1).astype(x.dtype)


def _base(weight: Any) -> Any:
    return weight.base if isinstance(weight, AdaptedWeight) else weight


def _router_norm(experts: Experts, p: Weights) -> RMSNorm | None:
    if experts.router_norm is None:
        return None
    return RMSNorm(Norm(kind="rms_norm", eps=experts.router_norm), p("router_norm.scale"))


def choose(experts: Experts, logits: jax.Array, correction: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Choose each token's experts from logits [T, X] float32: weights and experts [T, k] (int32)."""
    match experts.scores:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
        case "softmax_of_chosen":
            scores = logits
    rating = scores if correction is None else scores + correction.astype(jnp.float32)
    sort, count = partial(chosen_by_sorting, experts), partial(chosen_by_counting, experts)
    weights, chosen = lax.platform_dependent(scores, rating, cpu=sort, default=count)
    if experts.scores == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if experts.renormalised:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (jnp.maximum(total, experts.least_sum) if experts.least_sum else total)
    return weights * experts.multiplier, chosen


def chosen_by_sorting(experts: Experts, scores: jax.Array, rating: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scores of the experts with the best ratings, and these experts, both [T, k]."""
    if experts.n_groups > 1:
        by_group = rating.reshape(len(rating), experts.n_groups, -1)
        best = lax.top_k(by_group, experts.scores_of_group)[0].sum(axis=-1)  # [T, groups]
        groups = lax.top_k(best, experts.top_groups)[1]
        in_top = (groups[:, :, None] == jnp.arange(experts.n_groups)).any(axis=1)
        rating = jnp.where(in_top[:, :, None], by_group, -jnp.inf).reshape(rating.shape)
    chosen = lax.top_k(rating, experts.top_k)[1]
    return jnp.take_along_axis(scores, chosen, axis=-1), chosen


def chosen_by_counting(experts: Experts, scores: jax.Array, rating: jax.Array) -> tuple[jax.Array, jax.Array]:
    """chosen_by_sorting without a sort, for GPUs."""
    if experts.n_groups > 1:
        by_group = rating.reshape(len(rating), experts.n_groups, -1)
        best = by_group.max(axis=-1)  # [T, groups]
        if experts.scores_of_group == 2:  # the best sum of two
            sums = by_group[..., :, None] + by_group[..., None, :]
            best = jnp.where(jnp.eye(by_group.shape[-1], dtype=bool), -jnp.inf, sums).max(axis=(-1, -2))
        in_top = ranks(best) < experts.top_groups
        rating = jnp.where(in_top[:, :, None], by_group, -jnp.inf).reshape(rating.shape)
    expert = jnp.arange(experts.number, dtype=jnp.int32)
    is_chosen = ranks(rating)[:, None] == jnp.arange(experts.top_k)[:, None]  # [T, k, X]
    weights = jnp.where(is_chosen, scores[:, None], 0).sum(axis=-1)
    chosen = jnp.where(is_chosen, expert, 0).sum(axis=-1, dtype=jnp.int32)
    return weights, jnp.minimum(chosen, experts.number - 1)  # of a NaN, several may have one rank
