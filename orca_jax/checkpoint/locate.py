"""Reads a checkpoint by its directory or its name on the Hugging Face hub."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jax.typing import DTypeLike

from orca_jax.checkpoint.directory import Checkpoint, Placement, load_directory
from orca_jax.model_files.locate import find_directory


def load_checkpoint(
    path_or_name: str | Path,
    *,
    dtype: DTypeLike,
    vocab_multiple: int = 1,
    kv_repeats: int = 1,
    placements: Sequence[Placement] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Read a checkpoint from a directory, or from the hub if there is no such directory.

    The other arguments and the errors are as in `load_directory`.
    """
    return load_directory(
        find_directory(path_or_name),
        dtype=dtype,
        vocab_multiple=vocab_multiple,
        kv_repeats=kv_repeats,
        placements=placements,
        on_bytes=on_bytes,
    )
