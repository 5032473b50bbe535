"""OpenAI's lists of files, batches and items, a page at a time."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel

from orca_jax.errors import InvalidRequest
from server.http.bodies.json_text import as_json

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(description="the last id of the previous page", max_length=256)]
Order = Annotated[Literal["asc", "desc"], Query(description="by time of creation")]


class ListPage(BaseModel):
    """The fields of a page besides its `data`."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(
    entries: Sequence[T], after: str | None, limit: int, id_of: Callable[[T], str]
) -> tuple[list[T], bool]:
    """Up to `limit` entries after the one with the id `after`, and whether there are more.

    Raises InvalidRequest if no entry has that id.
    """
    first = 0
    if after is not None:
        first = next((i for i, entry in enumerate(entries, 1) if id_of(entry) == after), 0)
        if not first:
            raise InvalidRequest(f"after is {after[:100]!r}; nothing in the list has that id", param="after")
    return list(entries[first : first + limit]), first + limit < len(entries)


def listing(data: Sequence[dict[str, Any]], has_more: bool, n_characters: int = 0) -> bytes:
    """A page as JSON, of about `n_characters` if it is long.

    Each entry is encoded by itself, so that no call holds the GIL for long.
    """
    ids = [one["id"] for one in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": has_more}
    entries = ",".join([as_json(one, n_characters, ascii=False) for one in data])
    return f'{{"object":"list","data":[{entries}],{as_json(ends)[1:]}'.encode()
