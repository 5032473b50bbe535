"""The model that the endpoints serve, with everything they need from its engine."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from orca_jax.config import ServingConfig
from orca_jax.errors import InvalidPrompt, InvalidRequest, NotSupported, PromptTooLong
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.chat.chat_template import ChatTemplate, Templates
from orca_jax.request.generation_defaults import NO_DEFAULTS, GenerationDefaults
from orca_jax.request.routed_experts import Routing
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.engine_controls import EngineControls
from orca_jax.service.orca import Orca
from orca_jax.service.service import Service
from server.gateway.reply.reasoning_format import ReasoningFormat
from server.gateway.tool_formats.tool_format import ToolFormat

MOST_ROUTED_BYTES = 16 << 20  # of a response's routed experts; base64 makes them a third larger


class CompileCounts(Protocol):
    """Counts of what JAX has compiled in the server's process since it started."""

    @property
    def programs(self) -> int:
        """Programs compiled or read from the disk cache."""
        ...

    @property
    def from_disk(self) -> int:
        """Programs read from the disk cache."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent compiling or reading programs, summed over threads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A running service, its tokenizer, and the name that clients use for the model.

    `defaults` apply to requests that leave a parameter out. Without a tokenizer prompts must be token ids,
    and output text is empty. With `controls` an operator may replace the weights, and with `shows_versions`
    responses have their version. `created` is in seconds since 1970. `tool_format` and `reasoning_format` are
    the formats of tool calls and reasoning in chat replies, None to treat them as text. With an `adapter` it
    is the model that this LoRA adapter makes of its `parent`.
    """

    name: str
    service: Service
    config: ModelConfig
    serving: ServingConfig
    tokenizer: Tokenizer | None = None
    chat_template: Templates | None = None
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    defaults: GenerationDefaults = NO_DEFAULTS
    compiles: Callable[[], CompileCounts] | None = None
    controls: EngineControls | None = None
    shows_versions: bool = False
    adapter: str | None = None
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def orca(self) -> Orca:
        """The service as those see it who watch its engine, all in the engine's process."""
        assert isinstance(self.service, Orca)
        return self.service

    def adapted(self) -> "list[ServedModel]":
        """The models that the engine's LoRA adapters make of this one."""
        return [self.with_adapter(name) for name in self.service.adapters]

    def with_adapter(self, name: str) -> "ServedModel":
        """The model that the LoRA adapter of this name makes of this one."""
        return replace(self, name=name, adapter=name, parent=self.name)

    def scheduled(self, scheduling: SchedulingParams) -> SchedulingParams:
        """The scheduling parameters of a request for this model."""
        return scheduling if self.adapter is None else replace(scheduling, adapter=self.adapter)

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt, in which case the output does not continue the prompt."""
        return self.config.encoder is not None

    @property
    def can_chat(self) -> bool:
        """Whether the model can read a conversation."""
        reads = not self.has_encoder and not self.config.only_pools
        return reads and self.chat_template is not None and self.tokenizer is not None

    def require_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises InvalidPrompt for the field `param` if the model has none."""
        if self.tokenizer is None:
            message = f"{self.name} has no tokenizer, so {param} must be token ids"
            raise InvalidPrompt(message, param=param)
        return self.tokenizer

    def encode(self, text: str, *, param: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A text that is certainly too long is rejected before it is tokenized.

        Raises InvalidPrompt and PromptTooLong.
        """
        tokenizer = self._tokenizer_for(text, param)
        with _naming(param):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str, *, param: str) -> list[int]:
        """Token ids of two texts that a ranker compares. Raises InvalidPrompt and PromptTooLong."""
        tokenizer = self._tokenizer_for(first + second, param)
        with _naming(param):
            return tokenizer.encode_pair(first, second)

    def encode_template(self, template: str, texts: Mapping[str, str], *, param: str) -> list[int]:
        """`Tokenizer.encode_template`. Raises InvalidPrompt and PromptTooLong."""
        tokenizer = self._tokenizer_for("".join([template, *texts.values()]), param)
        with _naming(param):
            return tokenizer.encode_template(template, texts)

    def _tokenizer_for(self, text: str, param: str) -> Tokenizer:
        """The tokenizer, unless `text` is certainly too long. Raises PromptTooLong, or NotSupported."""
        tokenizer = self.require_tokenizer(param)
        encoder = self.config.encoder
        n_positions = max(self.config.n_positions, 0 if encoder is None else encoder.n_positions)
        if len(text) > n_positions * tokenizer.max_token_length:
            message = f"{param} has {len(text)} characters, which are more than the model's "
            message += f"{n_positions} positions can hold; shorten it"
            raise PromptTooLong(message, param=param)
        return tokenizer

    def check_routed(self, prompts: Sequence[CheckedPrompt], sampling: SamplingParams) -> None:
        """Raise InvalidRequest if the experts of all choices' tokens are too much for one response."""
        if not sampling.return_routed_experts:
            return
        n_tokens = sum(prompt.n_input + prompt.n_output - 1 for prompt in prompts) * sampling.n
        most = MOST_ROUTED_BYTES // Routing(*self.config.expert_routing).token_bytes
        if n_tokens > most:
            message = (
                f"return_routed_experts for up to {n_tokens} tokens is too much: an answer may have those of "
                f"{most} tokens, prompts and outputs of all choices together; ask for fewer max_tokens"
            )
            raise InvalidRequest(message, param="return_routed_experts")


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Let an InvalidPrompt name the field `param`."""
    try:
        yield
    except InvalidPrompt as error:
        raise InvalidPrompt(str(error), param=param) from error


def template_for(model: ServedModel, name: str | None, *, has_tools: bool) -> ChatTemplate:
    """The chat template called `name`, or else the one that the model uses.

    Raises NotSupported if the model reads no conversations, or if there are tools and the template shows
    none; UnknownTemplate if there is no template of that name.
    """
    if model.tokenizer is None:
        message = f"{model.name} has no tokenizer, so it reads no messages; give token ids to /v1/completions"
        raise NotSupported(message, param="messages")
    if model.chat_template is None:
        message = f"{model.name} has no chat template; use /v1/completions, or start the server with "
        raise NotSupported(f"{message}--chat-template FILE", param="messages")
    template = model.chat_template.choose(name, has_tools=has_tools)
    if has_tools and not template.reads("tools"):
        message = "the model's chat template does not show tools to the model; leave tools out, or set "
        raise NotSupported(message + 'tool_choice to "none"', param="tools")
    return template
