"""`response_format`: OpenAI's way to ask for structured output."""

from typing import Annotated, Any, Literal

from pydantic import Field

from orca_jax.errors import InvalidRequest
from server.http.fields.strict import Strict

_FIELD = "response_format.json_schema"


class JsonSchema(Strict):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(description="for people; nothing follows from it")]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="the output follows it")]
    strict: Annotated[bool | None, Field(description="the schema is followed whatever this says")] = None
    description: Annotated[str | None, Field(description="for people; nothing follows from it")] = None


class ResponseFormat(Strict):
    """`response_format`."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Field(description="any text; any JSON object; what json_schema says"),
    ]
    json_schema: Annotated[
        JsonSchema | None, Field(description="with the type json_schema, and only there")
    ] = None

    @property
    def client_names(self) -> dict[str, str]:
        """How `named` calls the fields of `SamplingParams` that are made of this."""
        return {
            "text": {},
            "json_object": {"guided_json_object": "response_format"},
            "json_schema": {"guided_json": f"{_FIELD}.schema"},
        }[self.type]

    def guided(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that ask for it; none for any text.

        Raises InvalidRequest where `type` and `json_schema` contradict each other.
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
