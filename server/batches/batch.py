"""A batch: its request, its progress and its end, with its form in OpenAI's API."""

import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))
WINDOW = "24h"  # OpenAI's only completion window
_WINDOW_SECONDS = 24 * 3600


@dataclass(slots=True)
class Batch:
    """A batch of the API key with the fingerprint `tenant`; its requests use the queue share of `owner`.

    `times` says when it reached each status, in seconds since 1970. `errors` say why it failed.
    """

    id: str
    tenant: str
    owner: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict[str, int])
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def n_done(self) -> int:
        """Lines with a result."""
        return self.completed + self.failed

    def become(self, status: Status) -> None:
        """Change the status, and note the time."""
        self.status = status
        self.times[status] = int(time.time())

    def become_like(self, other: "Batch") -> None:
        """Copy all values; the status last, for readers on other threads."""
        for name, value in asdict(other).items():
            if name != "status":
                setattr(self, name, value)
        self.status = other.status

    def shown(self) -> dict[str, Any]:
        """The batch in OpenAI's form."""
        ends = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{end}_at": self.times.get(end) for end in ends},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def new_batch(
    *, tenant: str, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None
) -> Batch:
    """A batch that begins now."""
    now = int(time.time())
    return Batch(
        id=f"batch_{uuid.uuid4().hex}",
        tenant=tenant,
        owner=owner,
        endpoint=endpoint,
        input_file_id=input_file_id,
        metadata=metadata,
        created_at=now,
        expires_at=now + _WINDOW_SECONDS,
    )
