"""Puts a disk tier together: its files, their fingerprint, and the memory of the workers."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.engine.block_files import BlockFiles
from orca_jax.execution.host_blocks import StagesMemory
from orca_jax.execution.worker import Worker
from orca_jax.launch.block_fingerprint import block_fingerprint
from orca_jax.model_files.found_model import FoundModel
from orca_jax.scheduling.disk_tier import DiskTier, state_name
from orca_jax.scheduling.kv_manager import KVManager

_log = logging.getLogger(__name__)

_FORMAT = 1
_CLOSE_SECONDS = 20.0


class DiskBlocks:
    """The disk tier of an engine in this process. Raises ConfigError."""

    def __init__(
        self, found: FoundModel, config: EngineConfig, dtype: str, kv: KVManager, workers: Sequence[Worker]
    ) -> None:
        assert config.kv_disk is not None and kv.host is not None
        self._kv, self._workers = kv, workers
        stages = [worker.host for worker in workers if worker.host is not None]
        of_states = [worker.host_states for worker in workers if worker.host_states is not None]
        key = fingerprint(found, config, dtype, [stage.kinds for stage in (*stages, *of_states)])
        self._files = BlockFiles(Path(config.kv_disk).expanduser(), key, config.kv_disk_bytes)
        states = None if kv.snapshots is None else (kv.snapshots, StagesMemory(of_states))
        kv.disk = DiskTier(kv.host, self._files, StagesMemory(stages), states)

    def close(self) -> None:
        """Write the blocks that only the devices have, and end the files' thread. No iteration is issued."""
        ends = time.monotonic() + _CLOSE_SECONDS
        try:
            self._save(ends)
        except Exception:  # a device that failed has nothing to save
            _log.warning("blocks that were still on the devices are not in the disk tier", exc_info=True)
        self._files.close(max(1.0, ends - time.monotonic()))

    def _save(self, ends: float) -> None:
        disk, prefixes = self._kv.disk, self._kv.prefixes
        if disk is None or prefixes is None or disk.stopped:
            return
        disk.step()
        snapshots = [] if self._kv.snapshots is None else self._kv.snapshots.all_named()
        kept = [
            (block_hash, partial(Worker.block_bytes, block=each)) for block_hash, each in prefixes.blocks()
        ]
        kept += [
            (state_name(block_hash), partial(Worker.state_bytes, state=each))
            for block_hash, each in snapshots
        ]
        for name, read in kept:
            if name in self._files:
                continue
            parts = [part for worker in self._workers for part in read(worker)]
            if not self._files.write(name, parts, wait=ends - time.monotonic()):
                return


def fingerprint(found: FoundModel, config: EngineConfig, dtype: str, kinds: Sequence[object]) -> str:
    """A text that differs wherever the bytes of a block differ. `kinds` are those of each stage's arrays.

    Weights count by the names, sizes and times of their files. Raises ConfigError for weights without files.
    """
    refusal = (
        f"kv_disk is {str(config.kv_disk)!r}, and the model {found.name} has no files by which its "
        "weights would be known again after a restart; leave kv_disk out"
    )
    key = block_fingerprint(found, config, dtype, kinds, _names_and_times, version=_FORMAT, refusal=refusal)
    return key[:32]


def _names_and_times(files: Sequence[Path]) -> object:
    stats = [(path, path.stat()) for path in files]
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
