"""A worker process's devices as its controller sees them (ORCA 4.1): work goes in, events come out.

One thread issues the work, because a device may block its caller; another one waits for the results.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from orca_jax.config import Attention, OnCompile
from orca_jax.control.adapter_call import AdapterPiece
from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.start_order import StartOrder
from orca_jax.engine_memory import EngineMemory
from orca_jax.errors import BadFrame, EngineError
from orca_jax.execution.capacity import check_slots, stage_room
from orca_jax.execution.compile_counter import CompileCounter
from orca_jax.execution.programs import compile_all
from orca_jax.execution.routed import DeviceRouted, joined
from orca_jax.execution.sampling import DeviceTokens, row_words
from orca_jax.execution.worker import Worker
from orca_jax.families.model_config import ModelConfig
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.flat_batch import BatchSizes, batch_sizes
from orca_jax.iteration.message import ControlMessage
from orca_jax.iteration.rows.encoder import lay_out_encoder
from orca_jax.iteration.shape import EngineShape
from orca_jax.model.transformer import Parameters
from orca_jax.model.weight import model_dtype
from orca_jax.sharding.link import ProcessLink
from orca_jax.sharding.partition import StagePart
from orca_jax.workers.controller import Controller
from orca_jax.workers.mask_inbox import MaskInbox

Event = Callable[[Controller], None]  # is called on the controller's thread


class StageMemory(EngineMemory, Protocol):
    """The memory of one stage, which loads checkpoints and adapters from directories."""

    def adapt(self, directory: Path | None) -> None:
        """Replace all LoRA adapters of the stage's weights by those in `directory`; None removes them.

        Raises EngineError if it failed halfway, another OrcaError if nothing has changed.
        """
        ...


# Puts the pieces of an adapter on a worker's devices, on any thread. Raises BadFrame.
PlaceAdapter = Callable[[Worker, Iterator[AdapterPiece]], list[jax.Array]]


class _Adaptable(NamedTuple):
    """An epoch's worker, and by version the adapters on its devices that no slot has yet, oldest first."""

    epoch: int
    worker: Worker
    held: dict[int, list[jax.Array]]


_MAX_JOBS = 4096
_ENCODED = 1 << 32  # added to a stage's number in the link's key of the encoder's output
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """A stage with its weights on its devices; `n_devices` counts the devices of all stages."""

    config: ModelConfig
    parameters: Parameters
    part: StagePart
    stage: int
    n_devices: int
    attention: Attention | None = None
    on_compile: OnCompile = "warn"
    command_buffer_collectives: bool = False


class JaxStageDevice:
    """The workers.controller.StageDevice of real devices.

    `link` is None if there is no other stage. `post` takes events without waiting. `address_before` returns
    the address at which the previous stage offers hidden states. `memory_of` makes a worker's memory; without
    it every order must be for the initial weights, and awake. `place_adapter` is needed in an engine with
    adapters alone. The process ends once `over` says why.
    """

    def __init__(
        self,
        model: StageModel,
        link: ProcessLink | None,
        *,
        post: Callable[[Event], object],
        address_before: Callable[[], str],
        memory_of: Callable[[Worker], StageMemory] | None = None,
        place_adapter: PlaceAdapter | None = None,
    ) -> None:
        self.over: str | None = None  # why the process must start again
        self._model = model
        self._link = link
        self._post = post
        self._address_before = address_before
        self._memory_of = memory_of
        self._place_adapter = place_adapter
        self._order: StartOrder | None = None  # the newest
        self._shape: EngineShape | None = None  # the sizes that the programs are made for, or will be
        self._words = MaskInbox()
        self._jobs = FrameQueue[Callable[[], None]](_MAX_JOBS)
        self._thread = threading.Thread(target=self._work, name="stage device", daemon=True)
        self._compiles = CompileCounter()
        self._lock = threading.Lock()  # for the next
        self._adaptable: _Adaptable | None = None  # while an epoch runs
        # Only the issuing thread uses these:
        self._worker: Worker | None = None
        self._worker_shape: EngineShape | None = None
        self._memory: StageMemory | None = None
        self._weights_version = self._adapters_version = 0
        self._sizes: BatchSizes
        self._epoch = 0
        self._connected = False
        self._results = FrameQueue[Callable[[], None]](_MAX_JOBS)  # this epoch's
        self._thread.start()

    def start(self, epoch: int, order: StartOrder) -> bool:
        """StageDevice."""
        if self._shape is not None and self._link is not None and not self._link.outlives_a_loss:
            self.over = "a worker was lost, and with this link all workers start again then"
        before, self._order = self._order, order
        is_quick = before is not None and _same_state(before, order)
        self._shape = order.shape
        self._words.begin(epoch, order.worker_seconds)
        self._put(partial(self._start, epoch, order))
        return not is_quick

    def allow(self, epoch: int, iteration: int, words: npt.NDArray[np.int32]) -> None:
        """StageDevice."""
        self._words.put(epoch, iteration, words)

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        """StageDevice."""
        self._put(partial(self._run, epoch, iteration, message))

    def take_adapter(self, epoch: int, version: int, pieces: Iterator[AdapterPiece]) -> bool:
        """Put an adapter on the devices, for an iteration of this epoch that writes it into a slot.

        On any thread. Returns False if the epoch does not run here. Raises BadFrame.
        """
        with self._lock:
            adaptable = self._adaptable
        if adaptable is None or adaptable.epoch != epoch:
            return False
        if self._place_adapter is None:
            raise BadFrame("an adapter came, and this worker takes none")
        placed = self._place_adapter(adaptable.worker, pieces)
        with self._lock:
            if self._adaptable is not adaptable:
                return False
            adaptable.held[version] = placed
            # Each slot has at most one that is still to be written; of others no iteration will ask.
            while len(adaptable.held) > 2 * adaptable.worker.shape.max_adapters:
                del adaptable.held[next(iter(adaptable.held))]
        return True

    def close(self) -> None:
        """End the threads; a thread that a device blocks ends with the process."""
        self._jobs.end()
        self._thread.join(_CLOSE_SECONDS)
        self._compiles.close()

    def _put(self, job: Callable[[], None]) -> None:
        has_room = self._jobs.put(job)
        assert has_room, "far more iterations came than an engine master may have in flight"

    # On the issuing thread.

    def _work(self) -> None:
        for job in self._jobs:
            job()
        self._results.end()

    def _start(self, epoch: int, order: StartOrder) -> None:
        shape = order.shape
        self._epoch, self._connected = epoch, False
        with self._lock:
            self._adaptable = None
        self._results.end()  # results still to come are an earlier epoch's
        self._results = FrameQueue(_MAX_JOBS)
        threading.Thread(
            target=_wait_for, args=(self._results,), name=f"results of epoch {epoch}", daemon=True
        ).start()
        try:
            if self._worker is None or shape != self._worker_shape:
                self._keep_weights()  # frees the old caches before new ones are made
                self._worker = self._make_worker(shape)
                self._worker_shape = shape
                self._model = replace(self._model, parameters={})  # they are the worker's now
                self._memory = None if self._memory_of is None else self._memory_of(self._worker)
            self._arrange(self._worker, order)
        except Exception as error:  # the engine master must hear of every failure
            self._fail(epoch, error)
            return
        with self._lock:
            self._adaptable = _Adaptable(epoch, self._worker, {})
        self._post(lambda controller: controller.started(epoch))

    def _keep_weights(self) -> None:
        """Drop the worker but keep its weights."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.restore()
            self._adapt(memory, 0, "")  # the next memory expects weights without adapters
        self._model = replace(self._model, parameters=worker.stage.parameters)

    def _arrange(self, worker: Worker, order: StartOrder) -> None:
        """Bring weights and caches to the state that an epoch's order asks for."""
        memory = self._memory
        if memory is None:
            assert order.weights_version == order.adapters_version == order.sleep_level == 0
            worker.renew()
            return
        if order.weights_version != self._weights_version:
            if not order.weights_version:
                self.over = "it must serve its initial weights again"
                raise EngineError(self.over)
            install = memory.prepare(Path(order.weights_directory), cast=False, lora_scale=1.0)
            try:
                install()
            except EngineError as error:
                self.over = str(error)
                raise
            self._weights_version, self._adapters_version = order.weights_version, 0
        self._adapt(memory, order.adapters_version, order.adapters_directory)
        if order.sleep_level:
            memory.release(order.sleep_level)
        else:
            memory.restore()
            worker.renew()

    def _adapt(self, memory: StageMemory, version: int, directory: str) -> None:
        if version == self._adapters_version:
            return
        try:
            memory.adapt(Path(directory) if version else None)
        except EngineError as error:
            self.over = str(error)
            raise
        self._adapters_version = version

    def _make_worker(self, shape: EngineShape) -> Worker:
        """A worker for these sizes, with all its programs compiled."""
        model = self._model
        self._compiles.watch(None, model.on_compile)
        dtype = model_dtype(model.parameters)
        assert shape.vocab_size == model.config.vocab_size, "the handshake compares models"
        room = stage_room(
            model.config,
            dtype,
            model.part,
            n_devices=model.n_devices,
            block_size=shape.block_size,
            attention=model.attention,
        )
        check_slots(model.config, room, shape, n_devices=model.n_devices)
        worker = Worker(
            model.config,
            model.parameters,
            shape,
            model.part,
            command_buffer_collectives=model.command_buffer_collectives,
            attention=model.attention,
            caches=False,  # XLA's autotuning needs their memory while it compiles
        )
        self._sizes = batch_sizes(shape, worker.attention.kind)
        compile_all([*worker.programs(self._sizes)])
        self._compiles.watch(self._thread, model.on_compile)
        return worker

    def _run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        if epoch != self._epoch or self._worker is None:
            return  # its epoch is over
        worker, part = self._worker, self._model.part
        try:
            self._put_adapters(worker, message)
            flat = self._sizes.lay_out(message)
            arrived = worker.last_token
            if not part.first:
                assert self._link is not None
                if not self._connected:  # the address came before the epoch's first message
                    self._link.connect(self._address_before())
                    self._connected = True
            sent = self._encode(worker, epoch, iteration, message)
            if not part.first:
                assert self._link is not None
                key = (epoch, iteration, self._model.stage - 1)
                arrived = self._link.pull(key, worker.hidden_like(flat.layout.n_tokens))
            worker.prepare(message)
            out = worker.forward(flat, arrived)
            routed = worker.routed(out, message)
            worker.conclude(message)
            if part.last:
                assert worker.chooser is not None
                words = None
                if flat.programs.allow:
                    words = row_words(self._allowed(epoch, iteration, message), message, flat)
                reads = worker.read_prompts(out, message, routed)
                out = worker.chooser.choose(out.logits, out.rows, flat.programs, words, reads)
            else:
                assert self._link is not None
                sent += self._link.offer((epoch, iteration, self._model.stage), out)
        except Exception as error:
            self._fail(epoch, error)
            return
        self._results.put(partial(self._finish, epoch, iteration, out, sent, routed))

    def _put_adapters(self, worker: Worker, message: ControlMessage) -> None:
        """Start writing adapters that came before into their slots. Raises BadFrame."""
        for version, slot in message.put_adapters.tolist():
            with self._lock:
                placed = None if self._adaptable is None else self._adaptable.held.pop(version, None)
            if placed is None:
                raise BadFrame(f"adapter {version} is wanted in slot {slot}, and it did not come")
            worker.put_adapter(placed, slot)

    def _encode(self, worker: Worker, epoch: int, iteration: int, message: ControlMessage) -> int:
        """Start the iteration's encoder batch, if it has one; returns the bytes put on the link."""
        flat, part, stage = lay_out_encoder(message, self._sizes), self._model.part, self._model.stage
        if flat is None:
            return 0
        encoded = None
        if not part.first:
            assert self._link is not None
            key = (epoch, iteration, _ENCODED + stage - 1)
            encoded = self._link.pull(key, worker.hidden_like(flat.layout.n_tokens))
        encoded = worker.encode(flat, encoded)
        if part.last:
            return 0
        assert self._link is not None
        return self._link.offer((epoch, iteration, _ENCODED + stage), encoded)

    def _allowed(self, epoch: int, iteration: int, message: ControlMessage) -> npt.NDArray[np.int32]:
        """Wait for the token masks of constrained rows."""
        words = self._words.take(epoch, iteration)
        shape = (np.count_nonzero(message.constrained), n_words(self._model.config.vocab_size))
        if words.size != math.prod(shape):
            raise BadFrame(f"{words.size} words came for iteration {iteration}, which needs {shape}")
        return words.reshape(shape)

    def _fail(self, epoch: int, error: Exception) -> None:
        self._epoch = 0  # the epoch's later iterations would read caches that are lost
        why = f"{type(error).__name__}: {error}"
        self._post(lambda controller: controller.failed(epoch, why))

    # On the thread that waits for an epoch's results.

    def _finish(
        self,
        epoch: int,
        iteration: int,
        out: jax.Array | DeviceTokens,
        sent: int,
        routed: Sequence[DeviceRouted],
    ) -> None:
        try:
            sampled, ids = None, None
            if isinstance(out, DeviceTokens):
                sampled = out.fetch()
            else:
                out.block_until_ready()
                ids = joined([part.fetch() for part in routed])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._post(lambda controller: controller.failed(epoch, why))
            return
        self._post(lambda controller: controller.done(epoch, iteration, sampled, link_bytes=sent, routed=ids))


def _same_state(one: StartOrder, other: StartOrder) -> bool:
    """Whether only new caches are needed to go from one order's state to the other's."""
    return (one.shape, one.weights_version, one.adapters_version, one.sleep_level) == (
        other.shape,
        other.weights_version,
        other.adapters_version,
        other.sleep_level,
    )


def _wait_for(results: FrameQueue[Callable[[], None]]) -> None:
    for finish in results:
        finish()
