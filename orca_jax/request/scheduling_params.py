"""The scheduling parameters of a request: its priority, and who shares its cached blocks."""

# Users' values are checked at run time too, whatever the annotations promise.
# pyright: reportUnnecessaryIsInstance=false

import reprlib
from dataclasses import dataclass

from orca_jax.errors import InvalidSchedulingParameter, UnknownAdapter
from orca_jax.request.kv_transfer import KVTransferParams

PRIORITY_RANGE = (-(1 << 31), (1 << 31) - 1)
MAX_CACHE_SALT = 512  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingParams:
    """Checked when made; raises InvalidSchedulingParameter, which names the field.

    A request with a lower `priority` goes first, if the engine's scheduling policy is "priority". A request
    reuses only keys and values of requests with the same `cache_salt` (1 to 512 characters, or None). Without
    the salt, nobody can find out from the time to the first token whether a prompt was sent before.
    `adapter` names the LoRA adapter that changes its model; None for the model itself. With `kv_transfer`
    another server computes the prompt, or the output after the first token (docs/separation.md).
    """

    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    kv_transfer: KVTransferParams | None = None

    def __post_init__(self) -> None:
        low, high = PRIORITY_RANGE
        priority, salt = self.priority, self.cache_salt
        if not isinstance(priority, int) or isinstance(priority, bool) or not low <= priority <= high:
            message = f"priority is {reprlib.repr(priority)}; it must be a whole number from {low} to {high}"
            raise InvalidSchedulingParameter(message, param="priority")
        if not isinstance(self.adapter, str | None):
            message = (
                f"adapter is {reprlib.repr(self.adapter)}; it must be the name of an adapter, or left out"
            )
            raise UnknownAdapter(message, param="adapter")
        if salt is None:
            return
        if not isinstance(salt, str):
            message = f"cache_salt is {reprlib.repr(salt)}; it must be a text, or left out"
            raise InvalidSchedulingParameter(message, param="cache_salt")
        if not 1 <= len(salt) <= MAX_CACHE_SALT:  # a message must not show it: it is a secret
            message = f"cache_salt has {len(salt)} characters; it must have 1 to {MAX_CACHE_SALT}"
            raise InvalidSchedulingParameter(f"{message}, or be left out", param="cache_salt")

    def check_policy(self, policy: str) -> None:
        """Raise InvalidSchedulingParameter for a priority that the engine's scheduling policy ignores."""
        if self.priority and policy != "priority":
            message = f"priority is {self.priority}, but the engine's scheduling policy is {policy!r}; "
            message += "leave priority out, or start the engine with scheduling_policy 'priority'"
            raise InvalidSchedulingParameter(message, param="priority")


PLAIN = SchedulingParams()  # the defaults
