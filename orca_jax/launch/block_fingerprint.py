"""The fingerprint of an engine's blocks: what their bytes depend on besides the tokens."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.control.handshake import model_digest
from orca_jax.errors import ConfigError
from orca_jax.model_files.found_model import FoundModel


def block_fingerprint(
    found: FoundModel,
    config: EngineConfig,
    dtype: str,
    kinds: Sequence[object],
    of_files: Callable[[Sequence[Path]], object],
    *,
    version: int,
    refusal: str,
) -> str:
    """A text that differs wherever the bytes of a block differ. `kinds` are those of the blocks' arrays.

    Weights count by what `of_files` says of their files, and random ones by their seed. `version` is that of
    the form in which blocks are kept or sent. Raises ConfigError with the text `refusal` for other weights
    without files.
    """
    if config.load_format == "dummy":
        weights: object = config.seed or 0
    elif found.directory is None or found.user_model is not None:
        raise ConfigError(refusal)
    else:
        place = found.directory
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        weights = of_files(files)
    facts = {
        "format": version,
        "model": model_digest(found.config),
        "weights": weights,
        "quantization": config.quantization,
        "dtype": dtype,
        "block_size": config.block_size,
        "kinds": [str(kind) for kind in kinds],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
