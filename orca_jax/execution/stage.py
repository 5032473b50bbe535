"""The jitted programs of one stage: a forward pass for each bucket, and what may follow it.

The choice of tokens is apart (sampling.py), so that a forward pass can go ahead while the choice still
waits for the host. What one iteration needs from the host comes as a single int32 buffer.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from orca_jax.execution import stage_programs
from orca_jax.execution.attention_paths import AttentionPath
from orca_jax.execution.host_buffer import HostBuffer
from orca_jax.execution.matmul_backend import Products
from orca_jax.execution.programs import Program, ask_ptxas_once
from orca_jax.execution.sampling import has_native_choice
from orca_jax.execution.stage_programs import StageModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import FlatLayout
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.routed import Routed
from orca_jax.model.transformer import Parameters, Transformer
from orca_jax.request.routed_experts import Routing
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC
from orca_jax.user_model.decoder import OwnParameters

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

_WHOLE, _CACHES = P(), CACHE_SPEC  # on every device; split by heads


class Last(NamedTuple):
    """The outputs of the last stage's forward pass."""

    logits: jax.Array  # [R, V] float32
    rows: jax.Array  # the buffer's SamplerArrays [n, R] int32
    hidden: jax.Array  # [T, H]: what entered the last layer


class Stage:
    """The programs of one stage's layers on its devices; stage_programs.py has each one's inputs and outputs.

    `parameters` are those of `part.placement`, where that says, as arrays, or as jax.ShapeDtypeStruct with a
    sharding to compile without them. With `command_buffer_collectives` a GPU's command buffers hold the
    forward pass's collectives too. Every program takes first `weights`, in which each parameter is at its
    `places`, and last a buffer, which `host_buffer` makes for `forward` and `score_buffer` for the others,
    and `layout`. A weight may be replaced between two calls by another of its shapes, dtypes and shardings.

    The model's last layer computes keys and values of all tokens, and the rest of each row's last token; one
    that a user wrote computes everything of all. `forward` gives (out, caches, routed), with `out` a Last in
    the last stage. `score`, `pool` and `route` are the last stage's, and go on from `take` of `Last.hidden`;
    of these only `take` is compiled for each bucket. With an encoder, `encode` and `cross` come before.
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
        self.score_buffer = HostBuffer(attention, last=False)
        graph, state = nnx.split(parameters.decoder if own else Transformer(config, parameters, part.layers))
        # A flat tuple: each call passes every weight, and a deep tree costs the host more at each.
        self.weights, tree = jax.tree.flatten(state)
        if own:
            self.places: Mapping[str, Any] = {name: i for i, name in enumerate(parameters.names)}
        else:
            self.places = _places(config, parameters, part)
        routing, device = Routing(*config.expert_routing), part.group.devices[0]
        # Of the model's last layer only each row's last token needs the part with the experts.
        last_is_sparse = part.last and config.layers[-1].feed_forward.experts is not None
        self.last_is_sparse = last_is_sparse and routing.n_layers > 0
        self._options = None
        if device.platform != "cpu":
            ask_ptxas_once()
            self._options = _gpu_options(command_buffer_collectives=command_buffer_collectives)
        self._model = StageModel(
            graph,
            tree,
            part,
            by_hand=len(part.group) > 1 and not own,  # XLA partitions what a user wrote
            host_buffer=self.host_buffer,
            score_buffer=self.score_buffer,
            products=products,
            routing=routing,
            last_is_sparse=last_is_sparse,
            native_choice=has_native_choice(device),
        )
        self.forward = self._program(self._forward, donated=(1,))
        past_last = (_WHOLE, _CACHES, _WHOLE), _WHOLE
        self.score = self._program(self._on_each(stage_programs.score, *past_last))
        self.pool = self._program(self._on_each(stage_programs.pool, *past_last))
        self.route = self._program(self._on_each(stage_programs.route, *past_last))
        encode = self._on_each(stage_programs.encode, (_CACHES, _WHOLE), (_WHOLE, _CACHES))
        cross = self._on_each(stage_programs.cross, (_CACHES, _WHOLE, _WHOLE), _CACHES)
        self.encode, self.cross = self._program(encode, donated=(1,)), self._program(cross, donated=(1,))
        take = jax.jit(stage_programs.take, out_shardings=part.group.place())
        self.take = Program(take, key=lambda hidden, at: hidden.shape[0])

    @property
    def parameters(self) -> dict[str, Any]:
        """The weights by name, each in its form."""
        return jax.tree.map(lambda place: self.weights[place], dict(self.places))

    def _forward(self, *arrays: Any, layout: FlatLayout) -> tuple[jax.Array | Last, list[LayerCache], Routed]:
        """stage_programs.forward on each device; with the last stage's logits the buffer's SamplerArrays."""
        specs = (_CACHES, _WHOLE, _WHOLE), (_WHOLE, _CACHES, _WHOLE)
        out, caches, routed = self._on_each(stage_programs.forward, *specs)(*arrays, layout=layout)
        if not self.part.last:
            return out, caches, routed
        logits, hidden = out
        return Last(logits, layout.split(arrays[-1]).sampler, hidden), caches, routed

    def _on_each(
        self, compute: Callable[..., Any], in_specs: tuple[P, ...], out_specs: P | tuple[P, ...]
    ) -> Callable[..., Any]:
        """`compute` of this stage on each of its devices; the specs are those of all arrays but weights."""

        def program(*arrays: Any, layout: FlatLayout) -> Any:
            own = partial(compute, self._model, layout=layout)
            if not self._model.by_hand:
                return own(*arrays)
            # Not checked (check_vma): Pallas kernels and what is gathered do not say over which axes their
            # results vary.
            specs = [weight.sharding.spec for weight in self.weights]
            on_each = jax.shard_map(
                own,
                mesh=self.part.group.mesh,
                in_specs=(specs, *in_specs),
                out_specs=out_specs,
                check_vma=False,
            )
            return on_each(*arrays)

        program.__name__ = compute.__name__
        return program

    def _program(self, function: Callable[..., Any], donated: tuple[int, ...] = ()) -> Program:
        """`function`, compiled for each layout."""
        made = jax.jit(
            function, static_argnames="layout", donate_argnums=donated, compiler_options=self._options
        )
        return Program(made, key=lambda *arrays, layout: layout)


def _places(config: ModelConfig, parameters: Parameters, part: StagePart) -> dict[str, Any]:
    """The place of each parameter in a stage's flat weights: an index, or a FormedWeight of indices."""
    marks = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), dict(parameters))
    leaves = jax.tree.leaves(nnx.state(Transformer(config, marks, part.layers)))
    place_of = {id(mark): i for i, mark in enumerate(leaves)}
    return jax.tree.map(lambda mark: place_of[id(mark)], marks)


def _gpu_options(*, command_buffer_collectives: bool) -> dict[str, str | bool]:
    """XLA's options for a forward program on GPUs."""
    options = dict(_GPU_OPTIONS)
    if command_buffer_collectives:
        options["xla_gpu_enable_command_buffer"] = f"{_RECORDED},COLLECTIVES"
        if jax.__version_info__ >= (0, 11):
            # XLA's own kernels for small all-reduces are never recorded there; NCCL's are.
            options["xla_gpu_experimental_use_collective_kernels"] = ""
    return options
