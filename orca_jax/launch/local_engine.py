# pyright: standard
"""Composition: builds an engine of weights in memory, whose workers all run in this process."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import jax.numpy as jnp

from orca_jax.config import Attention, ServingConfig, Sizes
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.capacity import check_slots, stage_room
from orca_jax.execution.programs import OnProgram, ToCompile, compile_all
from orca_jax.execution.worker import LocalWorkers, Worker, all_programs, stage_workers
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import DECODE_CONTEXTS, BatchSizes
from orca_jax.iteration.shape import EngineShape
from orca_jax.launch.compile_process import CompileProcess, CompilingEnded, DescribedEngine
from orca_jax.model.transformer import Parameters
from orca_jax.planning.draft_model import with_draft
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_memory import DraftMemory, StageRoom
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.sharding.device_group import device_name
from orca_jax.sharding.partition import StagePart

LOGGER = logging.getLogger("orca_jax.compile")

_STOP_SECONDS = 30.0  # a program that is being compiled cannot be stopped
_PAUSES = 3.0  # as long as it took to read a program from the disk


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
    """The programs of buckets that `workers` do not use yet, compiled from `start` to `close`.

    Every batch fits in the largest bucket, so an engine can serve with that one; the others save it padding.

    A process of low priority compiles the programs of a `described` engine into the cache on disk, one at a
    time, and a thread here reads them, with pauses: compiling here would hold the GIL, and XLA's threads
    would take the processors from iterations. The thread compiles them itself if the engine is not described,
    if that process fails, or if an earlier start has put all of them on disk.

    The workers use each bucket as soon as all its programs are compiled. If one cannot be compiled, a warning
    is logged and the engine keeps the buckets that it has.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        shape: EngineShape,
        buckets: Sequence[int],
        described: DescribedEngine | None = None,
    ) -> None:
        self._workers = workers
        self._shape = shape
        self._described = described
        self._largest = buckets[-1]
        self._ready = workers.sizes.buckets
        self._contexts = workers.sizes.decode_contexts
        self._programs = [
            (size, all_programs(workers.workers, BatchSizes(shape, (size, buckets[-1]), self._contexts)))
            for size in later_buckets(buckets, shape.max_rows)
        ]
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._process: CompileProcess | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        """Start compiling. A thread calls `on_buckets` with all buckets in use after each new one."""
        self._thread = threading.Thread(
            target=self._run, args=(on_buckets,), name="compile later", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop: at once in the other process, and here after the program that is being compiled."""
        with self._lock:
            self._stop.set()
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        process = self._begin()
        try:
            while self._programs:
                size, programs = self._programs.pop(0)
                try:
                    if not self._compile(size, programs):
                        break
                except Exception:
                    message = "could not compile for %d tokens; batches use the programs of larger buckets"
                    LOGGER.warning(message, size, exc_info=True)
                    break
                self._ready = tuple(sorted({*self._ready, size}))
                self._workers.use(BatchSizes(self._shape, self._ready, self._contexts))
                on_buckets(self._ready)
            else:
                self._mark()
        finally:
            self._programs.clear()
            with self._lock:
                self._process = None
            if process is not None:
                process.close()

    def _begin(self) -> CompileProcess | None:
        """Start the other process, if it can compile for this engine and has something to compile."""
        if self._described is None or not self._programs or self._described.mark().exists():
            return None
        try:
            process = CompileProcess(self._described, [size for size, _ in self._programs], self._largest)
        except OSError as error:
            LOGGER.warning("no process could be started that compiles; this one does: %s", error)
            return None
        with self._lock:
            self._process = process
            if self._stop.is_set():
                process.kill()
        return process

    def _mark(self) -> None:
        """Let later starts read the programs without another process."""
        if self._described is not None:
            with suppress(OSError):
                self._described.mark().touch()

    def _compile(self, size: int, programs: Sequence[ToCompile]) -> bool:
        """Compile programs that no other bucket has needed; False if the engine is closing."""
        if self._process is not None:
            try:
                self._process.wait_for(size)
            except CompilingEnded as error:
                with self._lock:
                    self._process = None
                if not self._stop.is_set():
                    LOGGER.warning("%s; this process compiles the other programs", error)
        for program in programs:
            if self._stop.is_set():
                return False
            began = time.monotonic()
            program.compile()
            if self._process is not None:
                self._stop.wait(_PAUSES * (time.monotonic() - began))
        return not self._stop.is_set()


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

    `draft` is the memory of a draft model, on the devices of `draft_split`; the other arguments are as in
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
    described: DescribedEngine | None = None,
    on_program: OnProgram | None = None,
) -> LocalEngine:
    """Build an engine with a worker for each of `parts` and its `parameters`. Raises ConfigError.

    `buckets`, ascending, replace the default buckets of `serving`. `attention` is passed to the workers.
    `workers` of the same model, parts and sizes may be reused once no engine uses them: they keep their
    compiled programs and their attention. With `compile_ahead` every program is compiled now and reported to
    `on_program`; otherwise each is compiled on first use. With `ready_early` as well, the programs of a few
    buckets are compiled now, and those of the others once the result's `later` is started: by a process of
    its own if the engine is `described`.
    """
    n_workers = len(parts)
    shape = engine_shape(model, serving, n_workers=n_workers)
    kv = kv_manager(shape, serving.scheduling)
    if workers is None:
        # Caches that come later leave their memory to XLA's autotuning during compilation.
        workers = stage_workers(
            model, parameters, shape, parts, serving, attention=attention, caches=not compile_ahead
        )
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
    later = LaterPrograms(local, shape, buckets, described) if ready_early else None
    return LocalEngine(engine, kv, workers[0].description, local, later)
