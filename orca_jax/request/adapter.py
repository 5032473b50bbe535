"""A LoRA adapter as requests know it: its name, and where the devices have it."""

from dataclasses import dataclass

NOWHERE = -1


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter of the served model.

    `version` counts the adapters of an engine, and `content` is a digest of its arrays: requests share keys
    and values where these are equal, also with other engines and after a restart.
    `slot` is its index in the stacks on the devices, NOWHERE while it is not there; only the scheduler's
    thread reads or changes it.
    """

    name: str
    version: int
    content: str
    directory: str = ""
    slot: int = NOWHERE

    @property
    def salt(self) -> str:
        """The text that keeps its blocks apart in the prefix cache."""
        return f"adapter {self.content}"
