# pyright: standard
"""Composition: builds an engine of weights in memory, whose workers all run in this process."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from orca_jax.config import Attention, ServingConfig, Sizes
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.capacity import check_slots, stage_room
from orca_jax.execution.programs import OnProgram, ToCompile, compile_all
from orca_jax.execution.worker import LocalWorkers, Worker, all_programs
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import DECODE_CONTEXTS, BatchSizes
from orca_jax.iteration.shape import EngineShape
from orca_jax.model.transformer import Parameters
from orca_jax.planning.draft_model import with_draft
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_memory import DraftMemory, StageRoom
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.sharding.device_group import device_name
from orca_jax.sharding.partition import StagePart

LOGGER = logging.getLogger("orca_jax.compile")

_STOP_SECONDS = 30.0  # a program that is being compiled cannot be stopped


def first_buckets(buckets: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """The buckets to start with: one for `max_rows` decodes, and the largest. `buckets` ascend."""
    decode = next(size for size in buckets if size >= min(max_rows, buckets[-1]))
    return tuple(sorted({decode, buckets[-1]}))


def later_buckets(buckets: Sequence[int], max_rows: int) -> list[int]:
    """The buckets that `first_buckets` leaves out, the most useful first.

    Powers of two above the decodes, which halve the padding of prompts, come before smaller decodes, and
    these before the sizes in between.
    """
    first = first_buckets(buckets, max_rows)
    others = [size for size in buckets if size not in first]
    halves = [size for size in others if size > first[0] and size.bit_count() == 1]
    return sorted(others, key=lambda size: (size not in halves, size))


class LaterPrograms:
    """The programs of buckets that `workers` do not use yet, compiled on a thread from `start` to `close`.

    Every batch fits in the largest bucket, so an engine can serve with that one; the others save it padding.

    The workers use each bucket as soon as all its programs are compiled. If one cannot be compiled, a warning
    is logged and the engine keeps the buckets that it has.
    """

    def __init__(self, workers: LocalWorkers, shape: EngineShape, buckets: Sequence[int]) -> None:
        self._workers = workers
        self._shape = shape
        self._ready = workers.sizes.buckets
        self._contexts = workers.sizes.decode_contexts
        self._programs = [
            (size, all_programs(workers.workers, BatchSizes(shape, (size, buckets[-1]), self._contexts)))
            for size in later_buckets(buckets, shape.max_rows)
        ]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        """Start compiling. The thread calls `on_buckets` with all buckets in use after each new one."""
        self._thread = threading.Thread(
            target=self._run, args=(on_buckets,), name="compile later", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop after the program that is being compiled."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        while self._programs:
            size, programs = self._programs.pop(0)
            try:
                if not self._compile(programs):
                    break
            except Exception:
                message = "could not compile for %d tokens; batches use the programs of larger buckets"
                LOGGER.warning(message, size, exc_info=True)
                break
            self._ready = tuple(sorted({*self._ready, size}))
            self._workers.use(BatchSizes(self._shape, self._ready, self._contexts))
            on_buckets(self._ready)
        self._programs.clear()

    def _compile(self, programs: Sequence[ToCompile]) -> bool:
        """Compile programs that no other bucket has needed; False if the engine is closing."""
        for program in programs:
            if self._stop.is_set():
                return False
            program.compile()
        return True


def chosen_sizes(
    config: ModelConfig,
    dtype: jnp.dtype,
    parts: Sequence[StagePart],
    sizes: Sizes,
    *,
    n_devices: int,
    attention: Attention | None = None,
    draft: DraftMemory | None = None,
) -> tuple[ServingConfig, Sequence[StageRoom]]:
    """The sizes of an engine of these stages: those in `sizes`, and defaults that fit for the rest.

    `draft` is the memory of a draft model on the first stage's first device; the other arguments are as in
    `stage_room`. Also returns the stages' memory. Raises ConfigError if `sizes` do not fit.
    """
    rooms = [
        stage_room(
            config,
            dtype,
            part,
            n_devices=n_devices,
            block_size=sizes.block_size,
            attention=attention,
            memory_fraction=sizes.memory_fraction,
        )
        for part in parts
    ]
    if draft is not None:
        rooms = with_draft(rooms, draft)
    device = parts[0].group.devices[0]
    on_cpu = device.platform == "cpu"
    serving = serving_config(config, sizes, rooms, coarse_buckets=not on_cpu, device=device_name(device))
    shape = engine_shape(config, serving, n_workers=len(parts))
    for room in rooms:
        check_slots(config, room, shape, n_devices=n_devices)
    return serving, rooms


class LocalEngine(NamedTuple):
    """An engine, the K/V manager of its caches, a description of its attention, its workers, and the programs
    that can be compiled while it serves.
    """

    engine: EngineMaster
    kv: KVManager
    attention: str
    workers: LocalWorkers
    later: LaterPrograms | None = None


def build_engine(
    model: ModelConfig,
    parameters: Sequence[Parameters],
    serving: ServingConfig,
    parts: Sequence[StagePart],
    *,
    buckets: Sequence[int] | None = None,
    attention: Attention | None = None,
    workers: Sequence[Worker] | None = None,
    compile_ahead: bool = False,
    ready_early: bool = False,
    on_program: OnProgram | None = None,
) -> LocalEngine:
    """Build an engine with a worker for each of `parts` and its `parameters`. Raises ConfigError.

    `buckets`, ascending, replace the default buckets of `serving`. `attention` is passed to the workers.
    `workers` of the same model, parts and sizes may be reused once no engine uses them: they keep their
    compiled programs and their attention. With `compile_ahead` every program is compiled now and reported to
    `on_program`; otherwise each is compiled on first use. With `ready_early` as well, the programs of a few
    buckets are compiled now, and those of the others once the result's `later` is started.
    """
    n_workers = len(parts)
    shape = engine_shape(model, serving, n_workers=n_workers)
    kv = kv_manager(shape, serving.scheduling)
    if workers is None:
        workers = [
            Worker(
                model,
                own,
                shape,
                part,
                command_buffer_collectives=serving.command_buffer_collectives,
                attention=attention,
                caches=not compile_ahead,  # leaves their memory to XLA's autotuning during compilation
            )
            for part, own in zip(parts, parameters, strict=True)
        ]
    buckets = shape.buckets if buckets is None else tuple(buckets)
    ready_early &= compile_ahead
    first = first_buckets(buckets, shape.max_rows) if ready_early else tuple(buckets)
    sizes = BatchSizes(shape, first, DECODE_CONTEXTS[workers[0].attention.kind])
    if compile_ahead:
        compile_all(all_programs(workers, sizes), on_program)
        for worker in workers:
            worker.renew()
    local = LocalWorkers(workers, sizes)
    engine = EngineMaster(local, kv, vocab_size=model.vocab_size, n_workers=n_workers)
    later = LaterPrograms(local, shape, buckets) if ready_early else None
    return LocalEngine(engine, kv, workers[0].description, local, later)
