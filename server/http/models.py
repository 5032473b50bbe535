"""`/v1/models`: the served model, in OpenAI's form."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from server.gateway.served_model import ServedModel
from server.http.bodies.errors import error_responses
from server.http.state import GatewayOf

router = APIRouter(prefix="/v1/models", tags=["models"], responses=error_responses(503))


class Model(BaseModel):
    """A model. `created` is in seconds since 1970; `max_model_len` limits tokens of input and output
    together.

    `inputs` names the forms of input that the model accepts: messages if it can chat. `parent` is the model
    that a LoRA adapter changes; only adapters have one.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "orca_jax"
    max_model_len: int
    parent: str | None = None
    inputs: list[Literal["text", "token_ids", "messages"]]


class Models(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("", response_model_exclude_none=True)
async def list_models(gateway: GatewayOf) -> Models:
    """List the model and its LoRA adapters."""
    model = gateway.model()
    return Models(data=[_model(one) for one in (model, *model.adapted())])


# `:path`, because names on the Hugging Face hub contain a slash.
@router.get("/{model_id:path}", responses=error_responses(404), response_model_exclude_none=True)
async def get_model(gateway: GatewayOf, model_id: str) -> Model:
    """Get a model by its name."""
    return _model(gateway.model(model_id))


def _model(model: ServedModel) -> Model:
    return Model(
        id=model.name,
        created=model.created,
        max_model_len=model.service.most_output(0),
        parent=model.parent,
        inputs=[
            *(["text"] if model.tokenizer is not None else []),
            "token_ids",
            *(["messages"] if model.can_chat else []),
        ],
    )
