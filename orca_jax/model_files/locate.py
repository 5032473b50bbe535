"""Finds a checkpoint's directory by its path or its name on the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.constants import HF_HUB_OFFLINE

from orca_jax.errors import LIKELY, ConfigError, NotACheckpoint, closest
from orca_jax.families.strict_json import shown
from orca_jax.gguf_file import SUFFIX, is_gguf
from orca_jax.model_files.other_kinds import check_kind, gguf_in, gguf_models, refuse_file, several_ggufs

_HUB_JSON = ["*.json"]
_HUB_FILES = [*_HUB_JSON, "*.safetensors", "*.jinja"]
# Every folder but additional_chat_templates, 1_Pooling, 1_LogitScore and 2_Dense, by how their names begin.
_HUB_FOLDERS = ["[!a12]*/*", "a/*", "a[!d]*/*", "ad/*", "ad[!d]*/*", "[12][!_]*/*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# A file of a repository that has several: NAME/FILE.gguf, or NAME:Q4_K_M for the one whose name ends so.
_HUB_GGUF = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<file>[\w./-]+\.gguf)|:(?P<type>[\w-]+))")


def find_directory(path_or_name: str | Path, *, weights: bool = True) -> Path:
    """Find the directory with this path, or download JSON, templates and safetensors from the hub.

    Without `weights` only JSON is downloaded. The result is the path of a GGUF file where the path is one,
    or its directory or repository holds one and no safetensors. Raises NotACheckpoint, or `check_kind`'s
    error for a directory that holds something else.
    """
    path = Path(path_or_name).expanduser()
    try:
        is_directory, is_file = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{shown(path)} cannot be read: {error}") from error
    if is_gguf(path):
        return path
    if not is_directory:
        if is_file:
            raise refuse_file(path)
        path = _from_hub(str(path_or_name), weights=weights)
        if is_gguf(path):
            return path
    found = gguf_in(path)
    if found is None:
        check_kind(path)
    return found or path


def check_is_free(target: Path) -> None:
    """Raise ConfigError unless `target` does not exist or is an empty directory."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{shown(target)} already exists and is not an empty directory; name another")


def _from_hub(name: str, *, weights: bool) -> Path:
    if one := _HUB_GGUF.fullmatch(name):
        found = _gguf_from_hub(name, one["name"], one["file"] or one["type"])
        assert found is not None, "it was asked for by name"
        return found
    if not _HUB_NAME.fullmatch(name):
        raise NotACheckpoint(f"there is no directory {shown(name)}{_nearby(Path(name))}")
    try:
        # An attribute of the module, so that it is imported only when called: its import takes long.
        place = Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES if weights else _HUB_JSON, ignore_patterns=_HUB_FOLDERS
            )
        )
    except Exception as error:  # the hub's client also raises errors of the network and the disk
        raise _not_on_hub(name, name, error) from error
    complete = any(place.glob("*.safetensors")) if weights else (place / "config.json").exists()
    return place if complete or gguf_in(place) is not None else _gguf_from_hub(name, name, "") or place


def _gguf_from_hub(name: str, repository: str, which: str) -> Path | None:
    """Download the GGUF file of a repository that `which` names, or its only one; None if it has none.

    Raises NotACheckpoint where `which` fits none, or several.
    """
    try:
        place = Path(huggingface_hub.snapshot_download(repository, allow_patterns=_HUB_JSON))
        listed = _listed_on_hub(repository) or [
            str(one.relative_to(place)) for one in place.rglob(f"*{SUFFIX}")
        ]
        wanted = _chosen(listed, which)
        if which and not wanted:
            raise FileNotFoundError(f"its GGUF files are {', '.join(listed) or 'none'}")
        for one in wanted:
            huggingface_hub.hf_hub_download(repository, one)
    except NotACheckpoint:
        raise
    except Exception as error:
        raise _not_on_hub(name, repository, error) from error
    return place / wanted[0] if wanted else None


def _listed_on_hub(repository: str) -> list[str]:
    """The GGUF files of a repository; none where it cannot be reached, and the cache may have some."""
    try:
        return [one for one in huggingface_hub.list_repo_files(repository) if one.endswith(SUFFIX)]
    except Exception:
        return []


def _chosen(listed: Sequence[str], which: str) -> Sequence[str]:
    """The files of the model that `which` names, by a file's name or the end of one, or of the only model."""
    models = gguf_models(listed)
    if which.endswith(SUFFIX):
        return next((files for files in models if which in files), [])
    ending = f"{which}{SUFFIX}".lower()
    found = [files for files in models if not which or files[0].lower().endswith(ending)]
    if len(found) > 1:
        raise several_ggufs("the repository", [files[0] for files in found])
    return found[0] if found else []


def _not_on_hub(name: str, repository: str, error: Exception) -> NotACheckpoint:
    return NotACheckpoint(
        f"there is no directory {shown(name)}{_nearby(Path(name))}, and no model of that name came from "
        f"the Hugging Face hub: {_hub_problem(repository, error)}"
    )


def _hub_problem(name: str, error: Exception) -> str:
    """Describe the hub's error and the next step. The client's error classes are known by name."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"access to {name} must be asked for on its page there; then log in with `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return f"it has no model {name}, or a private one: check the name, or log in with `hf auth login`"
    if "LocalEntryNotFoundError" in kinds or "OfflineModeIsEnabled" in kinds:
        why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "there is no connection to it"
        return (
            f"{why}, and {name} is not in the cache. Connect and run `hf download {name}`, or copy the model "
            "to this machine and name its directory"
        )
    return f"{type(error).__name__}: {shown(str(error))}"


def _nearby(path: Path) -> str:
    """The end of a message: the sibling directory of `path` with the closest name."""
    try:
        siblings = [each.name for each in path.expanduser().parent.iterdir() if each.is_dir()]
    except (OSError, ValueError):
        return ""
    name = closest(path.name, siblings, at_least=LIKELY)
    return "" if name is None else f" (did you mean {shown(path.with_name(name))}?)"
