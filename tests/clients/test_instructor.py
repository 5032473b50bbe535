"""instructor: objects of pydantic's classes, by a forced tool call or a JSON schema, whole and streamed."""

from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def client(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60), mode=mode
    )


FIELDS: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Rome?"}],
    "max_tokens": 150,
    "max_retries": 0,
    "seed": 2,
}


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_reply_is_an_object_of_the_class(url: str, mode: instructor.Mode) -> None:
    answer = client(url, mode).chat.completions.create(response_model=Weather, **FIELDS)
    assert isinstance(answer, Weather) and answer.days in (1, 2, 3)


def test_a_stream_of_partial_objects(url: str) -> None:
    partial = client(url, instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Weather, **FIELDS
    )
    objects = list(partial)
    assert len(objects) > 1 and objects[-1].place in ("Rome", "Oslo") and objects[-1].days in (1, 2, 3)
