"""Reads the control plane's secret, which only the server and its workers know."""

from collections.abc import Mapping
from pathlib import Path

from orca_jax.errors import ConfigError
from orca_jax.small_files import read_text

VARIABLE = "ORCA_CONTROL_SECRET"

_MAX_FILE_BYTES = 10_000
_MIN_LENGTH = 16


def read_secret(path: Path | None, environ: Mapping[str, str]) -> str:
    """The secret from the file if there is one, else from ORCA_CONTROL_SECRET, stripped; "" if not set.

    Raises ConfigError, which never shows the secret, if it is too short or the file cannot be read.
    """
    if path is not None:
        try:
            text, source = read_text(path, _MAX_FILE_BYTES), str(path)
        except ValueError as error:
            raise ConfigError(f"the control secret: {error}") from error
    else:
        text, source = environ.get(VARIABLE, ""), VARIABLE
        if not text:
            return ""
    secret = text.strip()
    if len(secret) < _MIN_LENGTH:
        raise ConfigError(
            f"{source} holds a control secret of {len(secret)} characters; it needs at least {_MIN_LENGTH}"
        )
    return secret
