"""The programs of one stage, each a function of arrays that Stage traces.

In each of them `weights` are the stage's flat weights, with those of adapters after them where the layout
has adapters, `caches` has a LayerCache for each attention layer and a LayerState for each recurrent one, and
`buffer` int32 is the host's buffer for the batch (host_buffer.py), in the form of `layout`. On several
devices each computes its share: weights are split, caches are split by heads, the rest is the same on all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from orca_jax.execution.host_buffer import HostBuffer
from orca_jax.execution.matmul_backend import Products
from orca_jax.execution.routed import Routed, packed
from orca_jax.execution.sampling import packed_logprobs
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import TOKEN_EMBEDDING
from orca_jax.iteration.flat_batch import FlatArrays, FlatLayout, SamplerArrays
from orca_jax.model.adapted import AdaptedWeight, AdapterGroups
from orca_jax.model.block import LayerOutput
from orca_jax.model.context import Iteration, Tokens
from orca_jax.model.kv_cache import (
    LayerCache,
    LayerMemory,
    as_numbers,
    newest_in,
    newest_state,
    write,
)
from orca_jax.model.layers import Matmul
from orca_jax.model.read_states import StatesBefore
from orca_jax.model.recurrence import Kept, Rows
from orca_jax.model.shard import ALONE, Shard
from orca_jax.model.transformer import Transformer
from orca_jax.request.routed_experts import Routing
from orca_jax.sharding.partition import StagePart
from orca_jax.user_model.decoder import UserDecoder

Weights = Sequence[Array]


@dataclass(frozen=True, slots=True)
class StageModel:
    """The part of a stage's programs that is the same for all iterations.

    `graph` and `tree` rebuild the model from flat weights. `places` has each parameter's place in them, and
    `stacks` rebuilds the adapters of each weight that may have them from the arrays that follow; both are
    empty in a user's model. With `by_hand` the model itself computes each
    device's share; otherwise XLA's partitioner splits the work. `host_buffer` reads the buffer of `forward`,
    `score_buffer` that of the others.
    """

    config: ModelConfig
    graph: Any
    tree: Any
    places: Mapping[str, Any]
    stacks: Any
    max_adapters: int
    part: StagePart
    by_hand: bool
    host_buffer: HostBuffer
    score_buffer: HostBuffer
    products: Products
    routing: Routing
    last_is_sparse: bool
    native_choice: bool

    def shard(self) -> Shard:
        """The share of the device that runs the program."""
        return self.part.group.shard() if self.by_hand else ALONE

    @property
    def keeps_states(self) -> bool:
        """Whether the stage writes the states that a head reads: the last one, which has the last layer's."""
        return self.part.last and bool(self.config.kept_states)

    def model(self, weights: Weights) -> Transformer | UserDecoder:
        """The model with these weights."""
        n = self.tree.num_leaves
        if len(weights) == n:
            return nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights))
        parameters = jax.tree.map(lambda place: weights[place], dict(self.places))
        for name, (a, b) in jax.tree.unflatten(self.stacks, weights[n:]).items():
            base = parameters.get(name)
            if base is None:  # a tied head
                base = jax.tree.map(lambda place: weights[place], self.places[TOKEN_EMBEDDING])
            parameters[name] = AdaptedWeight(base, a, b)
        return Transformer(self.config, parameters, self.part.layers)

    def product(self, n_tokens: Array, adapter: Array) -> Matmul:
        """The products of tokens with these adapters [T]; none of them has one if the array is empty."""
        product = self.products.bind(n_tokens)
        if not adapter.size:
            return product
        return replace(product, adapters=AdapterGroups.of(adapter, self.max_adapters))

    def tokens(self, layout: FlatLayout, batch: FlatArrays, buffer: Array) -> Tokens:
        """All tokens of a batch whose buffer `score_buffer` made."""
        product = self.product(batch.row_start[-1:], batch.adapter_of_token)
        return Tokens(self.score_buffer.bind(layout, batch, buffer), product)


class HeadInput(NamedTuple):
    """The input of a head's iteration: the newest tokens, and the served model's states.

    `states` [n_blocks, n, B, s] are in the served model's blocks, in equal shares on n devices; its block
    `of_block[b]` has the tokens of the head's block b.
    """

    last_token: Array  # [n_rows] int32
    states: Array
    of_block: Array  # [the head's n_blocks] int32


def forward(
    stage: StageModel,
    weights: Weights,
    caches: list[LayerMemory],
    arrived: Array,
    buffer: Array,
    *,
    layout: FlatLayout,
) -> tuple[Any, list[LayerMemory], Routed]:
    """Run an iteration through the stage's layers (ORCA 3.1); caches and states are donated.

    `arrived` is the previous stage's hidden array [T, H] or, on the first stage, each row's newest token,
    last_token [n_rows] int32. Returns the hidden array [T, H] or, from the last stage, the logits [R, V]
    float32 of each row's last token and the last layer's input [T, H]; the written caches; the experts.

    After the layers' memory, `caches` of a model that a head reads have the states in its slots, and those of
    a head have its newest outputs by row; a head's `arrived` is a HeadInput.
    """
    part, (model, shard) = stage.part, (stage.model(weights), stage.shard())
    batch = layout.split(buffer)
    product = stage.product(batch.row_start[-1:], batch.adapter_of_token)
    layer_inputs = None
    beside = stage.keeps_states or stage.config.reads
    caches, extra = (caches[:-1], caches[-1]) if beside else (caches, None)
    before = None
    if isinstance(arrived, HeadInput):
        before, arrived = _states_before(arrived, newest_in(extra), batch, shard), arrived.last_token
    if part.first:
        last = arrived.at[batch.last_row].get(mode="clip")
        token_ids = jnp.where(batch.take_last == 1, last, batch.token_ids)
        x = model.embed(token_ids, batch.positions, shard, product)
        if isinstance(model, Transformer):
            layer_inputs = model.layer_inputs(token_ids, x, shard, product)
            if before is not None and model.states is not None:
                x, of_attention = model.states(x, before, product)
                layer_inputs = None if of_attention is None else of_attention[:, None]
    else:
        x = arrived
    attend = stage.host_buffer.bind(layout, batch, buffer)
    last_token_index = jnp.maximum(batch.row_start[1:] - 1, 0)  # [R] each row's last token in the batch
    wanted = None
    if (bound := stage.host_buffer.bind_last(layout, batch, buffer)) is not None:
        attend_last, n_rows = bound
        cross_last = stage.host_buffer.bind_last_cross(layout, batch)
        adapter = batch.adapter_of_token
        if layout.adapters:
            adapter = adapter.at[last_token_index].get(mode="clip")
        wanted = Tokens(attend_last, stage.product(n_rows, adapter), cross_last, last_token_index)
    tokens = Tokens(attend, product, stage.host_buffer.bind_cross(layout, batch))
    rows = _rows(stage, layout, batch) if layout.states else None
    iteration = Iteration(batch.positions, batch.slot_of_token, tokens, wanted, shard, rows, layer_inputs)
    x, hidden, caches, chosen, kept = model.through(x, caches, iteration)
    if kept is not None:
        assert isinstance(extra, LayerCache)
        caches = [*caches, write(extra, shard.share(kept)[:, None], None, batch.slot_of_token)]
    routed = packed(chosen, stage.routing, last_apart=stage.last_is_sparse and wanted is not None)
    if not part.last:
        return x, caches, routed
    if wanted is not None:
        product = wanted.product
    elif not layout.one_each:
        x = x.at[last_token_index].get(mode="clip")
    if stage.config.reads is not None:
        row = SamplerArrays(*batch.sampler).row
        output = model.final_states(x, product) if stage.config.reads.norm_output else x
        newest = newest_in(extra).at[row].set(shard.share(output), mode="drop")
        caches = [*caches, newest_state(newest)]
    return (model.logits(x, shard, product), hidden), caches, routed


def _states_before(head: HeadInput, newest: Array, batch: FlatArrays, shard: Shard) -> StatesBefore:
    """The states before a head's tokens; `newest` [n_rows, H] has this device's share of the head's own."""
    block_size = head.states.shape[2]
    block = head.of_block.at[batch.slot_of_token // block_size].get(mode="clip")
    served = head.states.at[block, 0, batch.slot_of_token % block_size].get(mode="clip")
    own = newest.at[batch.last_row].get(mode="clip")
    served, own = shard.side_by_side(as_numbers(served)), shard.side_by_side(own)
    return StatesBefore(served, own, batch.take_last == 1)


def _rows(stage: StageModel, layout: FlatLayout, batch: FlatArrays) -> Rows:
    """The rows of recurrent layers' states; a row starts where its first token has position 0."""
    start = batch.state_start
    token = jnp.arange(layout.n_tokens)
    row_of_token = jnp.searchsorted(start[1:], token, side="right").astype(jnp.int32)
    row_of_token = jnp.where(token < start[-1], row_of_token, layout.n_rows)
    starts = batch.positions.at[start[:-1]].get(mode="clip") == 0
    kept = None
    if layout.max_drafts:
        # Padding rows have the last real token, after which no state is kept.
        kept = Kept(jnp.maximum(batch.row_start[1:] - 1, 0), batch.kept_at, layout.max_drafts)
    kernels = stage.products.recurrent
    return Rows(start, row_of_token, batch.state_of_row, starts, layout.one_each, kept, kernels)


class _LastLayer(NamedTuple):
    model: Transformer | UserDecoder
    iteration: Iteration
    batch: FlatArrays
    output: LayerOutput


def _through_last_layer(
    stage: StageModel,
    weights: Weights,
    x: Array,
    cache: LayerMemory,
    buffer: Array,
    layout: FlatLayout,
) -> _LastLayer:
    """Run x [S, H] through the last layer, whose cache has the tokens' keys and values already."""
    model, shard = stage.model(weights), stage.shard()
    batch = layout.split(buffer)
    iteration = Iteration(batch.positions, None, stage.tokens(layout, batch, buffer), shard=shard)
    return _LastLayer(model, iteration, batch, model.last_layer(x, cache, iteration))


def score(
    stage: StageModel, weights: Weights, x: Array, cache: LayerMemory, buffer: Array, *, layout: FlatLayout
) -> Array:
    """Log-probabilities of a ScoredPart's tokens, LOGPROBS as words [SCORED, LOGPROB_WORDS] int32.

    `x` [SCORED, H] are rows of the last layer's input, which `take` selected; `cache` is the last layer's.
    """
    model, iteration, batch, output = _through_last_layer(stage, weights, x, cache, buffer, layout)
    n_top = SamplerArrays(*batch.sampler).n_top
    logits = model.logits(output.x, iteration.shard, iteration.tokens.product)
    return packed_logprobs(logits, batch.token_ids, n_top, native=stage.native_choice)


def pool(
    stage: StageModel,
    weights: Weights,
    x: Array,
    cache: LayerMemory,
    buffer: Array,
    before: Array,
    *,
    layout: FlatLayout,
) -> tuple[Array, Array]:
    """Sums [R, P] float32 of each row's final hidden states in a PooledPart, or a ranker's results.

    `before` [E] is the sum over the first row's tokens in earlier parts; the second output is the same for a
    part that goes on with this one's last row. The other arguments are as in `score`.
    """
    model, iteration, batch, output = _through_last_layer(stage, weights, x, cache, buffer, layout)
    shard, product = iteration.shard, iteration.tokens.product
    x = model.final_states(output.x, product).astype(jnp.float32)
    token = jnp.arange(layout.n_tokens)
    mine = (token >= batch.row_start[:-1, None]) & (token < batch.row_start[1:, None])  # [R, T]
    # A product with ones and zeros would let another row's NaN into the sum.
    sums = jnp.where(mine[:, :, None], x, 0).sum(axis=1).at[0].add(before)  # [R, E]
    last = sums[jnp.sum(batch.row_start[:-1] < batch.row_start[-1]) - 1]
    if not model.config.ranker:
        return sums, last
    assert isinstance(model, Transformer)
    n = jnp.float32(1)
    if model.config.ranker_head.mean:  # results are multiplied by the length, because the host divides by it
        n = jnp.maximum(batch.kv_length, 1)[:, None].astype(jnp.float32)
    results = model.judged((sums / n).astype(output.x.dtype), shard, product)
    return results.astype(jnp.float32) * n, last


def route(
    stage: StageModel, weights: Weights, x: Array, cache: LayerMemory, buffer: Array, *, layout: FlatLayout
) -> Array:
    """Experts that a PooledPart's tokens choose in the last layer, [SCORED, 1, k]; see `score`."""
    output = _through_last_layer(stage, weights, x, cache, buffer, layout).output
    assert output.chosen is not None
    return output.chosen[:, None].astype(stage.routing.dtype)


def encode(
    stage: StageModel, weights: Weights, cache: LayerMemory, buffer: Array, *, layout: FlatLayout
) -> tuple[Array, LayerCache]:
    """Run the encoder, on the first stage: its output [T, H], and the first layer's cache, which is donated.

    The batch is the encoder's. All encoder layers write their keys and values to the same slots of that
    cache, one layer after the other.
    """
    model, shard = stage.model(weights), stage.shard()
    batch = layout.split(buffer)
    tokens = stage.tokens(layout, batch, buffer)
    assert isinstance(model, Transformer) and model.encoder is not None
    x = model.embed_input(batch.token_ids, batch.positions, shard)
    iteration = Iteration(batch.positions, batch.slot_of_token, tokens, shard=shard)
    assert isinstance(cache, LayerCache)
    return model.encoder.through(x, cache, iteration)


def cross(
    stage: StageModel,
    weights: Weights,
    caches: list[LayerCache],
    encoded: Array,
    buffer: Array,
    *,
    layout: FlatLayout,
) -> list[LayerCache]:
    """Write cross attention's keys and values of the encoder's output [T, H]; the caches are donated."""
    model, batch = stage.model(weights), layout.split(buffer)
    assert isinstance(model, Transformer)
    tokens = stage.tokens(layout, batch, buffer)
    return model.cross_caches(encoded, caches, Iteration(batch.positions, batch.slot_of_token, tokens))


def take(hidden: Array, at: Array) -> Array:
    """Select rows `at` [S] int32 of the hidden array [T, H]: [S, H]."""
    return hidden.at[at].get(mode="clip")
