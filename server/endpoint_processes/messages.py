"""The messages of a line: what the engine's process and an endpoint process tell each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orca_jax.config import ServingConfig
from orca_jax.errors import BadPolicy, EngineError, InvalidRequest, OrcaError, WorkerLost
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.chat.chat_template import Templates
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.output_form import OutputForm
from orca_jax.request.pooling import Pooling
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.admission import CheckedPrompt
from server.gateway.reply.reasoning_format import ReasoningFormat
from server.gateway.tool_formats.tool_format import ToolFormat
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

# From an endpoint process. Each numbers its requests.


class Submit(NamedTuple):
    """A checked request. The engine's process checks it again, and compiles its parameters for itself."""

    number: int
    request_id: str
    owner: str
    prompt: CheckedPrompt
    sampling: SamplingParams
    form: OutputForm


class End(NamedTuple):
    """Asks for the end of a request."""

    number: int
    reason: FinishReason


# A path's template, a method and a status, with the number of requests since the last report.
Counts = Mapping[tuple[str, str, int], int]


class Report(NamedTuple):
    """A report, about once a second: the live requests, and the numbers of those that were answered."""

    n_live: int
    answered: Counts


class Drained(NamedTuple):
    """The process has no more requests; this many had to be ended."""

    n_ended: int


class Seen(NamedTuple):
    """The process follows the status of this number."""

    number: int


# To an endpoint process.


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The first message. The engine's process answers all other routes on the Unix socket `others_at`."""

    options: EndpointOptions
    api_keys: ApiKeys
    others_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The model is loaded; the fields are those of ServedModel and its service."""

    name: str
    config: ModelConfig
    serving: ServingConfig
    tokenizer: Tokenizer | None
    chat_template: Templates | None
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    defaults: GenerationDefaults
    shows_versions: bool
    pooling: Pooling
    created: int


class AdapterFacts(NamedTuple):
    """A LoRA adapter, as in Adapter."""

    name: str
    version: int
    content: str
    directory: str


class Status(NamedTuple):
    """The state of the service, sent when it changes; the fields are those of Service."""

    number: int = 0
    failure: str | None = None
    trouble: str | None = None
    is_paused: bool = False
    is_asleep: bool = False
    expected_wait: float | None = None
    adapters: tuple[AdapterFacts, ...] = ()


class Accepted(NamedTuple):
    """A request waits for its turn, with this seed."""

    number: int
    seed: int


class Refused(NamedTuple):
    """A request was not accepted."""

    number: int
    error: "Failure"


# A request's number, its new tokens, its finish reason if it has ended, and its Facts if there are any. Plain
# tuples for speed, like Delivery.
Entry = tuple[int, Sequence[int], FinishReason | None, Mapping[str, Any] | None]


class Delivered(NamedTuple):
    """The output of an iteration, of all requests of the process."""

    entries: Sequence[Entry]


class Drain(NamedTuple):
    """Ask the process to take no more requests, and to end once the others have, at most `seconds` later."""

    seconds: float


class Failure(NamedTuple):
    """An error as a message, by its class and text: some errors cannot be pickled."""

    kind: type[OrcaError]
    text: str
    param: str | None = None

    @classmethod
    def of(cls, error: OrcaError) -> "Failure":
        if isinstance(error, InvalidRequest):
            return cls(type(error), str(error), error.param)
        made_of_parts = isinstance(error, (WorkerLost, BadPolicy))
        return cls(EngineError if made_of_parts else type(error), str(error))

    def error(self) -> OrcaError:
        """The error again."""
        if self.param is not None and issubclass(self.kind, InvalidRequest):
            return self.kind(self.text, param=self.param)
        return self.kind(self.text)
