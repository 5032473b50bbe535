"""Shared by the routes of this folder: common request fields, and many engine requests for one response."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from server.gateway import gateway as engine
from server.gateway.gateway import LiveRequest, Submission
from server.http.fields.generation import SchedulingFields
from server.http.fields.strict import NotBuilt
from server.http.generation.choices import ClientWatch
from server.http.state import ApiCall


class RelevanceRequest(SchedulingFields):
    """The fields that all routes of this folder accept."""

    model: Annotated[str | None, Field(description="default: the served model")] = None
    user: Annotated[str | None, Field(description="written to the access log")] = None
    truncate_prompt_tokens: Annotated[int | None, NotBuilt(why="the prompt would be whole")] = None


class PromptUsage(BaseModel):
    """Token counts, of a response without generated tokens."""

    prompt_tokens: int
    total_tokens: int


def usage_of(n_input: int) -> dict[str, int]:
    """The counts in the form of PromptUsage."""
    return {"prompt_tokens": n_input, "total_tokens": n_input}


async def all_ended(call: ApiCall, submissions: Sequence[Submission]) -> list[LiveRequest]:
    """Run the requests until all have ended. They are cancelled if the client leaves or one fails.

    Raises QueueFull, NotReady, EngineError, or whatever ended a request before it was complete.
    """
    running: list[LiveRequest] = []
    ended: list[LiveRequest] = []
    watch = ClientWatch(call, call.receive, running)
    try:
        ended = await engine.all_ended(call.gateway, submissions, owner=call.owner, running=running)
    finally:
        call.facts["n_input"] = sum(live.n_input for live in ended)
        call.facts["n_cached"] = sum(live.n_cached for live in ended)
        call.facts["n_output"] = 0
        await watch.close()
    return ended
