"""The workers of one process (ORCA 4.1): each feeds one stage's programs, and never waits for its device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.config import Attention, ServingConfig
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.execution.host_blocks import HostBlocks
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.execution.programs import Program, ToCompile
from orca_jax.execution.prompt_reads import PromptReader, PromptReads
from orca_jax.execution.routed import DeviceRouted, Routed, RoutedAgain
from orca_jax.execution.sampling import DeviceTokens, TokenChooser, row_words
from orca_jax.execution.served_states import ServedStates, states_shape
from orca_jax.execution.stage import Last, Stage
from orca_jax.families.adapters import StackShapes, adaptable, padded_rank, stack_shapes
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import BatchSizes, FlatBatch, FlatLayout
from orca_jax.iteration.message import ControlMessage, MakeWords
from orca_jax.iteration.rows.encoder import lay_out_encoder
from orca_jax.iteration.shape import EngineShape
from orca_jax.model.kv_cache import (
    LayerCache,
    LayerMemory,
    LayerState,
    cache_in,
    copy_blocks,
    copy_state,
    layer_memory,
    newest_state,
    state_cache,
    state_in,
    with_cache,
    with_state,
)
from orca_jax.model.transformer import Parameters
from orca_jax.model.weight import model_dtype
from orca_jax.request.sampled import Sampled
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC, stack_specs


class Worker:
    """One stage of an engine: its share of the weights, its layers' caches, and its programs.

    Caches have the parameters' dtype. `attention` is chosen by device and model unless given; raises
    ConfigError if the given one cannot run here. The last stage samples.

    With `caches` False the programs can be compiled, but not run before `renew`. Until then `parameters` may
    be jax.ShapeDtypeStructs with their shardings.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        shape: EngineShape,
        part: StagePart,
        *,
        command_buffer_collectives: bool = False,
        attention: Attention | None = None,
        caches: bool = True,
    ) -> None:
        group, self._dtype = part.group, model_dtype(parameters)
        self._n_rows = shape.n_rows
        self._n_states = shape.n_states
        self._shape = shape
        self._stack_shapes: dict[str, StackShapes] = {}
        self._no_copies = np.full((shape.max_rows, 2), shape.n_blocks, np.int32)  # out of range
        self.attention = choose_attention(
            group.devices[0],
            config,
            n_heads=config.n_heads // len(group),
            block_size=shape.block_size,
            dtype=self._dtype,
            forced=attention,
            deterministic=shape.deterministic,
        )
        products = choose_products(group.devices[0], self._dtype, deterministic=shape.deterministic)
        self.description = products.describe_with(self.attention.description)
        self.stage = Stage(
            config,
            parameters,
            part,
            attention=self.attention.path,
            products=products,
            command_buffer_collectives=command_buffer_collectives,
            stacks=self._stacks(config, parameters, part),
            max_adapters=shape.max_adapters,
        )
        self._place = group.place()
        self._config = config
        put = jax.jit(
            _with_adapter,
            donate_argnums=0,
            out_shardings=[stack.sharding for stack in self.stage.adapters],
        )
        self._put_adapter = Program(put, key=lambda *_: ())
        # Caches are made on their devices and committed to them, like the caches that programs return:
        # otherwise each program would be compiled twice.
        cache_place = group.place(CACHE_SPEC)
        self.stored = self.attention.stored(group.devices[0], self._dtype)
        self._cache_place = cache_place
        self._empty = _zeros(cache_place)
        copy = jax.jit(copy_blocks, donate_argnums=0, out_shardings=cache_place)
        self._copy = Program(copy, key=lambda *_: ())
        self._recurrent = [
            at for at, i in enumerate(part.layers) if config.layers[i].recurrence is not None
        ]  # the places in `_caches` that have states
        # The place in `_caches` of what the last layer reads.
        self._last_cache = config.memory_of(part.layers[-1]) - part.layers[0]
        copy = jax.jit(copy_state, donate_argnums=0, out_shardings=cache_place)
        self._copy_state = Program(copy, key=lambda *_: ())
        self._caches: list[LayerMemory] = []
        self.host: HostBlocks | None = None
        if shape.n_host_blocks:
            likes = self._paged(self._memory(self._paged_like, jax.ShapeDtypeStruct))
            self.host = HostBlocks(shape.n_host_blocks, shape.n_blocks, [*likes.values()], group)
        self.host_states: HostBlocks | None = None
        if shape.n_host_states:
            memories = self._memory(self._paged_like, jax.ShapeDtypeStruct)
            states = [state_in(memories[i]) or {} for i in self._recurrent]
            self.host_states = HostBlocks(shape.n_host_states, shape.n_states, states, group)
        self._routed = Routed(None, None)  # from the newest forward pass
        self.chooser = None
        if part.last:
            self.chooser = TokenChooser(config.vocab_size, shape.n_rows, self._place, drafts=shape.drafts)
        self.prompts = None
        if part.last and config.reads is None:
            self.prompts = PromptReader(self.stage, shape, self._place, config.embedding.size)
        # A head's place for the states that it reads, which are in another worker's cache.
        self.states: ServedStates | None = None
        self._no_tokens = jax.device_put(np.zeros(shape.n_rows, np.int32), self._place)
        if caches:
            self.renew()

    def _stacks(
        self, config: ModelConfig, parameters: Parameters, part: StagePart
    ) -> dict[str, tuple[Any, list[Any]]]:
        """Room for adapters, of zeros: the stacks of each weight that may have one.

        Like `parameters` they are arrays or, to compile without them, ShapeDtypeStructs.
        """
        n, rank = self._shape.max_adapters, padded_rank(self._shape.adapter_rank)
        if not n:
            return {}

        def stack(shape: tuple[int, ...], spec: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((n, *shape), self._dtype, sharding=part.group.place(spec))

        made: dict[str, tuple[Any, list[Any]]] = {}
        for name, parameter in adaptable(config, part.layers, self._shape.adapter_extras).items():
            shapes, (of_a, of_b) = stack_shapes(parameter, rank), stack_specs(parameter, len(part.group))
            made[name] = stack(shapes.a, of_a), [stack(shape, of_b) for shape in shapes.b]
            self._stack_shapes[name] = shapes
        if not isinstance(jax.tree.leaves(dict(parameters))[0], jax.Array):
            return made
        places = jax.tree.map(lambda one: one.sharding, made)
        zeros = jax.jit(
            lambda: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), made), out_shardings=places
        )
        return zeros()

    @property
    def shape(self) -> EngineShape:
        """The sizes that it was made for."""
        return self._shape

    def placed_adapter(self, arrays: Mapping[str, tuple[Any, Sequence[Any]]]) -> list[jax.Array]:
        """The adapter's arrays on the devices. On any thread.

        `arrays` have the stacks' shapes without their first axis; a weight that is not among them gets zeros.
        """
        own = {
            name: arrays.get(name)
            or (np.zeros(shapes.a, self._dtype), [np.zeros(shape, self._dtype) for shape in shapes.b])
            for name, shapes in self._stack_shapes.items()
        }
        return jax.device_put(jax.tree.leaves(own), self._place)

    def put_adapter(self, placed: Sequence[jax.Array], slot: int) -> None:
        """Start writing an adapter into a slot of the stacks, for iterations that are started later."""
        at = jax.device_put(np.int32(slot), self._place)
        self.stage.adapters = self._put_adapter(self.stage.adapters, list(placed), at)

    def renew(self) -> None:
        """Replace the caches, whatever state they are in, by empty ones."""
        self._caches = []
        self._caches = self._memory(
            lambda shape, dtype: self._empty(shape=shape, dtype=dtype),
            lambda shape, dtype: self._empty(shape=shape, dtype=np.dtype(dtype)),
        )
        for host in self._hosts:
            host.renew()
        if self.chooser is not None:
            self.chooser.renew()

    def _memory(self, make_cache: Callable[..., Any], make_state: Callable[..., Any]) -> list[Any]:
        """Make what each of the stage's layers keeps, of arrays by `make_cache` and `make_state`.

        After it comes what is kept for a head, or a head's newest outputs.
        """
        config, shape, beside = self._config, self._shape, list[Any]()
        if self.stage.keeps_states:
            of_states = states_shape(config.kept_width, shape, len(self.stage.part.group))
            beside = [state_cache(make_cache(of_states, np.dtype(self.stored)))]
        elif config.reads is not None:
            beside = [newest_state(make_state((shape.n_rows, config.hidden_size), self._dtype))]
        return [
            layer_memory(
                self._config.layers[i],
                n_blocks=self._shape.n_blocks,
                block_size=self._shape.block_size,
                stored=self.stored,
                n_states=self._n_states,
                dtype=self._dtype,
                make_cache=make_cache,
                make_state=make_state,
            )
            for i in self.stage.part.layers
        ] + beside

    def release_caches(self) -> None:
        """Free the caches and the rows' tables; `renew` must follow before the next iteration."""
        self._caches = []
        for host in self._hosts:
            host.release()
        if self.chooser is not None:
            self.chooser.give_up()

    @property
    def last_token(self) -> jax.Array:
        """Each row's newest token, [n_rows] int32; zeros on a stage that does not sample."""
        return self._no_tokens if self.chooser is None else self.chooser.last_token

    def prepare(self, message: ControlMessage) -> None:
        """Start the work before a forward pass: copies and, on the last stage, new rows' tables."""
        if self.chooser is not None:
            self.chooser.begin_rows(message)
        if self.host is not None:
            self._copy_host(self.host, message)
        if len(message.copies):
            copies = self._no_copies.copy()
            copies[: len(message.copies)] = message.copies
            paged = self._paged(self._caches)
            copied = self._copy([*paged.values()], jax.device_put(copies, self._place))
            self._put(paged, copied)
        self._copy_states(message.states_before)

    @property
    def kept_states(self) -> jax.Array:
        """The states that a head reads (`states_shape`); donated to the next forward pass."""
        states = cache_in(self._caches[-1])
        assert self.stage.keeps_states and states is not None
        return states.keys

    @property
    def paged_caches(self) -> list[LayerCache]:
        """The paged keys and values of the stage's layers."""
        return [*self._paged(self._caches).values()]

    def block_bytes(self, block: int) -> list[bytes]:
        """A block's bytes, as `host` has them. Waits for the devices."""
        assert self.host is not None
        return self.host.gathered([*self._paged(self._caches).values()], block)

    @property
    def states_of_rows(self) -> list[LayerState]:
        """The states of the stage's recurrent layers."""
        return [state_in(self._caches[i]) or {} for i in self._recurrent]

    def state_bytes(self, state: int) -> list[bytes]:
        """A state's bytes, as `host_states` has them. Waits for the devices."""
        assert self.host_states is not None
        return self.host_states.gathered(self.states_of_rows, state)

    @property
    def _hosts(self) -> list[HostBlocks]:
        return [host for host in (self.host, self.host_states) if host is not None]

    def _copy_host(self, host: HostBlocks, message: ControlMessage) -> None:
        """Start copying blocks to the host's memory, before they are overwritten, and then from it.

        Likewise states, which come after the blocks and whose places come after those of blocks.
        """
        for each in self._hosts:
            each.begin()
        to_host, from_host = message.to_host, message.from_host
        if not (len(to_host) or len(from_host)):
            return
        n_blocks, n_places = self._shape.n_blocks, self._shape.n_host_blocks
        out, into = to_host[to_host[:, 0] < n_blocks], from_host[from_host[:, 0] < n_places]
        paged = self._paged(self._caches)
        if len(out):
            host.copy_out([*paged.values()], out)
        if len(into):
            self._put(paged, host.copy_in([*paged.values()], into))
        if self.host_states is None:
            return
        out, into = to_host[to_host[:, 0] >= n_blocks], from_host[from_host[:, 0] >= n_places]
        if len(out):
            self.host_states.copy_out(self.states_of_rows, out - [n_blocks, n_places])
        if len(into):
            states = self.host_states.copy_in(self.states_of_rows, into - [n_places, n_blocks])
            self._put_states(states)

    @staticmethod
    def _paged(memories: Sequence[LayerMemory]) -> dict[int, LayerCache]:
        """The paged keys and values, by their layer's place in `_caches`."""
        return {i: found for i, one in enumerate(memories) if (found := cache_in(one)) is not None}

    def _put(self, places: Iterable[int], caches: Iterable[LayerCache]) -> None:
        for i, cache in zip(places, caches, strict=True):
            self._caches[i] = with_cache(self._caches[i], cache)

    def _paged_like(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._cache_place)

    def conclude(self, message: ControlMessage) -> None:
        """Start the work after a forward pass: snapshots of recurrent layers' states."""
        self._copy_states(message.states_after)

    def _copy_states(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy states one by one: an iteration has few copies, and a state may be large."""
        if not self._recurrent:
            return
        for copy in copies:
            states = [state_in(self._caches[i]) for i in self._recurrent]
            self._put_states(self._copy_state(states, jax.device_put(copy, self._place)))

    def _put_states(self, states: Iterable[LayerState]) -> None:
        for i, state in zip(self._recurrent, states, strict=True):
            self._caches[i] = with_state(self._caches[i], state)

    def forward(self, flat: FlatBatch, arrived: jax.Array) -> Any:
        """Start this stage's forward pass: the hidden array [T, H], or `stage.Last` from the last stage.

        `arrived` is the last stage's `last_token` on the first stage, else the previous stage's hidden array.
        """
        words = self.stage.host_buffer.fill(flat)
        # The call itself copies the words to the devices, in a third of device_put's time.
        into: Any = arrived if self.states is None else self.states.input(arrived)
        out, self._caches, self._routed = self.stage.forward(
            self.stage.weights_of(flat.layout), self._caches, into, words, layout=flat.layout
        )
        return out

    def routed(self, out: Any, message: ControlMessage) -> list[DeviceRouted]:
        """The experts chosen in the newest forward pass, which returned `out`; [] if no row asks for them."""
        if not message.routed_rows or self._routed == (None, None):
            return []
        again: list[RoutedAgain] = []
        if self._routed.of_last is not None:
            assert self.prompts is not None
            again = self.prompts.route_again(out.hidden, self._caches[self._last_cache], message)
        return [DeviceRouted(message, self._routed, again)]

    def encode(self, flat: FlatBatch, encoded: jax.Array | None) -> jax.Array:
        """Start the encoder on the first stage, and on each stage the writing of cross attention's cache.

        `flat` is the encoder's batch. Returns the encoder's output [T, H], which later stages take as
        `encoded`.
        """
        buffer = jax.device_put(flat.buffer, self._place)
        stage, layout = self.stage, flat.layout
        weights = stage.weights_of(layout)
        if stage.part.first:
            encoded, self._caches[0] = stage.encode(weights, self._caches[0], buffer, layout=layout)
        assert encoded is not None
        self._caches = stage.cross(weights, self._caches, encoded, buffer, layout=layout)
        return encoded

    def read_prompts(
        self, last: Last, message: ControlMessage, routed: Sequence[DeviceRouted]
    ) -> PromptReads | None:
        """Start the last stage's programs for results of prompt tokens; `routed` is returned with them."""
        if self.prompts is None:  # a head reads no prompts
            return None
        return self.prompts.read(last.hidden, self._caches[self._last_cache], message, routed)

    def _read_like(self, n_tokens: int) -> jax.ShapeDtypeStruct:
        """The shape, dtype and sharding of what the last layer takes of a bucket's tokens."""
        return jax.ShapeDtypeStruct((n_tokens, self._config.carried_size), self._dtype, sharding=self._place)

    def hidden_like(self, n_tokens: int) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a bucket's hidden array [T, H], as it arrives from another stage."""
        return jax.ShapeDtypeStruct((n_tokens, self._config.hidden_size), self._dtype, sharding=self._place)

    def programs(self, sizes: BatchSizes) -> Iterator[ToCompile]:
        """All programs that an iteration may need, those that take longest to compile first."""
        stage, place = self.stage, self._place
        weights, stacks = _like(stage.weights), _like(stage.adapters)

        def weights_like(layout: FlatLayout) -> list[Any]:
            return weights + stacks if layout.adapters else weights

        states: dict[Any, Any] = {}
        paged_arrays: dict[Any, Any] = {}

        def paged_like(shape: tuple[int, ...], dtype: Any) -> Any:
            return paged_arrays.setdefault((shape, dtype), self._paged_like(shape, dtype))

        def state_like(shape: tuple[int, ...], dtype: Any) -> Any:
            return states.setdefault((shape, dtype), self._paged_like(shape, dtype))

        caches = self._memory(paged_like, state_like)
        layouts = sorted(sizes.layouts, key=lambda layout: -layout.n_tokens)
        for layout in layouts:
            arrived = self.hidden_like(layout.n_tokens)
            if stage.part.first:
                arrived = jax.ShapeDtypeStruct((self._n_rows,), jnp.int32, sharding=place)
            if self.states is not None:
                arrived = self.states.like(arrived)
            n_words = stage.host_buffer.size(layout)
            buffer = jax.ShapeDtypeStruct((n_words,), jnp.int32, sharding=place)
            arrays = (weights_like(layout), caches, arrived, buffer)
            forward = partial(stage.forward.compile, *arrays, layout=layout)
            yield ToCompile(f"forward pass, {layout.in_words}", forward)
        for layout in reversed(sizes.encoder_layouts):
            buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=place)
            every = weights_like(layout)
            if stage.part.first:
                encode = partial(stage.encode.compile, every, caches[0], buffer, layout=layout)
                yield ToCompile(f"encoder, {layout.in_words}", encode)
            arrays = (every, caches, self.hidden_like(layout.n_tokens), buffer)
            cross = partial(stage.cross.compile, *arrays, layout=layout)
            yield ToCompile(f"cross attention's keys and values, {layout.in_words}", cross)
        if self.prompts is not None and self._config.encoder is None:
            cache = caches[self._last_cache]
            yield from self.prompts.programs(sizes, weights_like, cache, self._read_like)
        if self.chooser is not None:
            yield from self.chooser.programs(sorted({layout.n_rows for layout in layouts}))
        if stacks:
            new = [jax.ShapeDtypeStruct(one.shape[1:], one.dtype, sharding=place) for one in stacks]
            slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
            yield ToCompile("an adapter", partial(self._put_adapter.compile, stacks, new, slot))
        copies = jax.ShapeDtypeStruct(self._no_copies.shape, jnp.int32, sharding=place)
        paged = [*self._paged(caches).values()]
        yield ToCompile("copies of blocks", partial(self._copy.compile, paged, copies))
        if self.host is not None:
            yield from self.host.programs(paged, "blocks")
        of_states = [state_in(caches[i]) or {} for i in self._recurrent]
        if self.host_states is not None:
            yield from self.host_states.programs(of_states, "states")
        if self._recurrent and (self._shape.n_snapshots or self._shape.n_draft_states):
            pair = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=place)
            yield ToCompile("copies of states", partial(self._copy_state.compile, of_states, pair))
        for shape, dtype in paged_arrays:
            yield ToCompile("empty caches", partial(self._empty.compile, shape=shape, dtype=dtype))
        for shape, dtype in states:
            yield ToCompile("empty states", partial(self._empty.compile, shape=shape, dtype=np.dtype(dtype)))


class LocalIteration:
    """An issued iteration (PendingTokens); `go_on` starts the parts that had to wait."""

    def __init__(
        self, message: ControlMessage, flat: FlatBatch, words: MakeWords, go_on: Callable[[], None]
    ) -> None:
        self.message, self.flat, self.words = message, flat, words
        self.encoder_flat: FlatBatch | None = None  # the encoder's batch, if a row runs it
        self.out: Any = None  # the forward pass's output
        self.routed: list[DeviceRouted] = []  # from each stage that has experts, if rows ask for them
        self.tokens: DeviceTokens | None = None
        self._go_on = go_on

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        if self.tokens is None:
            self._go_on()
        return self.tokens is not None and self.tokens.is_ready()

    def wait(self, seconds: float) -> None:
        """Wait for the device, at most `seconds`."""
        if self.tokens is None:
            self._go_on()
        assert self.tokens is not None, "its requests' tokens before it have come back"
        self.tokens.wait(seconds)

    def fetch(self) -> Sampled:
        """Wait for the device and return what was sampled. Raises what failed there."""
        if self.tokens is None:
            self._go_on()
        assert self.tokens is not None, "its requests' tokens before it have come back"
        return self.tokens.fetch()


class LocalWorkers:
    """The workers of all stages in this process, first to last, as the engine master sees them.

    A batch is laid out once for all stages. A device runs its programs in order, so an iteration's results
    are there before the next iteration reads them. An iteration therefore waits here until the tokens of the
    previous one can be chosen.
    """

    def __init__(self, workers: Sequence[Worker], sizes: BatchSizes) -> None:
        self.workers = tuple(workers)
        self.sizes = sizes
        chooser = self.workers[-1].chooser
        assert chooser is not None, "the last stage samples"
        self._chooser = chooser
        self._to_do: deque[LocalIteration] = deque()

    def use(self, sizes: BatchSizes) -> None:
        """Lay out later iterations in these sizes, whose programs are compiled. On any thread."""
        self.sizes = sizes

    def issue(self, message: ControlMessage, words: MakeWords) -> LocalIteration:
        """engine_master.Workers."""
        iteration = LocalIteration(message, self.sizes.lay_out(message), words, self._go_on)
        iteration.encoder_flat = lay_out_encoder(message, self.sizes)
        self._to_do.append(iteration)
        self._go_on()
        return iteration

    def _go_on(self) -> None:
        """Start everything that can be started now, in order, without waiting."""
        try:
            while self._to_do:
                iteration = self._to_do[0]
                message, flat = iteration.message, iteration.flat
                if iteration.out is None:
                    for worker in self.workers:
                        worker.prepare(message)
                    if iteration.encoder_flat is not None:
                        self._encode(iteration.encoder_flat)
                    iteration.out = self._forward(iteration)
                words = iteration.words() if flat.programs.allow else None
                if flat.programs.allow and words is None:
                    return
                last, chooser = iteration.out, self._chooser
                reads = self.workers[-1].read_prompts(last, message, iteration.routed)
                words = None if words is None else row_words(words, message, flat)
                iteration.tokens = chooser.choose(last.logits, last.rows, flat.programs, words, reads)
                iteration.out = None
                self._to_do.popleft()
        except Exception:
            self._to_do.clear()
            raise

    def _encode(self, flat: FlatBatch) -> None:
        """Run the encoder on the first stage, and pass its output through all stages."""
        encoded = None
        for worker in self.workers:
            arrived = None if encoded is None else worker.stage.part.group.receive(encoded)
            encoded = worker.encode(flat, arrived)

    def _forward(self, iteration: LocalIteration) -> Any:
        """Send the newest tokens from the last stage to the first, and hidden states from stage to stage."""
        arrived = self.workers[-1].last_token
        for worker in self.workers:
            if len(self.workers) > 1:
                arrived = worker.stage.part.group.receive(arrived)
            arrived = worker.forward(iteration.flat, arrived)
            iteration.routed += worker.routed(arrived, iteration.message)
            worker.conclude(iteration.message)
        return arrived


def stage_workers(
    config: ModelConfig,
    parameters: Sequence[Parameters],
    shape: EngineShape,
    parts: Sequence[StagePart],
    serving: ServingConfig,
    *,
    attention: Attention | None,
    caches: bool,
) -> list[Worker]:
    """Make the worker of each stage in `parts`, which has its `parameters`; otherwise as in Worker."""
    return [
        Worker(
            config,
            of_stage,
            shape,
            part,
            command_buffer_collectives=serving.command_buffer_collectives,
            attention=attention,
            caches=caches,
        )
        for part, of_stage in zip(parts, parameters, strict=True)
    ]


def all_programs(workers: Sequence[Worker], sizes: BatchSizes) -> list[ToCompile]:
    """All programs that an iteration of these stages may need."""
    return [program for stage in programs_by_stage(workers, sizes) for program in stage]


def programs_by_stage(workers: Sequence[Worker], sizes: BatchSizes) -> list[list[ToCompile]]:
    """Each stage's programs; their names have the stage's number if there are several stages."""
    return [
        [
            replace(program, name=f"stage {i + 1}: {program.name}") if len(workers) > 1 else program
            for program in worker.programs(sizes)
        ]
        for i, worker in enumerate(workers)
    ]


def _like(arrays: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding) for one in arrays]


def _with_adapter(stacks: list[jax.Array], new: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """Write an adapter's arrays into a slot of the stacks."""
    return [stack.at[slot].set(own) for stack, own in zip(stacks, new, strict=True)]


def _zeros(place: Any) -> Program:
    """A program that makes zeros of a shape and dtype."""

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.zeros(shape, dtype)

    made = jax.jit(zeros, static_argnames=("shape", "dtype"), out_shardings=place)
    return Program(made, key=lambda *, shape, dtype: (shape, dtype))
