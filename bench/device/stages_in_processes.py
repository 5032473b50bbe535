"""Measures one split of `bench.stages` with a process for each stage; `bench.stages` runs it."""

import json
from dataclasses import asdict

from bench.stages import BLOCK_SIZE, Built, SplitBench, measure_split, numbers, parse, sizes_of
from orca_jax.config import Deadlines, EngineConfig, RestartBound, ServingConfig
from orca_jax.engine.local_processes import WorkerProcesses
from orca_jax.engine.remote_pipeline import owned_pipeline
from orca_jax.families.presets import PRESETS
from orca_jax.scheduling.blocks import round_up


class StagesInProcesses:
    """A preset's engine with a process for each stage; one engine for all batches up to `rows`."""

    def __init__(self, preset: str, split: str, rows: int) -> None:
        self.n_stages, tensor = sizes_of(split)
        self.model = PRESETS[preset]
        self._built, _ = owned_pipeline(
            preset,
            self.model,
            EngineConfig(
                model=preset,
                load_format="dummy",
                max_batch_size=rows,
                n_slots=rows * self.n_stages * round_up(self.model.n_positions, BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                pipeline_parallel=self.n_stages,
                tensor_parallel=tensor,
                worker_processes=True,
                restarts=RestartBound(restarts=0),
                deadlines=Deadlines(iteration_seconds=60, worker_seconds=60, ready_seconds=600),
            ),
            WorkerProcesses,
            on_event=lambda line: None,
        )

    def build(self, serving: ServingConfig) -> Built:
        """Return the engine; for a batch of `serving` it has the same programs as an engine of that size."""
        assert serving.max_batch_size <= self._built.serving.max_batch_size
        return Built(self._built.engine, self._built.kv, self._built.device)

    def close(self) -> None:
        """End the processes."""
        self._built.close()


def main() -> None:
    """Measure the split that --one names, and print it as a line of JSON."""
    flags = parse()
    stages = StagesInProcesses(flags.preset, flags.one, max(numbers(flags.rows)))
    try:
        print(json.dumps(asdict(measure_split(flags, SplitBench(stages)))))
    finally:
        stages.close()


if __name__ == "__main__":
    main()
