"""Finds a checkpoint by its directory or its name on the Hugging Face hub."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from jax.typing import DTypeLike

from orca_jax.checkpoint import huggingface as hf_checkpoint
from orca_jax.checkpoint.directory import Checkpoint, Placement, load_directory
from orca_jax.errors import NotACheckpoint
from orca_jax.families.strict_json import shown

_HUB_JSON = ["*.json"]
_HUB_FILES = [*_HUB_JSON, "*.safetensors", "*.jinja"]
# Every folder except additional_chat_templates: the patterns match names that do not begin with "add".
_HUB_FOLDERS = ["[!a]*/*", "a/*", "a[!d]*/*", "ad/*", "ad[!d]*/*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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


def find_directory(path_or_name: str | Path, *, weights: bool = True) -> Path:
    """The directory with this path, or one downloaded from the hub with only JSON, templates and safetensors.

    Without `weights` only JSON is downloaded.
    """
    path = Path(path_or_name).expanduser()
    try:
        if path.is_dir():
            return path
        is_file = path.exists()
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error}") from error
    if is_file:
        if path.suffix in hf_checkpoint.PICKLES:
            raise hf_checkpoint.refuse_pickle(path)
        raise NotACheckpoint(f"{shown(path)} is a file; name the directory that holds config.json")
    name = str(path_or_name)
    if not _HUB_NAME.fullmatch(name):
        raise NotACheckpoint(f"there is no directory {shown(name)}")
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=_HUB_FILES if weights else _HUB_JSON, ignore_patterns=_HUB_FOLDERS
            )
        )
    except Exception as error:  # the hub's client also raises errors of the network and the disk
        raise NotACheckpoint(
            f"there is no directory {shown(name)}, and no model of that name came from the Hugging Face hub: "
            f"{type(error).__name__}: {shown(str(error))}"
        ) from error
