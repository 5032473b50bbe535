"""The compiled programs of one stage (ORCA 4.1), and its weights.

A stage is a range of layers on one group of devices. An iteration runs the stage's `forward` once, over the
tokens of all requests side by side (selective batching, ORCA 3.2). XLA compiles for fixed shapes, so there
is one `forward` for each bucket of tokens. Everything else that an iteration needs from the host (positions,
slots, block tables, sampling parameters) comes as one int32 buffer, because each array that a call passes
costs the host time.

The invariant is that programs keep no state. Weights are arguments; caches are donated arguments and
results. So a weight can be replaced between two iterations, and caches be freed and made anew, without
compiling anything.

Choosing tokens is a separate program (sampling.py): a forward pass can start while the choice still waits for
token masks from the host. Requests for more than the next token (a prompt's log-probabilities, embeddings,
experts) are separate programs too, which only run when a row asks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from orca_jax.execution import stage_programs
from orca_jax.execution.attention_paths import AttentionPath
from orca_jax.execution.host_buffer import HostBuffer
from orca_jax.execution.matmul_backend import Products
from orca_jax.execution.programs import Program, ask_ptxas_once
from orca_jax.execution.routed import Routed
from orca_jax.execution.sampling import has_native_choice
from orca_jax.execution.stage_programs import HeadInput, StageModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import FlatLayout
from orca_jax.model.kv_cache import LayerMemory
from orca_jax.model.transformer import Parameters, Transformer
from orca_jax.request.routed_experts import Routing
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC
from orca_jax.user_model.decoder import UserDecoder, UserParameters

_GPU_OPTIONS: dict[str, str | bool] = {
    # Where weights and caches fill most of the memory, XLA would compute products twice to save temporaries,
    # which are small anyway.
    "xla_disable_hlo_passes": "rematerialization",
    # XLA would pass slices of the buffer, not copies, to the attention kernel (by default from jax 0.11), and
    # at run time a Mosaic kernel refuses an array that does not begin at a multiple of 256 bytes.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
# The operations that XLA records into command buffers (CUDA graphs) by default. Setting the option replaces
# the whole list.
_RECORDED = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"

_WHOLE, _CACHES = P(), CACHE_SPEC  # the same on every device; split by heads


class Last(NamedTuple):
    """The outputs of the last stage's forward pass."""

    logits: jax.Array  # [R, V] float32
    rows: jax.Array  # the buffer's SamplerArrays [n, R] int32
    hidden: jax.Array  # [T, H] the last layer's input


class Stage:
    """The programs of one stage's layers on its devices; stage_programs.py has each one's inputs and outputs.

    `parameters` are placed as `part.placement` says: arrays or, to compile without them, ShapeDtypeStructs
    with shardings. With `command_buffer_collectives` a GPU's command buffers include collectives. `stacks`
    are the adapters of each weight that may have them, `a` and `b` of families/adapters.py.

    Every program takes `weights` first, a flat list in which `places` finds each parameter by name, and last
    a buffer and its `layout`; `host_buffer` fills the buffer of `forward`, `score_buffer` that of the others.
    A weight may be replaced between two calls by one of the same shape, dtype and sharding. Where the layout
    has adapters, `adapters` follow the weights: `weights_of` has both.

    `forward` returns (out, caches, routed); on the last stage `out` is a Last. The model's last layer
    computes keys and values of all tokens, and everything after them for each row's last token alone; a layer
    that a user wrote computes all of it for all tokens. `score`, `pool` and `route`, on the last stage, go on
    from rows of `Last.hidden` that `take` selects, and only `take` is compiled for each bucket. With an
    encoder, `encode` and `cross` run before `forward`.
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
        stacks: Mapping[str, tuple[Any, Sequence[Any]]] | None = None,
        max_adapters: int = 0,
    ) -> None:
        self.part = part
        self.causal = not config.is_bidirectional
        by_user = isinstance(parameters, UserParameters)
        self._by_user = by_user
        # A layer that a user wrote may need all tokens to the end, and a head reads all tokens' states.
        whole = by_user or config.n_layers in config.kept_states
        self.host_buffer = HostBuffer(attention, last=part.last and not whole)
        self.score_buffer = HostBuffer(attention, last=False)
        graph, state = nnx.split(
            parameters.decoder if by_user else Transformer(config, parameters, part.layers)
        )
        # Weights are a flat list, because a call passes every weight and a deep tree costs the host more.
        self.weights, tree = jax.tree.flatten(state)
        if by_user:
            self.places: Mapping[str, Any] = {name: i for i, name in enumerate(parameters.names)}
        else:
            self.places = _places(config, parameters, part)
        self.adapters, stacks_tree = jax.tree.flatten(dict(stacks or {}))
        routing, device = Routing(*config.expert_routing), part.group.devices[0]
        # In the model's last layer only each row's last token reaches the experts.
        last_is_sparse = part.last and config.layers[-1].experts is not None
        self.last_is_sparse = last_is_sparse and routing.n_layers > 0
        self._options = None
        if device.platform != "cpu":
            ask_ptxas_once()
            self._options = _gpu_options(command_buffer_collectives=command_buffer_collectives)
        self._model = StageModel(
            config,
            graph,
            tree,
            self.places,
            stacks_tree,
            max_adapters,
            part,
            by_hand=len(part.group) > 1 and not by_user,  # XLA partitions a user's model
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
        self.pool = self._program(
            self._on_each(stage_programs.pool, (*past_last[0], _WHOLE), (_WHOLE, _WHOLE))
        )
        self.route = self._program(self._on_each(stage_programs.route, *past_last))
        encode = self._on_each(stage_programs.encode, (_CACHES, _WHOLE), (_WHOLE, _CACHES))
        cross = self._on_each(stage_programs.cross, (_CACHES, _WHOLE, _WHOLE), _CACHES)
        self.encode, self.cross = self._program(encode, donated=(1,)), self._program(cross, donated=(1,))
        take = jax.jit(stage_programs.take, out_shardings=part.group.place())
        self.take = Program(take, key=lambda hidden, at: hidden.shape[0])

    @property
    def keeps_states(self) -> bool:
        """Whether its cache has the states that a head reads, after all layers' memory."""
        return self._model.keeps_states

    @property
    def parameters(self) -> Parameters:
        """The weights by name, as the stage was given them."""
        held = jax.tree.map(lambda place: self.weights[place], dict(self.places))
        if not self._by_user:
            return held
        model = self._model.model(self.weights)
        assert isinstance(model, UserDecoder)
        return UserParameters(model, held, [*self.places])

    def weights_of(self, layout: FlatLayout) -> list[Any]:
        """The weights that programs of this layout take."""
        return [*self.weights, *self.adapters] if layout.adapters else self.weights

    def _forward(
        self, *arrays: Any, layout: FlatLayout
    ) -> tuple[jax.Array | Last, list[LayerMemory], Routed]:
        """stage_programs.forward on each device; the last stage adds the buffer's SamplerArrays."""
        arrived = _WHOLE if self._model.config.reads is None else HeadInput._make((_WHOLE, _CACHES, _WHOLE))
        specs = (_CACHES, arrived, _WHOLE), (_WHOLE, _CACHES, _WHOLE)
        out, caches, routed = self._on_each(stage_programs.forward, *specs)(*arrays, layout=layout)
        if not self.part.last:
            return out, caches, routed
        logits, hidden = out
        return Last(logits, layout.split(arrays[-1]).sampler, hidden), caches, routed

    def _on_each(
        self, compute: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: P | tuple[P, ...]
    ) -> Callable[..., Any]:
        """Run `compute` on each of the stage's devices; the specs cover all arrays but the weights."""

        def program(*arrays: Any, layout: FlatLayout) -> Any:
            share = partial(compute, self._model, layout=layout)
            if not self._model.by_hand:
                return share(*arrays)
            # check_vma is off: Pallas kernels and gathered arrays do not say over which axes they vary.
            specs = [weight.sharding.spec for weight in self.weights_of(layout)]
            on_each = jax.shard_map(
                share,
                mesh=self.part.group.mesh,
                in_specs=(specs, *in_specs),
                out_specs=out_specs,
                check_vma=False,
            )
            return on_each(*arrays)

        program.__name__ = compute.__name__
        return program

    def _program(self, function: Callable[..., Any], donated: tuple[int, ...] = ()) -> Program:
        """A program of `function`, compiled for each layout."""
        made = jax.jit(
            function, static_argnames="layout", donate_argnums=donated, compiler_options=self._options
        )
        return Program(made, key=lambda *arrays, layout: layout)


def _places(config: ModelConfig, parameters: Parameters, part: StagePart) -> dict[str, Any]:
    """Each parameter's place in a stage's flat weights: an index, or a FormedWeight of indices."""
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
            # XLA's kernels for small all-reduces are never recorded; NCCL's are.
            options["xla_gpu_experimental_use_collective_kernels"] = ""
    return options


class _Parked(NamedTuple):
    """An array in host memory, and its place on the devices."""

    values: np.ndarray
    place: Any


class StageWeights:
    """Replaces a stage's weights by name between iterations, or parks them in host memory.

    Only the thread that runs the stage may use this.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._arrays: list[Any] = stage.weights
        self._places = stage.places
        self._shardings = [array.sharding for array in stage.weights]
        self._parked: dict[int, np.ndarray] = {}  # arrays that are not on the device

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def sharding(self, name: str) -> Any:
        """The weight's Sharding, or a FormedWeight of Shardings."""
        return jax.tree.map(lambda i: self._shardings[i], self._places[name])

    def copy(self, name: str) -> Any:
        """A copy of the whole weight in host memory: an array, or a FormedWeight of arrays."""
        return jax.tree.map(self._copied, self._places[name])

    def replace(self, name: str, weight: Any) -> None:
        """Replace a weight and free the old one."""
        jax.tree.map(self._put, self._places[name], weight)

    def _copied(self, i: int) -> np.ndarray:
        return self._parked[i].copy() if i in self._parked else np.array(self._arrays[i])

    def _put(self, i: int, array: jax.Array) -> None:
        self._parked.pop(i, None)
        self._arrays[i] = array

    def park(self) -> None:
        """Move all weights and adapters to host memory, one at a time."""
        for i, stack in enumerate(self._stage.adapters):
            if isinstance(stack, jax.Array):
                self._stage.adapters[i] = _Parked(np.array(stack), stack.sharding)
        for i, array in enumerate(self._arrays):
            if i not in self._parked:
                self._parked[i] = np.array(array)
                self._arrays[i] = None

    def unpark(self) -> None:
        """Move what is in host memory back to the device."""
        for i, stack in enumerate(self._stage.adapters):
            if isinstance(stack, _Parked):
                value = jax.device_put(stack.values, stack.place, may_alias=False)
                self._stage.adapters[i] = jax.block_until_ready(value)
        for i in [*self._parked]:
            value = jax.device_put(self._parked[i], self._shardings[i], may_alias=False)
            self._arrays[i] = jax.block_until_ready(value)
            del self._parked[i]
