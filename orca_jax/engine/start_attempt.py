"""An attempt of the engine master to start an epoch on all workers."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StartAttempt:
    """When to send START again, which stages are ready, and when to give up. Times are the master's clock's.

    Each move of a worker puts the deadline off, never beyond `latest`.
    """

    deadline: float
    latest: float
    ask_at: float
    suspect_at: float  # when to report the stages that are not ready as suspects
    ready: set[int] = field(default_factory=set[int])
    addresses: tuple[str, ...] = ()  # of the workers that were last asked; none: nobody was
