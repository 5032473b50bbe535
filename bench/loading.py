"""The cost of loading a checkpoint: host memory beyond the shards, bytes read for each stage, and seconds.

    python -m bench.loading [--layers 10] [--width 1536] [--dtype float32] [--keep DIRECTORY]

Writes a GPT-2 with random weights as safetensors (1.4 GB by default), converts it to Orbax, and has Orbax
save it too, with one chunk per array. Each is loaded in separate processes onto virtual CPU devices: all
stages in one process, and each stage alone. The shards are host memory there; the process's peak memory
beyond them, and beyond what it had before, is compared with one tensor and 10 % of the shards. Bytes read are
the system's count (rchar), compared with those of the stage's parameters.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.peers.checkpoint import write_random_checkpoint
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.trainers.orca_json import GPTOptions, described_model
from orca_jax.sharding.partition import split_model

LAYOUTS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))  # stages, tensor axis


def placements(config: ModelConfig, n_stages: int, n_tensor: int) -> list[dict[str, Sharding]]:
    """The sharding of each stage's parameters."""
    parts = split_model(
        config, jax.devices(), ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=n_tensor)
    )
    return [dict(part.placement(config)) for part in parts]


def save_with_orbax(source_path: Path, directory: Path) -> None:
    """Load the weights and save them with Orbax from one device."""
    loaded = load_checkpoint(source_path, dtype=np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, loaded.parameters)
    (directory / "config.json").write_bytes((source_path / "config.json").read_bytes())


def measure(directory: Path, n_stages: int, n_tensor: int, only: int | None, dtype: str) -> dict[str, Any]:
    """Load all stages, or one, in this process."""
    config = described_model(directory)[0]
    multiple = max(1, n_tensor)
    padded = replace(config, vocab_multiple=multiple)
    stages = placements(padded, n_stages, n_tensor)
    if only is not None:
        stages = [stages[only]]
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, read_before = _status("VmRSS"), _read_bytes()
    start = time.perf_counter()
    loaded_bytes: list[int] = [0]
    loaded = load_checkpoint(
        directory,
        dtype=dtype,
        vocab_multiple=multiple,
        placements=stages,
        on_bytes=lambda done, total: loaded_bytes.append(done),
    )
    seconds = time.perf_counter() - start
    shards = sum(s.data.nbytes for p in loaded.stages for a in p.values() for s in a.addressable_shards)
    largest = max(prod(shape) for shape in parameter_shapes(padded).values()) * 4
    return {
        "seconds": seconds,
        "shard_bytes": shards,
        "beyond_bytes": _status("VmHWM") - before - shards,
        "allowed_bytes": largest + shards // 10,
        "read_bytes": _read_bytes() - read_before,
        "own_bytes": loaded_bytes[-1],
    }


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def in_a_process(*args: object, n_devices: int = 1) -> dict[str, Any]:
    """Run this program with `args` in a process; returns the JSON of its last line."""
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={n_devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "bench.loading", *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def converted(source_path: Path, destination: Path) -> dict[str, Any]:
    """Convert in this process: seconds, and peak memory beyond what it had."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    convert_checkpoint(source_path, destination)
    return {"seconds": time.perf_counter() - start, "beyond_bytes": _status("VmHWM") - before}


def main(argv: Sequence[str] | None = None) -> None:
    """Write, convert, load, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--dtype", default="float32", help="dtype to load (default: float32, as stored)")
    parser.add_argument("--keep", type=Path, help="write the checkpoints here and keep them")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # directory, stages, tensor axis, stage
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--orbax-save", nargs=2, type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.one:
        directory, n_stages, n_tensor, only = flags.one
        stage = None if only == "all" else int(only)
        print(json.dumps(measure(Path(directory), int(n_stages), int(n_tensor), stage, flags.dtype)))
    elif flags.convert:
        print(json.dumps(converted(*flags.convert)))
    elif flags.orbax_save:
        save_with_orbax(*flags.orbax_save)
        print("{}")
    else:
        with tempfile.TemporaryDirectory() as temporary:
            report(flags.keep or Path(temporary), flags)


def report(work: Path, flags: argparse.Namespace) -> None:
    """Measure all cases; print a table and one line of JSON."""
    config = GPTOptions(
        vocab_size=50257,
        n_positions=1024,
        hidden_size=flags.width,
        n_layers=flags.layers,
        n_heads=flags.width // 64,
        ffn_size=4 * flags.width,
    ).model()
    work.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    results: list[dict[str, Any]] = []
    conversions: dict[str, dict[str, Any]] = {}
    sources = {name: work / name.replace(" ", "-") for name in ("safetensors", "orbax", "by Orbax")}
    with Progress(console=console) as progress:
        task = progress.add_task("writing", total=4 + len(sources) * sum(1 + s for s, _ in LAYOUTS))
        write_random_checkpoint(sources["safetensors"], config, max_file_bytes=1 << 29)
        progress.advance(task)
        conversions["to orbax"] = in_a_process("--convert", sources["safetensors"], sources["orbax"])
        progress.advance(task)
        conversions["to safetensors"] = in_a_process("--convert", sources["orbax"], work / "back")
        progress.advance(task)
        in_a_process("--orbax-save", sources["safetensors"], sources["by Orbax"])
        progress.advance(task)
        for name, directory in sources.items():
            for n_stages, n_tensor in LAYOUTS:
                for only in ("all", *range(n_stages)):
                    progress.update(task, description=f"{name}, {n_stages} x {n_tensor}, stage {only}")
                    args = ("--one", directory, n_stages, n_tensor, only, "--dtype", flags.dtype)
                    measured = in_a_process(*args, n_devices=n_stages * n_tensor)
                    case = {"source": name, "stages": n_stages, "tensor": n_tensor, "stage": only}
                    results.append(case | measured)
                    progress.advance(task)
    table = Table(title=f"loading, {flags.dtype}; MB")
    for column in ("source", "stages x tensor", "stage", "shards", "beyond", "allowed", "read", "own", "s"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for one in results:
        sizes = [f"{one[key] / 1e6:,.0f}" for key in ("shard_bytes", "beyond_bytes", "allowed_bytes")]
        reads = [f"{one[key] / 1e6:,.0f}" for key in ("read_bytes", "own_bytes")]
        layout = f"{one['stages']} x {one['tensor']}"
        table.add_row(one["source"], layout, str(one["stage"]), *sizes, *reads, f"{one['seconds']:.1f}")
    Console().print(table)
    for name, one in conversions.items():
        print(f"convert {name}: {one['seconds']:.1f} s, {one['beyond_bytes'] / 1e6:,.0f} MB beyond the start")
    print(json.dumps({"bench": "loading", "results": results, "conversions": conversions}))


if __name__ == "__main__":
    main()
