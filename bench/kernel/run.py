"""The part of the kernel benchmark that holds the GPU: runs tasks in order, a line of JSON for each.

It runs in a separate process: if a kernel hangs or breaks the device, `bench.kernel` kills it and starts
another one at the next task. Do not run it by hand.
"""

import argparse
import importlib
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.clock import chain, time_calls
from bench.kernel.correctness import Form, check, form_named, forms
from bench.kernel.peers import NoPeer, peer
from bench.kernel.programs import Arrays, Program, drawn, pooled, sampled_errors, shape_of, with_list
from bench.kernel.shapes import SECTIONS, Case, Scale, Task, launch_cases, timed_tasks
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import work_items

_THREADS = 8
_FEW = {"at_least": 0.0, "repeat": 1, "warm_up": 0, "alone": 1}
OURS = ("kernel", "static", "per request")


def all_tasks(only: Sequence[str], scale: Scale) -> list[Task]:
    """All tasks that run on JAX, in the order of SECTIONS."""
    tasks = [Task("ceilings", "ceilings"), *timed_tasks(scale)]
    tasks += [Task("correctness", form.name) for form in forms(scale)]
    tasks += [
        Task("launches", f"launches: kernel, {case.name}", "kernel", case) for case in launch_cases(scale)
    ]
    order = (
        "cudnn",
        "cudnn paged",
        "attention_mgpu",
        "decode_attention",
        "paged_attention",
        "kernel",
        "per request",
        "static",
    )
    by_peer = [task for task in tasks if task.section in only]
    by_peer.sort(
        key=lambda task: (
            SECTIONS.index(task.section),
            order.index(task.subject) if task.section in ("mixed", "peers") and task.subject else 0,
        )
    )
    return by_peer


def program_of(task: Task, *, n_cores: int, interpret: bool) -> Program:
    """The program of a timed task. Raises NoPeer."""
    assert task.case is not None and task.subject is not None
    if task.subject in OURS:
        return pooled(task.case, task.subject, n_cores=n_cores, interpret=interpret)
    return peer(task.case, task.subject)


class Compiled:
    """The programs of some tasks, compiled in parallel before the first task runs."""

    def __init__(self, tasks: Sequence[Task], scale: Scale, *, n_cores: int, sharding: Any = None) -> None:
        self.scale: Scale = scale
        self.n_cores = n_cores
        self.programs: dict[str, Program | Exception] = {}
        self.seconds: dict[Hashable, float] = {}
        self._made: dict[Hashable, Any] = {}
        self._jobs: dict[Hashable, Any] = {}
        self._sharding = sharding
        for task in tasks:
            if task.section == "correctness":
                form = form_named(task.name, scale)
                kernel, shapes = form_program(form, n_cores, interpret=scale == "tiny")
                self._jobs[form.name] = kernel, _placed(shapes, sharding)
            elif task.case is not None:
                try:
                    program = self.programs[task.name] = program_of(
                        task, n_cores=n_cores, interpret=scale == "tiny"
                    )
                    self._jobs.setdefault(program.key, _program_job(program, sharding))
                except (NoPeer, AssertionError, ValueError) as error:
                    self.programs[task.name] = error

    def __len__(self) -> int:
        return len(self._jobs)

    def _for_described(self) -> AbstractContextManager[Any]:
        """Describe an absent GPU to Pallas's Triton; each thread needs its own context."""
        if self._sharding is None:
            return nullcontext()
        return jax.sharding.use_abstract_mesh(self._sharding.mesh.abstract_mesh)

    def compile(self) -> Iterator[Hashable]:
        """Compile all; yields each key when done. `of` raises the error of a program that failed."""

        def timed(key: Hashable) -> Hashable:
            start = time.perf_counter()
            lowered, shapes = self._jobs[key]
            try:
                with self._for_described():
                    self._made[key] = lowered.lower(*shapes).compile()
            except Exception as error:
                self._made[key] = error
            self.seconds[key] = time.perf_counter() - start
            return key

        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            jobs: list[Future[Hashable]] = [pool.submit(timed, key) for key in self._jobs]
            for job in as_completed(jobs):
                yield job.result()

    def of(self, key: Hashable) -> Any:
        """The compiled program. Raises the error of its compilation."""
        made = self._made[key]
        if isinstance(made, Exception):
            raise made
        return made

    def program(self, task: Task) -> Program:
        """The task's program. Raises the error of its construction."""
        program = self.programs[task.name]
        if isinstance(program, Exception):
            raise program
        return program


def _placed(shapes: Any, sharding: Any) -> Any:
    def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(place, shapes)


def _program_job(program: Program, sharding: Any) -> tuple[Any, Any]:
    shapes = program.shapes
    arguments = (shapes.q, shapes.shared, list(shapes.sets) * program.n_calls)
    return jax.jit(chain(program.call)), _placed(arguments, sharding)


def _form_plan(form: Form, n_cores: int) -> Plan:
    room, n_kv_heads = form.room, form.n_kv_heads
    group = form.n_heads // n_kv_heads
    sizes = (room.n_tokens, room.n_rows, n_kv_heads, group, form.block_size, n_cores)
    return Plan(*sizes, window=form.window)


def form_program(form: Form, n_cores: int, *, interpret: bool) -> tuple[Any, Any]:
    """The jitted kernel of a form, and the shapes of its arguments: a batch's six, and its list of work."""
    plan = _form_plan(form, n_cores)
    work = shape_of(*plan.list_shape, dtype=jnp.int32)
    kernel = partial(with_list, plan=plan, soft_cap=form.soft_cap, interpret=interpret)
    return jax.jit(kernel), (*form.shapes(), work)


def checked(form: Form, kernel: Any, n_cores: int, seed: int) -> dict[str, Any]:
    """`check` the compiled kernel, with each batch's list of work."""
    plan = _form_plan(form, n_cores)

    def with_work(*arrays: jax.Array) -> jax.Array:
        row_start, kv_length = (np.asarray(array) for array in arrays[4:])
        return kernel(*arrays, jnp.asarray(work_items(row_start, kv_length, plan)))

    return check(form, with_work, seed)


def ceilings(scale: Scale) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and of a sum; operations per second of a product."""
    n_bytes = 64 << 20 if scale == "tiny" else 4 << 30
    array = drawn(5, (n_bytes // 2 // 1024, 1024))
    copy = jax.jit(jnp.copy)
    total = jax.jit(lambda a: jnp.sum(a, dtype=jnp.float32))
    n = 512 if scale == "tiny" else 8192
    a, b = drawn(6, (n, n)), drawn(7, (n, n))
    product = jax.jit(jnp.matmul)
    return {
        "bandwidth": 2 * n_bytes / time_calls(lambda: copy(array), 1, at_least=0.05).median,
        "read_bandwidth": n_bytes / time_calls(lambda: total(array), 1, at_least=0.05).median,
        "matrix_rate": 2 * n**3 / time_calls(lambda: product(a, b), 1, at_least=0.05).median,
    }


def timed(
    case: Case, program: Program, run: Any, seed: int, times: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Errors of the first call, then its time; `times` are arguments of `time_calls`."""
    arrays: Arrays = program.make(seed)
    _, first = run(arrays.q, arrays.shared, arrays.sets)
    found = sampled_errors(case, program, arrays, first, seed=seed)
    del first
    timing = time_calls(lambda: run(arrays.q, arrays.shared, arrays.sets), program.n_calls, **times)
    return {
        "seconds": timing.median,
        "least": timing.least,
        "most": timing.most,
        "host": timing.host,
        "n_calls": program.n_calls,
        "error": found.relative,
        "largest_error": found.largest,
    }


def launches(program: Program, run: Any, seed: int) -> dict[str, Any]:
    """The kernels of one call by name, with their launches and total microseconds according to CUPTI."""
    profiler: Any = importlib.import_module("jax.experimental.mosaic.gpu.profiler")  # needs a GPU's library
    arrays = program.make(seed)
    _, times = profiler.measure(run, aggregate=False)(arrays.q, arrays.shared, arrays.sets)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, milliseconds in times or ():
        found[name][0] += 1 / program.n_calls
        found[name][1] += milliseconds * 1e3 / program.n_calls
    return {name: {"launches": n, "us": us} for name, (n, us) in found.items()}


def say(**words: Any) -> None:
    """Print a line for `bench.kernel`."""
    print(json.dumps(words), flush=True)


def run_task(task: Task, compiled: Compiled, seed: int) -> dict[str, Any]:
    """Run a task; returns its values."""
    if task.section == "ceilings":
        return ceilings(compiled.scale)
    if task.section == "correctness":
        form = form_named(task.name, compiled.scale)
        return checked(form, compiled.of(form.name), compiled.n_cores, seed)
    assert task.case is not None
    program = compiled.program(task)
    run = compiled.of(program.key)
    if task.section == "launches":
        return launches(program, run, seed)
    if compiled.scale == "tiny":
        return timed(task.case, program, run, seed, _FEW)
    return timed(task.case, program, run, seed)


def main() -> None:
    """Report the device; if it is a Hopper GPU, run the tasks after the first `--done`."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.run")
    parser.add_argument("--only", required=True)
    parser.add_argument("--scale", choices=get_args(Scale), required=True)
    parser.add_argument("--done", type=int, default=0)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since the epoch")
    flags = parser.parse_args()
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    n_cores = int(getattr(device, "core_count", 132))
    say(device=device.device_kind, capability=capability, n_cores=n_cores, jax=jax.__version__)
    if flags.scale == "tiny":
        n_cores = 1  # each is threads of the interpreter
    elif capability != "9.0":
        return
    tasks = list(enumerate(all_tasks(flags.only.split(","), flags.scale)))[flags.done :]
    for _, group in itertools.groupby(tasks, key=lambda pair: (pair[1].section, pair[1].subject)):
        here = list(group)
        compiled = Compiled([task for _, task in here], flags.scale, n_cores=n_cores)
        if time.time() < flags.until:
            for i, _ in enumerate(compiled.compile()):
                say(compiled=i + 1, of=len(compiled), section=here[0][1].section)
        for index, task in here:
            if time.time() >= flags.until:
                say(index=index, failed="left out: the time is up")
                continue
            say(starting=index)
            try:
                say(index=index, values=run_task(task, compiled, flags.seed + index))
            except Exception as error:
                say(index=index, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
                if not isinstance(error, NoPeer):
                    jax.block_until_ready(jnp.ones(8).sum())  # raises where the device is lost


if __name__ == "__main__":
    main()
