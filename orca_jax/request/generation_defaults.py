"""A checkpoint's recommended sampling parameters and end-of-sequence tokens (generation_config.json)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orca_jax.request.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Defaults for requests; empty if there is no file, or if it is refused.

    `sampling` are fields of SamplingParams. `max_tokens` is for a reply without a requested length. `ignored`
    are names of settings in the file that the engine does not have.
    """

    source: str = ""  # the file
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()

    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that sets none."""
        return SamplingParams(**self._all())

    def __str__(self) -> str:
        """The defaults as text for a banner; empty without a file."""
        if not self.source:
            return ""
        values = [f"{name} {value:g}" for name, value in self._all().items()]
        ignored = f"; not applied: {', '.join(self.ignored)}" if self.ignored else ""
        return f"{', '.join(values) or 'none'} ({self.source}{ignored})"

    def _all(self) -> dict[str, Any]:
        return {**self.sampling, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}


NO_DEFAULTS = GenerationDefaults()
