"""How strictly requests are read: the base of all their models."""

from pydantic import BaseModel, ConfigDict, FailFast


class FirstFault(FailFast):
    """A list is read up to its first fault: a client may send millions."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] (a union needs it)
        return 0


class Strict(BaseModel):
    """No field that is not known, no value of another type, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
