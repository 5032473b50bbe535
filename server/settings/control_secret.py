"""The control plane's secret: what the server and all workers know, and nobody else may."""

from collections.abc import Mapping
from pathlib import Path

from orca_jax.errors import ConfigError
from server.settings.small_files import read_text

VARIABLE = "ORCA_CONTROL_SECRET"

_MAX_FILE_BYTES = 10_000
_MIN_LENGTH = 16


def read_secret(path: Path | None, environ: Mapping[str, str]) -> str:
    """The secret of a file, else that of ORCA_CONTROL_SECRET, without space around it; "" for none.

    Raises ConfigError, which never shows it, for one that is too short to be one.
    """
    if path is not None:
        try:
            found, where = read_text(path, _MAX_FILE_BYTES), str(path)
        except ValueError as error:
            raise ConfigError(f"the control secret: {error}") from error
    else:
        found, where = environ.get(VARIABLE, ""), VARIABLE
        if not found:
            return ""
    secret = found.strip()
    if len(secret) < _MIN_LENGTH:
        raise ConfigError(
            f"{where} holds a control secret of {len(secret)} characters; it must have {_MIN_LENGTH} at least"
        )
    return secret
