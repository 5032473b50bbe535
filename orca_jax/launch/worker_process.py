# pyright: standard
"""A worker's process: one stage, with a control port (ORCA 4.1, Figure 7).

    python -m orca_jax.launch.worker_process WORKER_OPTIONS

runs a worker; its argument comes from WorkerOptions.as_json, and its secret, if not in that, from the
variable ORCA_WORKER_SECRET. `orca worker` is the same with flags. The process exits with status 0 on SIGTERM
or Ctrl-C, 2 after a mistake in its options, and 1 when its device hangs.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.config import ServingConfig
from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.handshake import PREVIOUS, WorkerAbout
from orca_jax.control.line import ControlLine, LineLimits
from orca_jax.control.port import ControlPort
from orca_jax.engine.remote_pipeline import stage_terms
from orca_jax.errors import ConfigError, OrcaError
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.execution.capacity import stage_room
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.execution.stage_device import Event, JaxStageDevice, StageModel
from orca_jax.host_memory import keep_large_buffers
from orca_jax.launch.loaded_engine import load_stages, shapes_of_module
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.launch.placed_adapters import from_pieces
from orca_jax.sharding.device_group import DeviceGroup, default_dtype, device_name
from orca_jax.sharding.link import CollectiveLink, ProcessLink, TransferLink, join_job
from orca_jax.sharding.partition import one_stage
from orca_jax.user_model.find import find_any_model
from orca_jax.workers.controller import Controller
from orca_jax.workers.worker_options import SECRET_VARIABLE, WorkerOptions

OnLoad = Callable[[int, int], None]

_LOOK_SECONDS = 0.1
_INBOX_ITEMS = 8192  # frames and the device's news
_LAST_REPORT_SECONDS = 0.2
_ORPHAN_SECONDS = 5.0  # from the end of the parent to that of this process, whatever it does
_HUNG_STATUS = 1
_ORPHANED_STATUS = 3  # the parent ended, and this process could not be stopped


class WorkerProcess:
    """One stage of a pipeline, from its options to its end.

    It binds its port before it loads the weights, and accepts callers after that. `on_load(done, total)`
    receives the progress in bytes. Raises ConfigError or a CheckpointError.
    """

    def __init__(self, options: WorkerOptions, *, on_load: OnLoad) -> None:
        stage, n_stages, engine = options.stage, options.n_stages, options.engine
        # The engine master has the tokenizer and the defaults of sampling.
        found = find_any_model(replace(engine, generation_config="none", tokenizer=None))
        if options.coordinator is not None:
            join_job(options.coordinator, stage=stage, n_stages=n_stages)
        devices = jax.local_devices()
        if devices[0].platform == "cpu":
            keep_large_buffers()
        dtype = jnp.dtype(engine.dtype or default_dtype(devices[0]))
        part = one_stage(found.config, devices, engine, stage)
        self._options = options
        self._stopping = threading.Event()
        self._inbox = FrameQueue[bytes | Event](
            _INBOX_ITEMS, weigh=lambda item: len(item) if isinstance(item, bytes) else 0
        )
        self._line: ControlLine | None = None  # to the next stage
        self._next_address = ""
        terms = stage_terms(found.name, found.config, n_stages, dtype.name)
        self._next_terms = None if part.last else terms[stage + 1]
        self._port = ControlPort(
            options.listen,
            terms=terms[stage],
            secret=engine.control_secret,
            deliver=self._inbox.put,
            take_adapter=lambda *adapter: self._device.take_adapter(*adapter),
        )
        self.address = self._port.address
        try:
            self._link = _link(options, part.group)
            config, (parameters,) = load_stages(found, [part], engine, dtype, on_load)
            stored, module = found.config, shapes_of_module(found, engine, dtype)
            n_devices = engine.n_devices
            chosen = choose_attention(
                devices[0],
                config,
                n_heads=config.n_heads // len(part.group),
                block_size=ServingConfig().block_size,
                dtype=np.dtype(dtype),
                forced=engine.attention,
            )
            room = stage_room(
                config,
                dtype,
                part,
                n_devices=n_devices,
                attention=engine.attention,
                memory_fraction=engine.memory_fraction,
            )
            self.about = WorkerAbout(
                dtype=dtype.name,
                room=room.free,
                modest=room.modest,
                n_devices=room.n_devices,
                device=device_name(devices[0]),
                attention=choose_products(devices[0], dtype).describe_with(chosen.description),
                path=chosen.kind,
            )
        except BaseException:
            self._port.close()
            raise
        self._device = JaxStageDevice(
            StageModel(
                config=config,
                parameters=parameters,
                part=part,
                stage=stage,
                n_devices=n_devices,
                attention=engine.attention,
                on_compile=engine.on_compile,
                command_buffer_collectives=engine.command_buffer_collectives,
            ),
            self._link,
            post=self._inbox.put,
            address_before=self._port.data_address_of_previous,
            memory_of=lambda worker: LocalMemory(
                [worker], stored=stored, model=config, dtype=dtype, module=module
            ),
            place_adapter=from_pieces(config, dtype),
        )
        self._controller = Controller(
            stage,
            n_stages,
            lines=self,
            device=self._device,
            clock=time.monotonic,
        )

    def stop(self) -> None:
        """Make `run` return; from any thread or a signal handler."""
        self._stopping.set()

    def run(self) -> str | None:
        """Serve until `stop`; if the device hangs, return why the process must exit."""
        self._port.open(self.about)
        controller, why = self._controller, None
        while why is None and not self._stopping.is_set():
            limit = min(_LOOK_SECONDS, max(0.0, controller.deadline() - time.monotonic()))
            item = self._inbox.get(limit)
            if isinstance(item, bytes):
                controller.take(item)
            elif item is not None:
                item(controller)
            why = self._device.over
            if why is None and time.monotonic() >= controller.deadline():
                why = controller.overdue()
        if why is not None:
            self._stopping.wait(_LAST_REPORT_SECONDS)  # lets the last report reach the engine master
        return why

    def close(self) -> None:
        """End the lines and the threads within a few seconds; does not wait for the device."""
        if self._line is not None:
            self._line.close()
        self._port.close()
        self._inbox.end()
        self._device.close()

    # The methods of workers.controller.Lines.

    def connect(self, address: str) -> None:
        """Open a line to the next stage's worker, unless there is one to that address."""
        if address == self._next_address and self._line is not None:
            return
        assert self._next_terms is not None
        if self._line is not None:
            self._line.close()
        self._next_address = address
        self._line = ControlLine(
            address,
            role=PREVIOUS,
            terms=self._next_terms,
            secret=self._options.engine.control_secret,
            deliver=_ignore_frames,
            limits=LineLimits(),
            data_address="" if self._link is None else self._link.address,
        )

    def forward(self, data: bytes) -> None:
        assert self._line is not None, "connect comes first"
        self._line.send(data)

    def report(self, data: bytes) -> None:
        self._port.report(data)


def _link(options: WorkerOptions, group: DeviceGroup) -> ProcessLink | None:
    if options.n_stages == 1:
        return None
    if options.link == "transfer":
        return TransferLink(group, host=options.data_host)
    return CollectiveLink(group, jax.devices(), stage=options.stage, n_stages=options.n_stages)


def run_worker(
    options: WorkerOptions,
    *,
    note: Callable[[str], object],
    loading: Callable[[], AbstractContextManager[OnLoad]],
) -> int:
    """Run a worker in this process until a signal ends it; return its exit status.

    `note` receives messages for people. `loading` provides the callback for the progress of loading, in bytes
    done and in total, as a context that ends with the loading.
    """
    parent = _Parent()
    if options.end_with_stdin:
        parent.watch()
    keep_compiled_programs(options.engine.compile_cache, stage=(options.stage, options.n_stages))
    with loading() as on_load:
        worker = WorkerProcess(options, on_load=on_load)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    parent.on_end(worker.stop)
    note(f"stage {options.stage + 1} of {options.n_stages} listens for control messages at {worker.address}")
    why = worker.run()
    if why is not None:
        note(why)
        return _HUNG_STATUS
    worker.close()
    return 0


def _ignore_frames(data: bytes | None, why: str) -> bool:
    """The next stage sends nothing on this line, and the engine master notices if the line breaks."""
    return True


class _Parent:
    """Ends this process soon after its parent: stdin closes when the parent ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None  # None: still loading, which cannot be stopped

    def watch(self) -> None:
        """Start to watch stdin, on a thread of its own."""
        threading.Thread(target=self._wait, name="orca-parent", daemon=True).start()

    def on_end(self, stop: Callable[[], object]) -> None:
        """Call `stop` when the parent ends, and kill the process only if that does not end it."""
        with self._lock:
            self._stop = stop

    def _wait(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with self._lock:
            stop = self._stop
        if stop is not None:
            stop()
            time.sleep(_ORPHAN_SECONDS)
        os._exit(_ORPHANED_STATUS)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run a worker from the command line's one argument; return the exit status."""
    try:
        if len(arguments) != 1:
            raise ConfigError(f"a worker takes its options as one argument; it got {len(arguments)}")
        options = WorkerOptions.from_json(arguments[0])
        if secret := os.environ.get(SECRET_VARIABLE):
            options = replace(options, engine=replace(options.engine, control_secret=secret))
        return run_worker(options, note=_print, loading=lambda: nullcontext(lambda done, total: None))
    except OrcaError as error:
        _print(f"orca: error: {' '.join(str(error).split())}")
        return 2


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a normal exit would wait forever for a device that hangs
