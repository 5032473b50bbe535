"""All layers of the model over a flat batch (ORCA 2, Figure 1; selective batching: 3.2).

A Transformer holds weights and no state: caches are arguments and results. GPT, Llama, T5 and DeepSeek are
all of this class: a configuration names the parts of each layer, and block.py puts them together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.model_config import ModelConfig, RankerHead
from orca_jax.families.parameters import (
    ENCODER,
    HEAD,
    HEAD_BIAS,
    HEAD_OFFSETS,
    Parameter,
    parameter_table,
)
from orca_jax.families.rotary import Rotary
from orca_jax.families.weight_form import Dense
from orca_jax.model.adapted import AdaptedWeight
from orca_jax.model.block import Block, LayerOutput, Parameters, run_blocks, weights_of_layer
from orca_jax.model.context import Beside, Iteration
from orca_jax.model.encoder import Encoder
from orca_jax.model.feed_forward import activate
from orca_jax.model.kv_cache import LayerCache, LayerMemory
from orca_jax.model.layers import Linear, Matmul, matmul, norm_of, soft_cap
from orca_jax.model.read_states import StateReader
from orca_jax.model.rotation import Rotation, rotation
from orca_jax.model.selection import all_keys, from_digits, in_digits
from orca_jax.model.shard import ALONE, Shard
from orca_jax.model.weight import kind_of, model_dtype, rows_of


def init_parameters(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> dict[str, Any]:
    """Random parameters, with the shapes, initial values and forms of the weight table."""
    table = parameter_table(config)
    keys = jax.random.split(key, len(table))
    return {
        name: init_parameter(entry, each_key, dtype)
        for (name, entry), each_key in zip(table.items(), keys, strict=True)
    }


def init_parameter(
    parameter: Parameter,
    key: jax.Array,
    dtype: jnp.dtype,
    arranged: Callable[[jax.Array], jax.Array] | None = None,
) -> Any:
    """One random parameter in its form; `arranged` is applied to its dense numbers."""

    def dense() -> jax.Array:
        dense_dtype = parameter.dense_dtype(dtype)
        match parameter.initial:
            case "ones":
                value = jnp.ones(parameter.shape, dense_dtype)
            case "zeros":
                value = jnp.zeros(parameter.shape, dense_dtype)
            case "normal":
                value = 0.02 * jax.random.normal(key, parameter.shape, dense_dtype)
        return value if arranged is None else arranged(value)

    if isinstance(parameter.form, Dense):
        return dense()
    return kind_of(parameter.form).encoded(parameter.form, dense())


class LayersOutput(NamedTuple):
    """The outputs of a stage's layers."""

    x: jax.Array  # [T, H], or [R, H] if only wanted tokens leave the last layer
    before_last: jax.Array  # [T, H] what `last_layer` takes: the last layer's input, or its `mixed`
    caches: list[LayerMemory]
    chosen: tuple[jax.Array, ...] = ()  # experts in each sparse layer, [T, k]; in the last maybe [R, k]
    states: jax.Array | None = None  # [T, s] the states that a head reads (ModelConfig.kept_states)


class Transformer(nnx.Module):
    """The model's layers `layers`, by default all, built from named parameters and never changed.

    With the first layer come the embedding and the encoder, with the last one the final norm and the head
    (`families.parameters.stage_parameters`). A call with a `shard` computes that part of the model, from that
    part's weights; `product` is the product of linear layers and of the head.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, layers: range | None = None) -> None:
        self.config = config
        self.dtype = model_dtype(parameters)
        layers = range(config.n_layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == config.n_layers
        project = config.embedding.size != config.hidden_size
        if first or (last and config.embedding.tied):
            self.token_embedding = nnx.Param(parameters["token_embedding"])
        self.first_layer = layers.start
        if first:
            sized = config.input_size is not None
            self.input_embedding = nnx.Param(parameters["inputs.embedding"]) if sized else None
            self.input_project = Linear(parameters["inputs.project"], None) if sized else None
            self.input_norm = norm_of(config.layers[0].norm, parameters.get, "inputs.norm") if sized else None
            positions = None if config.positions is None else nnx.Param(parameters["position_embedding"])
            self.position_embedding = positions
            segments = nnx.Param(parameters["segment_embedding"]) if config.embedding.n_segments else None
            self.segment_embedding = segments
            embedding_norm = config.embedding.norm
            self.embedding_norm = (
                None if embedding_norm is None else norm_of(embedding_norm, parameters.get, "embedding_norm")
            )
            self.project_in = Linear(parameters["project_in"], None) if project else None
            reads = config.reads
            self.states = None if reads is None else StateReader(config, reads, parameters)
        self.layers = nnx.List([Block(config.layers[i], weights_of_layer(parameters, i)) for i in layers])
        encoder = config.encoder if first else None
        self.encoder = None if encoder is None else Encoder(encoder, _within(parameters, ENCODER))
        if last:
            final = config.final_norm
            self.final_norm = None if final is None else norm_of(final, parameters.get, "final_norm")
            self.project_out = Linear(parameters["project_out"], None) if project else None
            # A tied head has a weight of its own if it has adapters (StageModel.model).
            has_head = HEAD in parameters or not config.embedding.tied
            self.head = Linear(parameters[HEAD], None) if has_head else None
            self.head_bias = nnx.Param(parameters[HEAD_BIAS]) if config.head_bias else None
            some = config.reads is not None and config.reads.n_drafted is not None
            self.head_offsets = nnx.Param(parameters[HEAD_OFFSETS]) if some else None
            of_ranker = _within(parameters, "ranker.")
            self.ranker = RankerLayers(config.ranker_head, of_ranker) if of_ranker else None

    def embed(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        shard: Shard = ALONE,
        product: Matmul = matmul,
    ) -> jax.Array:
        """Embed tokens for the first layer: token_ids, positions [T] int32 to [T, H]."""
        x = self._embedded(token_ids, shard, product)
        if self.project_in is not None:
            x = self.project_in(x, product)
        if self.position_embedding is not None and self.config.positions is not None:
            place = positions + self.config.positions.offset
            x = x + self.position_embedding[...].at[place].get(mode="clip")
        if self.segment_embedding is not None:
            x = x + self.segment_embedding[...].at[self._segments(token_ids, positions)].get(mode="clip")
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _segments(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Each token's segment [T] int32: the separators before it in its row, which begins in this batch."""
        embedding = self.config.embedding
        if embedding.separator is None:
            return jnp.zeros_like(positions)
        ends = (token_ids == embedding.separator).astype(jnp.int32)
        before = jnp.cumsum(ends) - ends
        first = jnp.maximum(jnp.arange(len(positions)) - positions, 0)
        return jnp.clip(before - before[first], 0, embedding.n_segments - 1)

    def embed_input(self, token_ids: jax.Array, positions: jax.Array, shard: Shard = ALONE) -> jax.Array:
        """Embed tokens for the encoder's first layer: token_ids, positions [T] int32 to [T, H]."""
        assert self.encoder is not None  # such a model's embedding has no adapters
        return self.encoder.begin(self._embedded(token_ids, shard, matmul), positions)

    def _embedded(self, token_ids: jax.Array, shard: Shard, product: Matmul) -> jax.Array:
        """The tokens' rows of the embedding, [T, E]."""
        x = self._rows(self.token_embedding.get_value(), token_ids, shard, product)  # [T, E]
        if self.config.embedding.multiplier != 1.0:
            x = x * jnp.asarray(self.config.embedding.multiplier, x.dtype)
        return x

    def _rows(self, adapted: Any, token_ids: jax.Array, shard: Shard, product: Matmul) -> jax.Array:
        """The tokens' rows of a table whose vocabulary the shards share, [V / n, ...]."""
        table = adapted.base if isinstance(adapted, AdaptedWeight) else adapted
        n_here = jax.tree.leaves(table)[0].shape[0]  # in every form the vocabulary is the first axis
        row = token_ids - shard.index * n_here if shard.n > 1 else token_ids
        x = rows_of(table, row, self.dtype)
        if shard.n > 1:
            is_here = (row >= 0) & (row < n_here)
            x = jnp.where(is_here[:, None], x, 0)
        if isinstance(adapted, AdaptedWeight) and product.adapters is not None:
            x = x + adapted.change_of_rows(row, product.adapters, product)
        return shard.total(x)

    def layer_inputs(
        self,
        token_ids: jax.Array,
        x: jax.Array,
        shard: Shard = ALONE,
        product: Matmul = matmul,
    ) -> jax.Array | None:
        """All layers' own inputs of tokens whose embeddings are x [T, H], [T, L, P]; None without them.

        Half of an input is the token's row of a table, half is made of its embedding.
        """
        if self.input_embedding is None or self.input_project is None or self.input_norm is None:
            return None
        size = self.config.input_size
        assert size is not None
        own = self._rows(self.input_embedding.get_value(), token_ids, shard, product)
        own = (own * jnp.asarray(size**0.5, own.dtype)).reshape(len(x), -1, size)
        made = self.input_project(x, product) * jnp.asarray(self.config.hidden_size**-0.5, x.dtype)
        return (self.input_norm(made.reshape(own.shape)) + own) * jnp.asarray(2**-0.5, x.dtype)

    def through(self, x: jax.Array, caches: Sequence[LayerMemory], iteration: Iteration) -> LayersOutput:
        """Run x [T, H] through the layers, which write the caches; only wanted tokens leave the last one."""
        # Cosine and sine are computed once for all layers with the same rotary positions.
        kinds = dict.fromkeys(block.config.rotary for block in self.layers)
        rotations = {kind: self._rotation(kind, iteration.positions) for kind in kinds}
        run = run_blocks(iteration)
        before_last, written, chosen = x, list[LayerMemory](), list[jax.Array]()
        kept, beside, selected = dict[int, jax.Array](), Beside(), None
        for i, (block, cache) in enumerate(zip(self.layers, caches, strict=True), 1):
            before_last, only_wanted = x, iteration.wanted is not None and i == len(self.layers)
            kept[self.first_layer + i - 1] = x
            own = None if iteration.layer_inputs is None else iteration.layer_inputs[:, i - 1]
            # Keys and values of another layer are in that layer's cache.
            source = self.config.memory_of(self.first_layer + i - 1) - self.first_layer
            shared = source < i - 1
            held = written[source] if shared else cache
            beside = Beside(own, selected if block.config.takes_selection else None)
            out = run(block, only_wanted, x, held, rotations[block.config.rotary], beside)
            selected = beside.selected if block.config.takes_selection else out.selected
            if block.config.has_both:
                beside = beside._replace(mixed=out.mixed)
            elif out.mixed is not None:
                before_last = out.mixed
            x = out.x
            written.append(cache if shared else out.cache)
            chosen += [] if out.chosen is None else [out.chosen]
        before_last = self._joined(before_last, beside, iteration)
        return LayersOutput(x, before_last, written, tuple(chosen), self._kept(kept, x))

    def _joined(self, x: jax.Array, beside: Beside, iteration: Iteration) -> jax.Array:
        """x [T, H] and after it what `last_layer` needs beside it (`ModelConfig.carried_size`)."""
        own = None if self.config.input_size is None else beside.layer_input  # a head's input is not carried
        digits = None
        if iteration.wanted is not None and self.config.selected_size:
            digits = in_digits(self._all_selected(beside.selected, iteration.positions), x.dtype)
        needed = [each for each in (x, beside.mixed, own, digits) if each is not None]
        return needed[0] if len(needed) == 1 else jnp.concatenate(needed, axis=1)

    def _apart(self, x: jax.Array) -> tuple[jax.Array, Beside]:
        """The parts of what `_joined` returns."""
        config, has_both = self.config, self.config.layers[-1].has_both
        ends = [config.hidden_size, config.hidden_size * (1 + has_both)]
        x, mixed, own, digits = jnp.split(x, [*ends, config.carried_size - config.selected_size], axis=1)
        return x, Beside(
            None if config.input_size is None else own,
            from_digits(digits) if config.selected_size else None,
            mixed if has_both else None,
        )

    def _all_selected(self, selected: jax.Array | None, positions: jax.Array) -> jax.Array:
        """The keys that the last layer takes, of all tokens; without a selection they see all keys."""
        attention = self.layers[-1].config.attention
        assert attention is not None and attention.indexer is not None
        every = all_keys(positions, attention.indexer.top_k)
        return every if selected is None else jnp.where(selected[:, :1] < 0, every, selected)

    def _kept(self, inputs: Mapping[int, jax.Array], x: jax.Array) -> jax.Array | None:
        """The states that a head reads [T, s], from layers' `inputs` and the last layer's output x."""
        n_layers = self.config.n_layers
        if not self.config.kept_states or self.first_layer + len(self.layers) != n_layers:
            return None
        states = [self.final_states(x) if i == n_layers else inputs[i] for i in self.config.kept_states]
        return jnp.concatenate(states, axis=1)

    def last_layer(self, x: jax.Array, cache: LayerMemory, iteration: Iteration) -> LayerOutput:
        """Run x [T, H] through the last layer alone; the tokens' keys and values are in its cache already.

        After x come the values beside it, as `LayersOutput.before_last` has them. Of a recurrent layer only
        what follows the mixer is run, which has seen the tokens.
        """
        block = self.layers[-1]
        rotation = self._rotation(block.config.rotary, iteration.positions)
        x, beside = self._apart(x)
        ctx = iteration.context(block.config, x, cache, rotation, beside)
        return LayerOutput(block(x, ctx), ctx.held, ctx.chosen)

    def cross_caches(
        self, encoded: jax.Array, caches: list[LayerCache], iteration: Iteration
    ) -> list[LayerCache]:
        """Write each layer's cross-attention keys and values of the encoder's tokens to its cache.

        `encoded` [T, H] is the encoder's output; the iteration's tokens and slots are the encoder's.
        """
        written: list[LayerCache] = []
        for block, cache in zip(self.layers, caches, strict=True):
            assert block.cross is not None
            written.append(block.cross.write(encoded, cache, iteration))
        return written

    def _rotation(self, rotary: Rotary | None, positions: jax.Array) -> Rotation | None:
        return None if rotary is None else rotation(rotary, positions, self.config.n_positions)

    def final_states(self, x: jax.Array, product: Matmul = matmul) -> jax.Array:
        """The head's input [R, E] from the last layer's output x [R, H]."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x, product)

    def judged(self, x: jax.Array, shard: Shard = ALONE, product: Matmul = matmul) -> jax.Array:
        """A ranker's results [R, P] from pooled final states x [R, E]."""
        if self.ranker is None:
            return self._logits_of(self.config.ranker_head.token_ids, x, shard, product)
        return self.ranker(x, product)

    def _logits_of(self, token_ids: Sequence[int], x: jax.Array, shard: Shard, product: Matmul) -> jax.Array:
        """The logits of `token_ids` alone, [R, len(token_ids)] float32: a product with a few rows."""
        head = (self.token_embedding if self.head is None else self.head.weight).get_value()
        plain = self.config.logit_multiplier == 1.0 and self.config.logit_soft_cap is None
        if isinstance(head, AdaptedWeight) or self.head_bias is not None or not plain:
            return self._logits(x, shard, product)[:, jnp.array(token_ids)]
        rows = self._rows(head, jnp.array(token_ids, jnp.int32), shard, product)
        return product.in_float32(x, rows)

    def logits(self, x: jax.Array, shard: Shard = ALONE, product: Matmul = matmul) -> jax.Array:
        """The logits [R, V] float32 from the last layer's output x [R, H]."""
        return self._logits(self.final_states(x, product), shard, product)

    def _logits(self, x: jax.Array, shard: Shard, product: Matmul) -> jax.Array:
        """The logits [R, V] float32 from final states x [R, E]."""
        head = (self.token_embedding if self.head is None else self.head.weight).get_value()
        if self.head is None and isinstance(head, AdaptedWeight):
            head = head.base  # adapters of the embedding
        logits = product.in_float32(x, head)
        if self.head_bias is not None:
            logits = logits + self.head_bias[...]
        if self.head_offsets is None:  # the few tokens that a head drafts are not split over devices
            logits = shard.side_by_side(logits)[:, : self.config.vocab_size]
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        return self._of_all_tokens(soft_cap(logits, self.config.logit_soft_cap))

    def _of_all_tokens(self, logits: jax.Array) -> jax.Array:
        """Place logits [R, v] of the tokens that a head drafts among those of all tokens, [R, V]."""
        if self.head_offsets is None:
            return logits
        token_ids = jnp.arange(logits.shape[1]) + self.head_offsets[...].astype(jnp.int32)
        others = jnp.full((logits.shape[0], self.config.vocab_size), -jnp.inf, logits.dtype)
        return others.at[:, token_ids].set(logits, mode="drop")


class RankerLayers(nnx.Module):
    """The layers of a ranker's head, from a pooled state to results."""

    def __init__(self, config: RankerHead, parameters: Parameters) -> None:
        self.config = config
        pooler = config.kind == "pooler"
        self.dense = Linear(parameters["dense.weight"], parameters.get("dense.bias")) if pooler else None
        self.norm = None if config.norm is None else norm_of(config.norm, parameters.get, "norm")
        self.out = Linear(parameters["out.weight"], parameters.get("out.bias"))

    def __call__(self, x: jax.Array, product: Matmul) -> jax.Array:
        if self.dense is not None:
            x, activation = self.dense(x, product), self.config.activation
            x = jnp.tanh(x) if activation == "tanh" else activate(x, activation)
        return self.out(x if self.norm is None else self.norm(x), product)


def _within(parameters: Parameters, prefix: str) -> Parameters:
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
