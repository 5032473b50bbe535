"""The model that the endpoints serve: all they need to know of an engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orca_jax.config import ServingConfig
from orca_jax.errors import InvalidPrompt, PromptTooLong
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.orca import Orca
from server.gateway.chat_template import ChatTemplate


class CompileCounts(Protocol):
    """What JAX has compiled in the server's process, all counts from the start."""

    @property
    def programs(self) -> int:
        """Programs, those that were read from disk included."""
        ...

    @property
    def from_disk(self) -> int:
        """Those that were."""
        ...

    @property
    def seconds(self) -> float:
        """Of all, added up over threads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A running service with its tokenizer and the name that clients call it by.

    Without a tokenizer prompts are token ids, and texts come out empty. `created` is in seconds since 1970.
    """

    name: str
    service: Orca
    config: ModelConfig
    serving: ServingConfig
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    compiles: Callable[[], CompileCounts] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def require_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; raises InvalidPrompt, which names the field `param`, where the model has none."""
        if self.tokenizer is None:
            message = f"{self.name} has no tokenizer, so {param} must be token ids"
            raise InvalidPrompt(message, param=param)
        return self.tokenizer

    def encode(self, text: str, *, param: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; a text that must have too many is refused before the work is done.

        Raises InvalidPrompt and PromptTooLong.
        """
        tokenizer = self.require_tokenizer(param)
        most = self.config.n_positions * tokenizer.max_token_length
        if len(text) > most:
            message = f"{param} has {len(text)} characters, which are more than the model's "
            message += f"{self.config.n_positions} positions can hold; shorten it"
            raise PromptTooLong(message, param=param)
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InvalidPrompt as error:
            raise InvalidPrompt(str(error), param=param) from error
