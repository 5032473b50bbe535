"""`orca plan`: what a model needs on given devices, as tables or one JSON object."""

import argparse
import json
import os
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orca_jax.config import Dtype, EngineConfig, ParallelConfig
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.model_files.draft_model import find_draft_config
from orca_jax.model_files.found_model import find_config
from orca_jax.planning.cost_model import parameter_count
from orca_jax.planning.known_devices import CPU, KnownDevice, cpu_device, gpu_named
from orca_jax.planning.plan import Plan, PlanTarget, make_plan
from orca_jax.planning.pools import PoolPlan, plan_pool
from orca_jax.planning.sizes import n_rows
from orca_jax.planning.stage_layers import split_summary
from orca_jax.planning.stage_memory import state_bytes
from orca_jax.workers.ask_xla import MemoryQuestion, NoAnswer, ask_memory, ask_rates
from server.commands.notes import Notes
from server.errors import UsageError
from server.settings.flags import PlanFlags, engine_config, read_flags

_GIB, _MIB = 1 << 30, 1 << 20
_DOES_NOT_FIT = 1
_WIDTH = 110


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status: 0, or 1 if something does not fit."""
    notes, flags, engine = Notes(), read_flags(args, PlanFlags), engine_config("plan", args)
    budget = None if flags.latency_budget is None else seconds_of(flags.latency_budget)
    config = find_config(args.model, engine.load_format, engine.quantization, engine.kv_cache_dtype)
    target = _target(config, engine, flags, notes)
    plan = make_plan(target, latency_budget=budget)
    why_arithmetic = "XLA was not run" if plan.fits else "XLA is not run for a plan that does not fit"
    if flags.compile and plan.fits:
        try:
            with notes.console.status(f"Compiling for {target.device.name} with XLA"):
                temporaries = ask_memory(_question(plan), _positive("compile_timeout", flags.compile_timeout))
        except NoAnswer as error:
            why_arithmetic = str(error)
        else:
            plan = make_plan(replace(target, temporaries=temporaries), latency_budget=budget)
    name = "the demo model" if args.model is None else str(args.model)
    pool = None
    if flags.role is not None and plan.fits:
        pool = plan_pool(plan, flags.role, flags.output_tokens)
    if flags.json:
        asked = {} if pool is None else {"pool": asdict(pool)}
        print(json.dumps(as_json(name, plan, why_arithmetic) | asked))
    else:
        _show(name, plan, why_arithmetic)
        if pool is not None:
            _show_pool(pool, states=plan.target.model.has_state)
    return 0 if plan.fits else _DOES_NOT_FIT


def seconds_of(text: str) -> float:
    """Parse a time such as `50ms`, `0.05s` or `0.05` into seconds. Raises UsageError."""
    for unit, scale in (("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * scale
            except ValueError:
                break
            if 0 < seconds < 1e6:
                return seconds
            break
    raise UsageError(
        f"latency_budget is {text!r}; it must be a time above 0, such as 50ms, 0.05s or 0.05 (seconds)"
    )


def _target(config: ModelConfig, engine: EngineConfig, flags: PlanFlags, notes: Notes) -> PlanTarget:
    dtype: Dtype = engine.dtype or ("float32" if flags.device == CPU else "bfloat16")
    draft = find_draft_config(engine)
    return PlanTarget(
        config=config.read_by(draft),
        device=_device(flags, dtype, notes),
        sizes=engine,
        dtype=dtype,
        context=max(1, config.n_positions // 2) if flags.context is None else flags.context,
        parallel=ParallelConfig.part_of(engine),
        draft=draft,
    )


def _device(flags: PlanFlags, dtype: Dtype, notes: Notes) -> KnownDevice:
    """The device with the flags' name, and the flags' figures in place of its own. Raises ConfigError."""
    if flags.device == CPU:
        bandwidth = matrix_rate = 0.0
        if flags.bandwidth is None or flags.matrix_rate is None:
            with notes.console.status("Measuring this CPU"):
                bandwidth, matrix_rate = ask_rates(dtype)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        device = cpu_device(memory=memory, bandwidth=bandwidth, matrix_rate=matrix_rate)
    else:
        device = gpu_named(flags.device)
    if flags.memory is not None:
        device = replace(device, memory=int(_positive("memory", flags.memory) * _GIB))
    if flags.bandwidth is not None:
        rate = _positive("bandwidth", flags.bandwidth) * 1e9
        device = replace(device, bandwidth=rate)
        if flags.device == CPU:  # its links are its memory
            device = replace(device, inside=rate, between=rate)
    if flags.matrix_rate is not None:
        rate = _positive("matrix_rate", flags.matrix_rate) * 1e12
        device = replace(device, matrix_rates=dict.fromkeys(device.matrix_rates, rate))
    return device


def _positive(name: str, value: float) -> float:
    if not 0 < value < 1e9:
        raise ConfigError(f"{name} is {value:g}; it must be a number above 0")
    return value


def _question(plan: Plan) -> MemoryQuestion:
    target = plan.target
    return MemoryQuestion(
        device=target.device.name,
        model=target.model,
        serving=plan.serving,
        dtype=target.dtype,
        parallel=target.parallel,
        n_rows=n_rows(plan.serving.max_batch_size, n_workers=target.parallel.pipeline_parallel),
    )


def as_json(name: str, plan: Plan, why_arithmetic: str) -> dict[str, Any]:
    """The plan for `--json`: bytes per device, times in seconds, layers and stages counted from 1."""
    target, device = plan.target, plan.target.device
    compiled = target.temporaries is not None
    return {
        "model": name,
        "parameters": parameter_count(target.config),
        "dtype": target.dtype,
        "device": {
            "name": device.name,
            "memory": device.memory,
            "budget": target.budget,
            "bandwidth": device.bandwidth,
            "matrix_rate": device.matrix_rates[target.dtype],
            "inside_machine": device.inside,
            "between_machines": device.between,
        },
        "pipeline_parallel": target.parallel.pipeline_parallel,
        "tensor_parallel": target.parallel.tensor_parallel,
        "fits": plan.fits,
        "problems": [stage.problem for stage in plan.stages if stage.problem is not None],
        "hint": plan.hint,
        "max_batch_size": plan.serving.max_batch_size,
        "max_batch_tokens": plan.serving.max_batch_tokens,
        "block_size": plan.serving.block_size,
        "n_slots": plan.serving.n_slots if plan.fits else 0,
        "forward_programs": sum(plan.forward_programs) if plan.fits else 0,
        "temporaries_source": "compiled" if compiled else "arithmetic",
        "why_not_compiled": None if compiled else why_arithmetic,
        "stages": [
            {
                "stage": i + 1,
                "layers": [stage.layers.start + 1, stage.layers.stop],
                "devices": target.parallel.tensor_parallel,
                "weights": stage.memory.weights,
                "tables": stage.memory.tables,
                "states": stage.memory.states,
                "snapshots": stage.memory.snapshots,
                "draft_states": stage.memory.draft_states,
                "temporaries": stage.memory.temporaries,
                "slot": stage.memory.slot,
                "slots": stage.slots,
                **({} if stage.draft is None else {"draft": asdict(stage.draft)}),
            }
            for i, stage in enumerate(plan.stages)
        ],
        "context": target.context,
        "floors": [asdict(floor) for floor in plan.floors],
        "recommendation": None if plan.recommendation is None else asdict(plan.recommendation),
    }


def _show(name: str, plan: Plan, why_arithmetic: str) -> None:
    console = _console()
    target, device, serving = plan.target, plan.target.device, plan.serving
    split = split_summary(target.config.n_layers, target.parallel)
    n = parameter_count(target.config)
    size = f"{n / 1e9:,.2f} billion" if n >= 1e9 else f"{n / 1e6:,.1f} million"
    console.out(f"{name}: {size} parameters, {target.dtype}")
    console.out(
        f"{split}: {device.name} with {device.memory / _GIB:.1f} GiB, "
        f"{target.budget / _GIB:.1f} GiB of it usable on each; {device.bandwidth / 1e9:,.0f} GB/s, "
        f"{device.matrix_rates[target.dtype] / 1e12:,.4g} TFLOP/s"
    )
    attention = target.model.attention
    if attention.kv_repeats > 1:
        stored = attention.n_kv_heads // attention.kv_repeats
        console.out(
            f"Key/value heads: {stored}, repeated to {attention.n_kv_heads} so that each of the "
            f"{target.parallel.tensor_parallel} devices of a stage has its own"
        )
    if target.model.has_state:
        n_devices = target.parallel.tensor_parallel
        own = [state_bytes(target.model, stage.layers, n_devices, target.itemsize) for stage in plan.stages]
        share = " on each device of its stages" if n_devices > 1 else ""
        of_drafts = sum(stage.memory.draft_states for stage in plan.stages)
        drafts = f", {of_drafts / _MIB:,.1f} MiB for states after drafts" if of_drafts else ""
        console.out(
            f"Recurrent layers: {sum(own) / 1024:,.1f} KiB of states for each request{share}, whatever its "
            "length; "
            f"{sum(stage.memory.states for stage in plan.stages) / _MIB:,.1f} MiB for all rows{drafts} and "
            f"{sum(stage.memory.snapshots for stage in plan.stages) / _MIB:,.1f} MiB for "
            f"{plan.serving.n_snapshots:,} snapshots in the prefix cache, besides the table below"
        )
    draft = next((stage.draft for stage in plan.stages if stage.draft is not None), None)
    if draft is not None:
        console.out(
            f"Draft model: {draft.weights / _GIB:.2f} GiB of weights, "
            f"{(draft.fixed - draft.weights) / _MIB:,.1f} MiB of tables and temporaries and "
            f"{draft.slot / 1024:,.1f} KiB for each slot, besides the table below"
        )
    source = "XLA's memory plan" if target.temporaries is not None else f"arithmetic ({why_arithmetic})"
    table = Table(title=escape(f"On each device; temporaries by {source}"), title_justify="left")
    for column in (
        *("stage", "layers", "weights, GiB", "tables, MiB", "temporaries, MiB", "per slot, KiB"),
        "slots that fit",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for i, stage in enumerate(plan.stages):
        memory = stage.memory
        table.add_row(
            str(i + 1),
            f"{stage.layers.start + 1} to {stage.layers.stop}",
            f"{memory.weights / _GIB:.2f}",
            f"{memory.tables / _MIB:,.1f}",
            f"{memory.temporaries / _MIB:,.1f}",
            f"{memory.slot / 1024:,.1f}",
            f"{stage.slots:,}" if stage.problem is None else "too few",
        )
    console.print(table)
    for stage in plan.stages:
        if stage.problem is not None:
            console.out(f"does not fit: {stage.problem}")
    if not plan.fits:
        console.out(f"{plan.hint}")
        return
    console.out(
        f"n_slots {serving.n_slots:,}; max_bs {serving.max_batch_size}, max_batch_tokens "
        f"{serving.max_batch_tokens:,}"
    )
    n_any, n_decode = plan.forward_programs
    for_decode = f", and {n_decode} for decode up to some context" if n_decode else ""
    console.out(f"Forward programs to compile for each stage: {n_any}{for_decode}")
    console.print(_floors(plan))
    if plan.recommendation is not None:
        console.out(_recommended(plan))


def _show_pool(pool: PoolPlan, *, states: bool) -> None:
    console = _console()
    what = "keys and values, and its state" if states else "keys and values"
    other = "decode" if pool.role == "prefill" else "prefill"
    console.out(
        f"--role {pool.role}, at the floors, prompts of {pool.context:,} tokens and {pool.n_output:,} more: "
        f"{pool.requests_per_second:,.2f} requests/s, for {pool.others_each:,.2f} servers of the role {other}"
    )
    if pool.role == "decode":
        console.out(f"{pool.max_batch_size} requests decode together")
    console.out(
        f"A prompt's {what}: {pool.prompt_bytes / _MIB:,.1f} MiB, "
        f"{pool.transfer_seconds * 1e3:,.1f} ms to another machine; --kv-host-bytes {pool.host_bytes}"
    )


def _console() -> Console:
    """stdout, with a width that fits the tables if it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _floors(plan: Plan) -> Table:
    title = f"Floors, the least time of an iteration, with {plan.target.context:,} tokens per request"
    table = Table(title=title, title_justify="left")
    for column in (
        *("phase", "requests", "tokens", "iteration, ms", "interval, ms", "output tokens/s", "bound by"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for floor in plan.floors:
        digits = 0 if floor.tokens_per_second >= 10 else 2
        table.add_row(
            floor.phase,
            str(floor.batch_size),
            f"{floor.n_tokens:,}",
            f"{floor.seconds * 1e3:,.3f}",
            f"{floor.interval * 1e3:,.3f}",
            f"{floor.tokens_per_second:,.{digits}f}",
            floor.bound,
        )
    return table


def _recommended(plan: Plan) -> str:
    best = plan.recommendation
    assert best is not None
    if best.max_bs == 0 and best.bound == "latency":
        return f"no max_bs keeps a decode iteration within {best.budget * 1e3:g} ms, not even 1"
    why = {
        "latency": "one more would exceed it",
        "slots": f"slots for more requests of {plan.target.context:,} tokens do not fit",
        "limit": "this is the maximum",
    }[best.bound]
    return (
        f"for a budget of {best.budget * 1e3:g} ms: --max-batch-size {best.max_bs} "
        f"({best.seconds * 1e3:.3f} ms at the floor; {why})"
    )
