"""Says what a path holds if this engine cannot read it, and what to do about it.

Each error names what was found and the next step. It depends on file names alone, and on an adapter's small
JSON.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from orca_jax.errors import CheckpointError, NotACheckpoint, UnsafeFile, UnsupportedModel
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.trainers.array_trees import has_array_tree
from orca_jax.gguf_file import SUFFIX

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_ADAPTER = "adapter_config.json"
_MAX_ADAPTER_BYTES = 1_000_000
_DESCRIBES_A_MODEL = ("config.json", "orca.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
_MOST_LISTED = 3
_MOST_LOOKED_AT = 1000  # entries of a folder

# The formats of other libraries by a file's ending or name.
_OTHER_FORMATS = (
    (".onnx", "an ONNX model"),
    (".engine", "a TensorRT engine"),
    (".plan", "a TensorRT engine"),
    (".mlmodel", "a Core ML model"),
    (".mlpackage", "a Core ML model"),
    (".tflite", "a TensorFlow Lite model"),
    (".task", "a MediaPipe model"),
    (".litertlm", "a LiteRT model"),
    (".npz", "NumPy arrays"),
    (".h5", "weights for TensorFlow"),
    (".keras", "a Keras model"),
    (".msgpack", "weights for Flax as one msgpack file"),
    (".ot", "weights for Rust"),
    ("openvino_model.xml", "an OpenVINO model"),
)
_PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")  # of a model in several files
_NOT_A_MODEL = re.compile(r"mmproj|imatrix")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz", ".zst", ".7z")


def refuse_file(path: Path) -> CheckpointError:
    """Make the error for a file that was named instead of a checkpoint's directory."""
    name, suffix = path.name, path.suffix.lower()
    if suffix in PICKLES:
        return refuse_pickle(path)
    where = shown(path)
    if suffix in _ARCHIVES:
        return NotACheckpoint(
            f"{where} is an archive; unpack it, and name the directory that holds config.json"
        )
    for ending, kind in _OTHER_FORMATS:
        if name.endswith(ending):
            return _refuse_format(where, kind)
    directory = path.parent
    if os.path.exists(directory / "config.json"):
        return NotACheckpoint(f"{where} is a file; name its directory, {shown(directory)}")
    return NotACheckpoint(f"{where} is a file; name the directory that holds config.json")


def refuse_pickle(path: Path) -> UnsafeFile:
    """Make the error for a pickle, with a command that converts it to safetensors."""
    source = shown(path.parent)
    target = f"{source.rstrip('/')}-safetensors"
    return UnsafeFile(
        f"{shown(path)} is a pickle: loading it can run any code, so only safetensors files are read. If you "
        'trust it, transformers writes it as safetensors with save_pretrained: python -c "from transformers '
        f"import AutoModelForCausalLM as M, AutoTokenizer as T; [each.from_pretrained('{source}')"
        f".save_pretrained('{target}') for each in (M, T)]\""
    )


def check_kind(directory: Path) -> None:
    """Raise the error for a directory without config.json, orca.json or Orbax's files."""
    if any(os.path.exists(directory / name) for name in _DESCRIBES_A_MODEL) or has_array_tree(directory):
        return
    names = _names(directory)
    known = _known_kind(directory, names)
    if known is not None:
        raise known
    where = f"{shown(directory)} has no config.json, so it is not a checkpoint's directory"
    inner = _checkpoints_below(directory, names)
    if inner:
        name = "it" if len(inner) == 1 else "one of them"
        raise NotACheckpoint(f"{where}; it holds {_listed([*map(shown, inner)])}: name {name}")
    if not names:
        raise NotACheckpoint(f"{where}; it is empty")
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        raise NotACheckpoint(
            f"{where}; it has weights ({_listed(weights)}): copy config.json and the tokenizer's files from "
            "the model that they belong to"
        )
    if any(name in _TOKENIZER_FILES for name in names):
        raise NotACheckpoint(
            f"{where}; it holds only a tokenizer: name the directory of the model that it belongs to"
        )
    raise NotACheckpoint(f"{where}; it holds {_listed(names)}")


def no_weights(directory: Path) -> CheckpointError:
    """Make the error for a directory with config.json, but neither model.safetensors nor an index."""
    names = _names(directory)
    others = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    known = None if others else _known_kind(directory, names)
    if known is not None:
        return known
    where = f"{shown(directory)} has neither model.safetensors nor model.safetensors.index.json"
    if others:
        return NotACheckpoint(
            f"{where}; it has {_listed(others)}, but no index: copy the index from the model's source"
        )
    return NotACheckpoint(
        f"{where}: the weights are missing. Copy them there, or run with random ones: --load-format dummy"
    )


def _known_kind(directory: Path, names: Sequence[str]) -> CheckpointError | None:
    """Make the error for a directory in the format of another program; None if none is known."""
    where = shown(directory)
    if _ADAPTER in names:
        return _refuse_adapter(directory)
    if len(ggufs := gguf_models(names)) > 1:
        return several_ggufs(where, [files[0] for files in ggufs])
    if "model_index.json" in names:
        return UnsupportedModel(
            f"{where} is a pipeline of diffusers, which makes images; this engine serves language models"
        )
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        return UnsupportedModel(
            f"{where} has consolidated weights and params.json, the format of its publisher's own code; use "
            "the version of the model for transformers, which has config.json and model.safetensors"
        )
    pickles = [name for name in names if Path(name).suffix in PICKLES and name != "training_args.bin"]
    if pickles:
        return refuse_pickle(directory / pickles[0])
    for ending, kind in _OTHER_FORMATS:
        if any(name.endswith(ending) for name in names):
            return _refuse_format(where, kind)
    return None


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a directory that holds the weights of one model in this form, and no others."""
    names = _names(directory)
    others = any(name.endswith(".safetensors") or name == "orca.json" for name in names) or has_array_tree(
        directory
    )
    found = gguf_models(names)
    return directory / found[0][0] if len(found) == 1 and not others else None


def gguf_models(names: Iterable[str]) -> list[list[str]]:
    """The GGUF files of each language model among these names; one in several files is named by its first.

    What a vision model's picture part is called (mmproj), and an importance matrix, is left out.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIX) and not _NOT_A_MODEL.search(name.lower()):
            found.setdefault(_PART.sub(r"\1", name), []).append(name)
    return [*found.values()]


def several_ggufs(where: str, names: Sequence[str]) -> NotACheckpoint:
    """Make the error for a directory or a repository with the GGUF files of several models."""
    return NotACheckpoint(
        f"{where} has {len(names)} GGUF files ({_listed(names)}): name one of them, as in "
        f"DIRECTORY/FILE{SUFFIX}, or for a repository as in NAME:Q4_K_M"
    )


def _refuse_adapter(directory: Path) -> UnsupportedModel:
    base = ""
    try:
        named = read_object(directory / _ADAPTER, _MAX_ADAPTER_BYTES).get("base_model_name_or_path")
    except CheckpointError:
        named = None
    if isinstance(named, str) and named:
        base = f" of {shown(named)}"
    source = shown(directory)
    target = f"{source.rstrip('/')}-merged"
    return UnsupportedModel(
        f"{source} is an adapter (LoRA){base}, not a whole model. Name its model, and give the adapter to "
        f"`orca serve` as --lora NAME={source}. Or merge it into its model with peft: "
        'python -c "from peft import AutoPeftModelForCausalLM as M; '
        f"M.from_pretrained('{source}').merge_and_unload().save_pretrained('{target}')\", and copy the "
        "tokenizer's files there"
    )


def _refuse_format(where: str, kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{where} is {kind}; this engine reads a Hugging Face directory with config.json and safetensors, or "
        "an Orbax checkpoint"
    )


def _checkpoints_below(directory: Path, names: Iterable[str]) -> list[Path]:
    """Find checkpoints in a folder or in the snapshots of the hub's cache, a trainer's last step first."""
    places = [directory / name for name in names]
    snapshots = directory / "snapshots"
    if snapshots.is_dir():
        places = [snapshots / name for name in _names(snapshots)]
    inner = [place for place in places if any(os.path.exists(place / name) for name in _DESCRIBES_A_MODEL)]
    return sorted(inner, key=lambda place: (-_last_number(place.name), place.name))


def _last_number(name: str) -> int:
    numbers = re.findall(r"\d{1,18}", name)
    return int(numbers[-1]) if numbers else -1


def _names(directory: Path) -> list[str]:
    """List a directory's entries, sorted. Raises NotACheckpoint."""
    try:
        return sorted(
            entry.name for entry, _ in zip(os.scandir(directory), range(_MOST_LOOKED_AT), strict=False)
        )
    except OSError as error:
        raise NotACheckpoint(f"{shown(directory)} cannot be read: {error.strerror}") from error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(shown(name) for name in names[:_MOST_LISTED]) + more
