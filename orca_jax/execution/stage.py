"""The jitted programs of one stage: a forward pass for each bucket, and the scoring of a prompt's tokens.

The choice of tokens is apart (sampling.py), so that a forward pass can go ahead while the choice still
waits for the host. What one iteration needs from the host comes as a single int32 buffer.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from orca_jax.execution.attention_paths import AttentionPath
from orca_jax.execution.host_buffer import HostBuffer
from orca_jax.execution.matmul_backend import Products
from orca_jax.execution.own_decoder import OwnParameters
from orca_jax.execution.programs import Program
from orca_jax.execution.ptxas_version import ask_ptxas_once
from orca_jax.execution.sampling import has_native_choice, packed_logprobs
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import FlatArrays, FlatLayout, SamplerArrays
from orca_jax.model.block import Evaluated, Passed
from orca_jax.model.gpt import GPT, Parameters
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import Matmul
from orca_jax.model.routed import Routed, packed
from orca_jax.model.shard import ALONE, Shard
from orca_jax.request.routed_experts import Routing
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC

_GPU_OPTIONS: dict[str, str | bool] = {
    # Where weights and caches fill most of the memory XLA would compute products twice, to save temporaries
    # that are small anyway.
    "xla_disable_hlo_passes": "rematerialization",
    # XLA would give the attention kernel slices of the buffer in place of copies (by default from jax 0.11),
    # and a Mosaic kernel refuses, at run time, an array that does not begin at a multiple of 256 bytes.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
# What XLA records into command buffers (CUDA graphs) unless told otherwise; an option replaces all of it.
_RECORDED = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"


class Last(NamedTuple):
    """What the last stage's forward pass gives."""

    logits: jax.Array  # [R, V] float32
    rows: jax.Array  # the buffer's SamplerArrays [n, R] int32
    hidden: jax.Array  # [T, H]: what `last_layer` of the model starts from


class Stage:
    """The programs of one stage's layers on its devices.

    `parameters` are those of `part.placement`, where that says, as arrays, or as jax.ShapeDtypeStruct with a
    sharding to compile without them. `host_buffer` makes the buffer of an iteration. With
    `command_buffer_collectives` a GPU's command buffers hold the forward pass's collectives too.

    The model's last layer computes keys and values of all tokens, and the rest of each row's last token; one
    that a user wrote computes everything of all.

    `forward(weights, caches, arrived, buffer, layout=)` gives (out, caches, routed). `arrived` is the hidden
    array [T, H] of the stage before; for the first stage last_token [n_rows], each row's newest token. `out`
    is the hidden array [T, H], or Last from the last stage; `routed` are the experts that tokens chose.

    `weights` are the arrays that every call passes, and `names` their names.
    Each may be replaced between two calls by another of its shape, dtype and sharding.

    `score(weights, x, cache, buffer, layout=)` is the last stage's: LOGPROBS as words,
    [SCORED, LOGPROB_WORDS], of a ScoredPart's tokens. `x` [SCORED, H] is `take(hidden, at)` of Last's hidden
    states and the part's `at`, `cache` the last layer's after the forward pass, and `score_buffer` makes the
    buffer of the part's batch. Of these two only `take` is compiled for each bucket.

    `pool(weights, x, cache, buffer, layout=)` gives the sums [R, E] float32 of each row's final hidden states
    in a PooledPart; its `x` and its buffer are made as those of `score`. Likewise `route` gives the experts
    that a PooledPart's tokens choose in the last layer, [SCORED, 1, k].

    With an encoder, which takes no part in these, an iteration whose rows run it calls programs before
    `forward` that are given the encoder's batch. `encode(weights, cache, buffer, layout=)` is the first
    stage's: the hidden array [T, H] behind the encoder, and the first layer's cache, in whose slots the
    encoder's layers keep their keys and values in turn. `cross(weights, caches, encoded, buffer, layout=)` is
    every stage's: the caches with the cross-attention keys and values of that hidden array.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        part: StagePart,
        *,
        attention: AttentionPath,
        products: Products,
        command_buffer_collectives: bool = False,
    ) -> None:
        self.part = part
        own = isinstance(parameters, OwnParameters)
        # In a layer that a user wrote, any part may be needed for all tokens.
        self.host_buffer = HostBuffer(attention, last=part.last and not own)
        score_buffer = HostBuffer(attention, last=False)
        graph, state = nnx.split(parameters.decoder if own else GPT(config, parameters, part.layers))
        # A flat tuple: each call passes every weight, and a deep tree costs the host more at each.
        self.weights, tree = jax.tree.flatten(state)
        self.names = parameters.names if own else _flat_names(config, parameters, part)
        group = part.group
        # XLA partitions what a user wrote; what is written here says itself what one device computes.
        by_hand = len(group) > 1 and not own
        routing = Routing(*config.expert_routing)
        # Of the model's last layer only each row's last token needs the part with the experts.
        last_is_sparse = part.last and config.layers[-1].feed_forward.experts is not None
        share = group.shard if by_hand else lambda: ALONE
        native_choice = has_native_choice(group.devices[0])

        def one_part(
            weights: list[jax.Array],
            caches: list[LayerCache],
            arrived: jax.Array,
            buffer: jax.Array,
            *,
            layout: FlatLayout,
        ) -> tuple[Any, list[LayerCache], Routed]:
            """What one device of the stage computes."""
            model, shard = nnx.merge(graph, jax.tree.unflatten(tree, weights)), share()
            batch = layout.split(buffer)
            product = products.bind(batch.row_start[-1:])
            if part.first:
                last = arrived.at[batch.last_row].get(mode="clip")
                token_ids = jnp.where(batch.take_last == 1, last, batch.token_ids)
                x = model.embed(token_ids, batch.positions, shard, product)
            else:
                x = arrived
            attend = self.host_buffer.bind(layout, batch, buffer)
            last_token_index = jnp.maximum(batch.row_start[1:] - 1, 0)  # [R]: those with a next token
            evaluated = None
            if (bound := self.host_buffer.bind_last(layout, batch, buffer)) is not None:
                attend_last, n_rows = bound
                cross_last = self.host_buffer.bind_last_cross(layout, batch)
                evaluated = Evaluated(last_token_index, attend_last, products.bind(n_rows), cross_last)
            cross = self.host_buffer.bind_cross(layout, batch)
            tables = (batch.positions, batch.slot_of_token)
            x, hidden, caches, chosen = model.through(
                x, *tables, caches, attend, shard, product, evaluated, cross
            )
            routed = packed(chosen, routing, last_apart=last_is_sparse and evaluated is not None)
            if not part.last:
                return x, caches, routed
            if evaluated is None:
                x = x.at[last_token_index].get(mode="clip")
            else:
                product = evaluated.product
            return (model.logits(x, shard, product), hidden), caches, routed

        def past_last_layer(
            weights: list[jax.Array], x: jax.Array, cache: LayerCache, buffer: jax.Array, layout: FlatLayout
        ) -> tuple[Any, Shard, FlatArrays, Matmul, Passed]:
            """The model, its shard, the batch, the product, and what the last layer gives for all of x."""
            model, shard = nnx.merge(graph, jax.tree.unflatten(tree, weights)), share()
            batch = layout.split(buffer)
            product, attend = products.bind(batch.row_start[-1:]), score_buffer.bind(layout, batch, buffer)
            passed = model.last_layer(x, batch.positions, cache, attend, shard, product)
            return model, shard, batch, product, passed

        def score(*arrays: Any, layout: FlatLayout) -> jax.Array:
            model, shard, batch, product, passed = past_last_layer(*arrays, layout=layout)
            n_top = SamplerArrays(*batch.sampler).n_top
            logits = model.logits(passed.x, shard, product)
            return packed_logprobs(logits, batch.token_ids, n_top, native=native_choice)

        def pool(*arrays: Any, layout: FlatLayout) -> jax.Array:
            model, _, batch, product, passed = past_last_layer(*arrays, layout=layout)
            x = model.final_states(passed.x, product).astype(jnp.float32)
            token = jnp.arange(layout.n_tokens)
            mine = (token >= batch.row_start[:-1, None]) & (token < batch.row_start[1:, None])  # [R, T]
            # Not a product with ones and zeros: no number of another row may have an effect, not even NaN.
            return jnp.where(mine[:, :, None], x, 0).sum(axis=1)

        def route(*arrays: Any, layout: FlatLayout) -> jax.Array:
            *_, passed = past_last_layer(*arrays, layout=layout)
            assert passed.chosen is not None
            return passed.chosen[:, None].astype(routing.dtype)

        def encode_part(
            weights: list[jax.Array],
            cache: LayerCache,
            buffer: jax.Array,
            *,
            layout: FlatLayout,
        ) -> tuple[jax.Array, LayerCache]:
            model, shard = nnx.merge(graph, jax.tree.unflatten(tree, weights)), share()
            batch = layout.split(buffer)
            product, attend = products.bind(batch.row_start[-1:]), score_buffer.bind(layout, batch, buffer)
            assert isinstance(model, GPT) and model.encoder is not None
            x = model.embed_input(batch.token_ids, batch.positions, shard)
            return model.encoder.through(x, batch.slot_of_token, cache, attend, shard, product)

        def cross_part(
            weights: list[jax.Array],
            caches: list[LayerCache],
            encoded: jax.Array,
            buffer: jax.Array,
            *,
            layout: FlatLayout,
        ) -> list[LayerCache]:
            model, batch = nnx.merge(graph, jax.tree.unflatten(tree, weights)), layout.split(buffer)
            assert isinstance(model, GPT)
            product, attend = products.bind(batch.row_start[-1:]), score_buffer.bind(layout, batch, buffer)
            return model.cross_caches(encoded, batch.slot_of_token, caches, attend, product)

        def on_each(compute: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Any:
            if not by_hand:
                return compute
            specs = [weight.sharding.spec for weight in self.weights]
            # Not checked (check_vma): Pallas kernels and what is gathered do not say over which axes
            # their results vary.
            return jax.shard_map(
                compute,
                mesh=group.mesh,
                in_specs=(specs, *in_specs),
                out_specs=out_specs,
                check_vma=False,
            )

        def forward(*arrays: Any, layout: FlatLayout) -> tuple[Any, list[LayerCache], Routed]:
            given = (P(), CACHE_SPEC, P())
            compute = on_each(partial(one_part, layout=layout), (CACHE_SPEC, P(), P()), given)
            out, caches, routed = compute(*arrays)
            if part.last:
                logits, hidden = out
                return Last(logits, layout.split(arrays[-1]).sampler, hidden), caches, routed
            return out, caches, routed

        options = None
        if group.devices[0].platform != "cpu":
            ask_ptxas_once()
            options = _gpu_options(command_buffer_collectives=command_buffer_collectives)
        self.forward = Program(
            jax.jit(
                forward,
                static_argnames="layout",
                donate_argnums=1,  # the caches
                compiler_options=options,
            ),
            key=lambda *arrays, layout: layout,
        )

        def apart(compute: Callable[..., jax.Array]) -> Program:
            """The program of one of those that begin past the last layer."""

            @wraps(compute)
            def program(*arrays: Any, layout: FlatLayout) -> jax.Array:
                return on_each(partial(compute, layout=layout), (P(), CACHE_SPEC, P()), P())(*arrays)

            made = jax.jit(program, static_argnames="layout", compiler_options=options)
            return Program(made, key=lambda *arrays, layout: layout)

        def take(hidden: jax.Array, at: jax.Array) -> jax.Array:
            return hidden.at[at].get(mode="clip")

        self.last_is_sparse = last_is_sparse and routing.n_layers > 0
        self.score_buffer = score_buffer
        self.take = Program(
            jax.jit(take, out_shardings=group.place()), key=lambda hidden, at: hidden.shape[0]
        )
        self.score, self.pool, self.route = map(apart, (score, pool, route))

        def encode(*arrays: Any, layout: FlatLayout) -> tuple[jax.Array, LayerCache]:
            compute = partial(encode_part, layout=layout)
            return on_each(compute, (CACHE_SPEC, P()), (P(), CACHE_SPEC))(*arrays)

        def cross(*arrays: Any, layout: FlatLayout) -> list[LayerCache]:
            compute = partial(cross_part, layout=layout)
            return on_each(compute, (CACHE_SPEC, P(), P()), CACHE_SPEC)(*arrays)

        self.encode, self.cross = (
            Program(
                jax.jit(compute, static_argnames="layout", donate_argnums=1, compiler_options=options),
                key=lambda *arrays, layout: layout,
            )
            for compute in (encode, cross)
        )


def _flat_names(config: ModelConfig, parameters: Parameters, part: StagePart) -> list[str]:
    """The names of a stage's parameters in the order of its flat weights."""
    marks: Any = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in parameters.items()}
    name_of = {id(mark): name for name, mark in marks.items()}
    leaves = jax.tree.leaves(nnx.state(GPT(config, marks, part.layers)))
    return [name_of[id(leaf)] for leaf in leaves]


def _gpu_options(*, command_buffer_collectives: bool) -> dict[str, str | bool]:
    """XLA's options for a forward program on GPUs."""
    options = dict(_GPU_OPTIONS)
    if command_buffer_collectives:
        options["xla_gpu_enable_command_buffer"] = f"{_RECORDED},COLLECTIVES"
        if jax.__version_info__ >= (0, 11):
            # XLA's own kernels for small all-reduces are never recorded there; NCCL's are.
            options["xla_gpu_experimental_use_collective_kernels"] = ""
    return options
