"""API keys, which say who may send requests. Only their digests are stored, so no log can show a key."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from orca_jax.errors import ConfigError
from orca_jax.small_files import read_text
from server.errors import Unauthorized

VARIABLE = "ORCA_API_KEYS"
ADMIN_VARIABLE = "ORCA_ADMIN_KEYS"

_MAX_FILE_BYTES = 1_000_000
_MAX_KEYS = 1024  # each request's key is compared with all of them
_MIN_LENGTH = 8
_KEY = re.compile(rf"[!-~]{{{_MIN_LENGTH},}}")  # what a header can carry: printable ASCII without spaces
_WEIGHT = re.compile(r"[ \t]+weight=(\S*)$")
_WEIGHTS = (0.001, 1000.0)
_BEARER = "Authorization: Bearer KEY"


class ApiKeys:
    """The keys of a server; without any, the server is open to everyone. `notes` are warnings to print.

    `weights` has a key's share under the scheduling policy "fair", by the key's name; other keys have 1.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        *,
        weights: Mapping[str, float] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self._digests = tuple(dict.fromkeys(map(_digest, keys)))
        self.weights = {
            _name(self._digests.index(_digest(key))): weight for key, weight in (weights or {}).items()
        }
        self.notes = tuple(notes)

    @classmethod
    def read(cls, path: Path | None, environ: Mapping[str, str], variable: str = VARIABLE) -> "ApiKeys":
        """Read keys from a file, one per line, and from `variable`, separated by commas or newlines.

        Blank lines and lines that begin with `#` are ignored. A key may be followed by a space and
        `weight=NUMBER`. An empty variable counts as not set. Raises ConfigError, which never shows a key, if
        a key is too short or is not printable ASCII, for a wrong weight, or if the file or the variable has
        no key: an empty file must not open the server to everyone.
        """
        keys = list[str]()
        weights = dict[str, float]()
        notes = list[str]()
        if path is not None:
            try:
                lines = read_text(path, _MAX_FILE_BYTES).splitlines()
                readable_by_others = path.stat().st_mode & 0o077 != 0
            except (OSError, ValueError) as error:
                raise ConfigError(f"the API keys: {error}") from error
            entries = [
                (f"{path}, line {number}", line)
                for number, line in enumerate(lines, 1)
                if not line.lstrip().startswith("#")
            ]
            keys += _checked(str(path), entries, weights)
            if readable_by_others:
                notes.append(f"{path} holds API keys and others can read it; chmod 600 {path}")
        text = environ.get(variable)
        if text:
            parts = re.split(r"[,\r\n]", text)
            keys += _checked(
                variable, [(f"{variable}, key {n}", part) for n, part in enumerate(parts, 1)], weights
            )
        elif text is not None:
            notes.append(f"{variable} is empty and counts as not set")
        if len(set(keys)) > _MAX_KEYS:
            raise ConfigError(f"there are {len(set(keys))} API keys; at most {_MAX_KEYS} are allowed")
        return cls(keys, weights=weights, notes=notes)

    @property
    def required(self) -> bool:
        return bool(self._digests)

    @property
    def n_keys(self) -> int:
        return len(self._digests)

    def fingerprint(self, name: str) -> str:
        """An identifier of the key with this name that later runs share; "" for no key."""
        if not name:
            return ""
        digest = next(digest for i, digest in enumerate(self._digests) if _name(i) == name)
        return hashlib.sha256(b"fingerprint " + digest).hexdigest()[:32]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each key, by the key's name."""
        return {name: self.fingerprint(name) for name in map(_name, range(self.n_keys))}

    def name_of(self, fingerprint: str) -> str | None:
        """The name of the key with this fingerprint, "" if it stands for no key; None for an unknown one."""
        names = ["" if not self.required else None, *map(_name, range(self.n_keys))]
        return next(
            (name for name in names if name is not None and self.fingerprint(name) == fingerprint), None
        )

    def __bool__(self) -> bool:
        return self.required

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._digests)})"

    def check(self, authorization: str | None) -> str | None:
        """The name of the key in an `Authorization` header, such as `key 1`; None if no key is needed.

        Raises Unauthorized.
        """
        if not self.required:
            return None
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(f"an API key is required; send the header '{_BEARER}'")
        return self.check_key(key, _BEARER)

    def check_key(self, key: str, header: str) -> str | None:
        """The name of a key that came in `header`, such as `x-api-key: KEY`; None if no key is needed.

        Raises Unauthorized.
        """
        if not self.required:
            return None
        given = _digest(key.strip())
        # Compares with every key: the time must not reveal which one is close.
        matches = [i for i, digest in enumerate(self._digests) if hmac.compare_digest(given, digest)]
        if not matches:
            raise Unauthorized(f"unknown API key; check the header '{header}'")
        return _name(matches[0])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _name(index: int) -> str:
    return f"key {index + 1}"


def _checked(source: str, entries: Iterable[tuple[str, str]], weights: dict[str, float]) -> list[str]:
    """The keys of `entries`, which are (place, text); blank ones are ignored. Adds to the weights by key."""
    keys = list[str]()
    for where, entry in entries:
        key = entry.strip(" \t\r\n")
        if not key:
            continue
        weight = _WEIGHT.search(key)
        key = _WEIGHT.sub("", key)
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: an API key must have at least {_MIN_LENGTH} characters, all printable ASCII "
                "without spaces"
            )
        if weight is not None:
            weights[key] = _checked_weight(where, weight[1])
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} has no API key, which would let everyone in; add one, or leave it out")
    return keys


def _checked_weight(where: str, text: str) -> float:
    low, high = _WEIGHTS
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not low <= weight <= high:
        raise ConfigError(f"{where}: what follows weight= must be a number from {low:g} to {high:g}")
    return weight


SECRET_VARIABLE = "ORCA_CONTROL_SECRET"

_MAX_SECRET_BYTES = 10_000
_LEAST_SECRET = 16


def read_secret(path: Path | None, environ: Mapping[str, str]) -> str:
    """The secret from the file if there is one, else from ORCA_CONTROL_SECRET, stripped; "" if not set.

    Raises ConfigError, which never shows the secret, if it is too short or the file cannot be read.
    """
    if path is not None:
        try:
            text, source = read_text(path, _MAX_SECRET_BYTES), str(path)
        except ValueError as error:
            raise ConfigError(f"the control secret: {error}") from error
    else:
        text, source = environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
        if not text:
            return ""
    secret = text.strip()
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"{source} holds a control secret of {len(secret)} characters; it needs at least {_LEAST_SECRET}"
        )
    return secret
