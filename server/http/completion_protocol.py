"""What POST /v1/completions takes and gives."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from server.http.not_built import NotBuilt
from server.http.protocol import FinishReason, FirstFault, GenerationRequest, Usage

TokenIds = Annotated[list[int], FirstFault()]
Prompt = str | Annotated[list[str], FirstFault()] | TokenIds | Annotated[list[TokenIds], FirstFault()]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Choices stand in the order of the prompts, `n` for each."""

    prompt: Annotated[Prompt, Field(description="a text, texts, token ids, or lists of token ids")]

    echo: Annotated[bool | None, NotBuilt(False)] = None
    logprobs: Annotated[bool | int | None, NotBuilt(False)] = None
    best_of: Annotated[int | None, NotBuilt(1, same_as="n")] = None
    suffix: Annotated[str | None, NotBuilt()] = None
    add_special_tokens: Annotated[bool | None, NotBuilt(True)] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, texts or token ids, as a list of one or more; of none if the client gave none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType] (all its elements are)
        return self.prompt  # pyright: ignore[reportReturnType]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason


class Completion(BaseModel):
    """The answer to POST /v1/completions, where it is not a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Annotated[int, Field(description="in seconds since 1970")]
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
