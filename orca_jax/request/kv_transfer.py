"""`kv_transfer_params`: a prompt's keys and values go from the server that computed them to another one.

The fields are those of vLLM and llm-d, whose routers copy them from one server's response into the
request to the other. `remote_request_id` names a lease and is signed, so that a server connects only to
addresses that a server with the same secret has given out.
"""

import hashlib
import hmac
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from struct import pack
from typing import Any, Self

from orca_jax.errors import InvalidSchedulingParameter

_FIELD = "kv_transfer_params"
_MOST_TEXT = 256  # characters
_MOST_BLOCKS = 1 << 20
_SIGNATURE = 32  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferParams:
    """The fields that this server reads or writes; a router's other fields are ignored.

    With `do_remote_decode` the request's prompt is kept for another server; the response has the params for
    that one, with `do_remote_prefill`. `remote_block_ids` counts the prompt's full blocks. `first_token_id`
    is the first output token, if the server that computed the prompt sampled it as the other one would.
    With `offer_early`, an extension, the response begins with the params once the prompt's first chunk is
    issued; the first token then comes with the blocks. `samples_first` is set where each of several outputs
    samples its own first token; it is no field.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str = ""
    remote_request_id: str = ""
    remote_block_ids: tuple[int, ...] = ()
    remote_host: str = ""
    remote_port: int = 0
    first_token_id: int | None = None
    first_token_proof: str = ""
    offer_early: bool = False
    samples_first: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Read a client's fields; null counts as missing. Raises InvalidSchedulingParameter."""
        decode, prefill = _flag(values, "do_remote_decode"), _flag(values, "do_remote_prefill")
        if decode and prefill:
            raise _wrong("do_remote_decode", True, "given without do_remote_prefill, or the other way round")
        return cls(
            do_remote_decode=decode,
            do_remote_prefill=prefill,
            remote_engine_id=_text(values, "remote_engine_id"),
            remote_request_id=_text(values, "remote_request_id"),
            remote_block_ids=_block_ids(values.get("remote_block_ids")),
            remote_host=_text(values, "remote_host"),
            remote_port=_port(values.get("remote_port")),
            first_token_id=_token_id(values.get("first_token_id")),
            first_token_proof=_text(values, "first_token_proof"),
            offer_early=decode and _flag(values, "offer_early"),
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields in a response, in vLLM's order, and then our own."""
        first = {"first_token_id": self.first_token_id, "first_token_proof": self.first_token_proof}
        return {
            "do_remote_prefill": self.do_remote_prefill,
            "do_remote_decode": self.do_remote_decode,
            "remote_block_ids": [*self.remote_block_ids],
            "remote_engine_id": self.remote_engine_id,
            "remote_request_id": self.remote_request_id,
            "remote_host": self.remote_host,
            "remote_port": self.remote_port,
            "tp_size": 1,  # a block travels whole, however many devices share its heads
            **({} if self.first_token_id is None else first),
        }


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """Facts on which both servers of a transfer agree, and which they never send.

    `fingerprint` says what the bytes of a block depend on besides the tokens; `secret` is the control secret.
    """

    fingerprint: str
    secret: str

    def new_lease(self, *, engine_id: str, host: str, port: int, n_blocks: int) -> KVTransferParams:
        """Params for the server that is to fetch `n_blocks` blocks; nobody can guess their lease."""
        token = secrets.token_urlsafe(24)
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=engine_id,
            remote_request_id=f"{token}.{self._signature(token, host, port, n_blocks)}",
            remote_block_ids=tuple(range(n_blocks)),
            remote_host=host,
            remote_port=port,
        )

    def trusts(self, params: KVTransferParams) -> bool:
        """Whether a server with the same secret wrote these params.

        Without a secret anybody can write them, so that only addresses of this machine are trusted.
        """
        if not params.do_remote_prefill or not params.remote_port:
            return False
        if not self.secret and not is_local(params.remote_host):
            return False
        token, _, signature = params.remote_request_id.rpartition(".")
        right = self._signature(token, params.remote_host, params.remote_port, len(params.remote_block_ids))
        return hmac.compare_digest(signature.encode("utf-8", "replace"), right.encode())

    def with_first_token(
        self, params: KVTransferParams, token_id: int, prompt_ids: Sequence[int], salt: Sequence[str]
    ) -> KVTransferParams:
        """Params that say the first output token after a prompt as well."""
        proof = self._first_proof(params.remote_request_id, token_id, prompt_ids, salt)
        return replace(params, first_token_id=token_id, first_token_proof=proof)

    def first_token(
        self, params: KVTransferParams, prompt_ids: Sequence[int], salt: Sequence[str]
    ) -> int | None:
        """The first output token after a prompt, if a server with the same facts has said it; else None."""
        token_id = params.first_token_id
        if token_id is None or not self.trusts(params):
            return None
        right = self._first_proof(params.remote_request_id, token_id, prompt_ids, salt)
        given = params.first_token_proof.encode("utf-8", "replace")
        return token_id if hmac.compare_digest(given, right.encode()) else None

    def digest(self, prompt_ids: Sequence[int], salt: Sequence[str]) -> bytes:
        """The digest of everything that these tokens' keys and values depend on, and of their owner."""
        found = hashlib.sha256(b"orca_jax transfer")
        for part in (self.fingerprint, *salt):
            encoded = part.encode("utf-8", "surrogatepass")
            found.update(len(encoded).to_bytes(8, "little") + encoded)
        found.update(pack(f"<{len(prompt_ids)}i", *prompt_ids))
        return found.digest()

    def proof(self, *parts: bytes) -> bytes:
        """The proof of knowing the secret, for fresh `parts`."""
        return hmac.digest(self.secret.encode(), b"".join(parts), "sha256")

    def _first_proof(self, lease: str, token_id: int, prompt_ids: Sequence[int], salt: Sequence[str]) -> str:
        said = f"first token {token_id} of {lease} ".encode("utf-8", "surrogatepass")
        return hmac.new(self.secret.encode(), said + self.digest(prompt_ids, salt), "sha256").hexdigest()

    def _signature(self, token: str, host: str, port: int, n_blocks: int) -> str:
        signed = f"lease {token} {host} {port} {n_blocks}".encode("utf-8", "surrogatepass")
        return hmac.new(self.secret.encode(), signed, "sha256").hexdigest()[:_SIGNATURE]


def is_local(host: str) -> bool:
    """Whether only this machine can be reached by this host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= _MOST_TEXT):
        raise _wrong(name, value, f"a text of at most {_MOST_TEXT} characters")
    return value or ""


def _port(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 16:
        return value
    raise _wrong("remote_port", value, "a whole number from 1 to 65535")


def _token_id(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31):
        return value
    raise _wrong("first_token_id", value, "a token id")


def _block_ids(value: Any) -> tuple[int, ...]:
    """A list of block ids; newer versions of vLLM put it into a list, with one for each kind of cache."""
    if value is None:
        return ()
    allowed = f"a list of at most {_MOST_BLOCKS} whole numbers, or a list of such lists"
    ids = value[0] if isinstance(value, list) and value and isinstance(value[0], list) else value
    if not isinstance(ids, list) or len(ids) > _MOST_BLOCKS:
        raise _wrong("remote_block_ids", value, allowed)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise _wrong("remote_block_ids", value, allowed)
    return tuple(ids)


def _wrong(name: str, value: object, allowed: str) -> InvalidSchedulingParameter:
    message = f"{_FIELD}.{name} is {reprlib.repr(value)}; it must be {allowed}, or be left out"
    return InvalidSchedulingParameter(message, param=f"{_FIELD}.{name}")
