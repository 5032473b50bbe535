"""API keys: who may send requests. Kept as digests alone, so that nothing can show one."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from orca_jax.errors import ConfigError
from server.errors import Unauthorized
from server.settings.small_files import read_text

VARIABLE = "ORCA_API_KEYS"

_MAX_FILE_BYTES = 1_000_000
_MAX_KEYS = 1024  # each request's key is compared with every one
_MIN_LENGTH = 8
_KEY = re.compile(rf"[!-~]{{{_MIN_LENGTH},}}")  # printable ASCII without a space: what a header can carry


class ApiKeys:
    """The keys of a server; without one it is open to everyone. `notes` are for the one who starts it."""

    def __init__(self, keys: Iterable[str] = (), *, notes: Iterable[str] = ()) -> None:
        self._digests = tuple(dict.fromkeys(map(_digest, keys)))
        self.notes = tuple(notes)

    @classmethod
    def read(cls, path: Path | None, environ: Mapping[str, str]) -> "ApiKeys":
        """The keys of a file, one a line, and those of ORCA_API_KEYS, with commas or newlines between.

        Blank lines of the file, and those that begin with `#`, are passed over. An empty variable counts as
        not set. Raises ConfigError, which never shows a key: for a key that is too short or has other than
        printable ASCII, and where a file or variable has none, for the server would be open to everyone.
        """
        keys = list[str]()
        notes = list[str]()
        if path is not None:
            try:
                lines = read_text(path, _MAX_FILE_BYTES).splitlines()
                readable_by_others = path.stat().st_mode & 0o077 != 0
            except (OSError, ValueError) as error:
                raise ConfigError(f"the API keys: {error}") from error
            entries = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]
            keys += _checked(str(path), [each for each in entries if not each[1].lstrip().startswith("#")])
            if readable_by_others:
                notes.append(f"{path} holds API keys and others can read it; chmod 600 {path}")
        given = environ.get(VARIABLE)
        if given:
            parts = re.split(r"[,\r\n]", given)
            keys += _checked(VARIABLE, [(f"{VARIABLE}, key {n}", part) for n, part in enumerate(parts, 1)])
        elif given is not None:
            notes.append(f"{VARIABLE} is empty and counts as not set")
        if len(set(keys)) > _MAX_KEYS:
            raise ConfigError(f"there are {len(set(keys))} API keys; at most {_MAX_KEYS} are taken")
        return cls(keys, notes=notes)

    @property
    def required(self) -> bool:
        """Must a request bring a key?"""
        return bool(self._digests)

    def __bool__(self) -> bool:
        return self.required

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._digests)})"

    def check(self, authorization: str | None) -> str | None:
        """Pass a request with this `Authorization` header; raises Unauthorized.

        The name of its key, which does not tell the key; None where none is needed.
        """
        if not self.required:
            return None
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed here; send the header 'Authorization: Bearer KEY'")
        given = _digest(key.strip())
        # All of them are looked at: the time must not tell which one is near.
        known = [i for i, digest in enumerate(self._digests) if hmac.compare_digest(given, digest)]
        if not known:
            raise Unauthorized("this API key is not known here; check the header 'Authorization: Bearer KEY'")
        return f"key {known[0] + 1}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _checked(origin: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    """The keys among `entries`, each with where it stands; blank ones are passed over."""
    keys = list[str]()
    for where, entry in entries:
        key = entry.strip(" \t\r\n")
        if not key:
            continue
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: an API key must have at least {_MIN_LENGTH} characters, all of them printable "
                "ASCII and none a space"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{origin} has no API key, which would let everyone in; add one, or leave it out")
    return keys
