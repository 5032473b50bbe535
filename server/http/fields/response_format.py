"""`response_format`: OpenAI's field for structured output."""

from typing import Annotated, Any, Literal

from pydantic import Field

from orca_jax.errors import InvalidRequest
from server.http.fields.strict import Strict

_FIELD = "response_format.json_schema"


class JsonSchema(Strict):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(description="for readers; has no effect")]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="the output follows this schema")]
    strict: Annotated[bool | None, Field(description="has no effect: the schema is always enforced")] = None
    description: Annotated[str | None, Field(description="for readers; has no effect")] = None


class ResponseFormat(Strict):
    """`response_format`."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Field(description="any text; any JSON object; JSON that follows json_schema"),
    ]
    json_schema: Annotated[JsonSchema | None, Field(description="only with type json_schema")] = None

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for the fields of `SamplingParams` made from this; see `renamed_fields`."""
        return {
            "text": {},
            "json_object": {"guided_json_object": "response_format"},
            "json_schema": {"guided_json": f"{_FIELD}.schema"},
        }[self.type]

    def guided(self) -> dict[str, Any]:
        """The equivalent fields of `SamplingParams`; empty for plain text.

        Raises InvalidRequest if `type` and `json_schema` contradict each other.
        """
        if self.type == "json_schema":
            if self.json_schema is None:
                message = f"{_FIELD} is missing; give it, as {{'name': ..., 'schema': {{...}}}}"
                raise InvalidRequest(message, param=_FIELD)
            return {"guided_json": self.json_schema.schema_}
        if self.json_schema is not None:
            message = f"{_FIELD} is given with response_format.type {self.type!r}; it goes with 'json_schema'"
            raise InvalidRequest(message, param=_FIELD)
        return {"guided_json_object": True} if self.type == "json_object" else {}
