"""The base of all request models: strict validation."""

from pydantic import BaseModel, ConfigDict, FailFast


class FirstFault(FailFast):
    """Stop validating a list at its first invalid element: a client may send millions."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] (unions need it)
        return 0


class Strict(BaseModel):
    """Rejects unknown fields, values of another type, and numbers that are not finite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
