"""The objects that the Responses API returns, for the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class InputTokensDetails(BaseModel):
    """Of the input's tokens, those whose keys and values were in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Of the output's tokens, those that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. Besides these fields it has those of the request."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="in seconds since 1970")]
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    incomplete_details: dict[str, Any] | None
    error: dict[str, Any] | None
    model: str
    output: Annotated[
        list[dict[str, Any]], Field(description="items of type message, reasoning or function_call")
    ]
    previous_response_id: str | None
    store: Annotated[bool, Field(description="whether it can be retrieved and continued")]
    usage: ResponseUsage | None


class ResponseItems(BaseModel):
    """Items of a stored response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
