"""The pooling that a checkpoint of Sentence Transformers names in `1_Pooling/config.json`."""

from pathlib import Path

from orca_jax.errors import UnsupportedModel
from orca_jax.families.hf_config import POOLING_FILE
from orca_jax.families.strict_json import read_object, shown
from orca_jax.request.pooling import Pooling

_DENSE = "2_Dense"  # a layer that changes the pooled vector
_MAX_BYTES = 100_000
_OR = ", or the option pooling sets another"
_PREFIX = "pooling_mode_"
_MODES: dict[str, Pooling] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_NAMED: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


def stored_pooling(directory: Path, *, instead: Pooling | None = None) -> Pooling | None:
    """The pooling of the checkpoint in `directory`, or the one `instead` of it; None if there is neither.

    Raises UnsupportedModel for another pooling, and for a layer after it; CorruptFile for a damaged file.
    """
    path = directory / POOLING_FILE
    if not path.exists():
        return instead
    if (directory / _DENSE).exists():
        raise UnsupportedModel(
            f"{shown(directory)} has {_DENSE}, a layer after the pooling, which is not supported: embeddings "
            "would not be those of Sentence Transformers; remove it if you want those before the layer"
        )
    if instead is not None:
        return instead
    values = read_object(path, _MAX_BYTES)
    named = values.get("pooling_mode")  # in newer files; older ones have a flag for each pooling
    if named is not None:
        if not isinstance(named, str) or named not in _NAMED:
            raise UnsupportedModel(
                f"{shown(path)}: pooling_mode is {shown(named)}; it must be one of {', '.join(_NAMED)}{_OR}"
            )
        return _NAMED[named]
    modes = [name.removeprefix(_PREFIX) for name, value in values.items() if value is True]
    modes = [name for name in modes if f"{_PREFIX}{name}" in values]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{shown(path)}: the pooling is {', '.join(modes) or 'none'}; it must be one of "
            f"{', '.join(_MODES)}{_OR}"
        )
    return _MODES[modes[0]]
