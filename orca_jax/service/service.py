"""The service as endpoints need it: it runs in their process (orca.py) or in another one."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from orca_jax.errors import EngineError
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.service.intake import Intake
from orca_jax.service.output import Output, RequestHandle
from orca_jax.service.prepared_params import OutputRules

H = TypeVar("H", bound=RequestHandle)
End = Callable[[FinishReason], object]
Drop = Callable[[], object]


class Service(Intake, ABC):
    """Takes requests, and says how the engine is.

    `on_delivered`, if set, is called with deliveries once they can be read. `max_each` is the most waiting
    requests of one owner.
    """

    on_delivered: Callable[[Sequence[Delivery]], None] | None = None
    max_each: int

    @property
    @abstractmethod
    def failure(self) -> EngineError | None:
        """The engine's permanent failure; None while it works, and after an orderly end."""

    @property
    @abstractmethod
    def trouble(self) -> str | None:
        """The lost stage and how it was lost, while the engine restarts; None while it works."""

    @property
    @abstractmethod
    def is_paused(self) -> bool:
        """Whether requests are accepted and wait."""

    @property
    @abstractmethod
    def is_asleep(self) -> bool:
        """Whether the engine's memory is released, and requests are refused."""

    @property
    @abstractmethod
    def expected_wait(self) -> float | None:
        """The seconds in which the waiting requests will finish at the recent rate; None: not known yet."""

    @abstractmethod
    def check_room(self, n: int, owner: str) -> None:
        """Raise QueueFull if it is certain that not all of `n` more requests of this owner may wait."""

    @abstractmethod
    def submit(
        self,
        prompt: Sequence[int] | CheckedPrompt,
        sampling: SamplingParams | OutputRules,
        *,
        request_id: str,
        owner: str,
        handle: Callable[[Output, End, Drop], H],
    ) -> H:
        """Submit an endpoint's request. Raises as Orca.submit does, if that is known at once."""

    def acceptance(self, request_id: str) -> Awaitable[None] | None:
        """Return what to await, on the event loop, until a request is accepted; None if it is.

        Awaiting it raises as Orca.submit does.
        """
        return None
