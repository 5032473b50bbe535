"""`POST /v1/chat/completions`: the model replies to a conversation."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest
from orca_jax.request.chat.tools import ToolWish, check_tools
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from server.http.bodies.json_body import JsonRoute
from server.http.fields.conversation import ConversationFields
from server.http.fields.generation import GeneratedChoice, GeneratedResponse, GenerationRequest, ranged
from server.http.fields.logprobs import ChatLogprobs, PromptLogprobs, TokenNames, chat_logprobs
from server.http.fields.strict import NotBuilt, Strict, text_or
from server.http.fields.tools import ToolChoice, tool_wish
from server.http.generation.answer import GENERATION_ERRORS, answer, check_number, new_response_id
from server.http.generation.choices import Choices, OutputExtras
from server.http.generation.chunks import CHAT_FORM
from server.http.generation.prepared_reply import prepared
from server.http.state import CallOf


class ReasoningWish(Strict):
    """`reasoning`: OpenRouter's form of reasoning_effort, which some clients send to every server."""

    place: ClassVar = "reasoning of chat"

    effort: Annotated[str | None, Field(description="an alias of reasoning_effort")] = None
    enabled: Annotated[bool | None, Field(description="false means the reasoning_effort none")] = None

    exclude: Annotated[bool | None, NotBuilt(False, why="the reply would have its reasoning")] = None


class PredictedPart(Strict):
    """A text."""

    type: Literal["text"]
    text: str


class PredictedReply(Strict):
    """`prediction`: a text that the reply is expected to follow."""

    type: Literal["content"]
    content: Annotated[list[PredictedPart], text_or(list[PredictedPart])]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    """POST /v1/chat/completions. Without `max_tokens`, a choice may be as long as the model allows."""

    place: ClassVar = "/v1/chat/completions"

    logprobs: Annotated[bool | None, Field(description="return the tokens' log-probabilities")] = None
    top_logprobs: Annotated[
        int | None,
        ranged("with logprobs: also return this many of the most likely tokens", 0, MAX_TOP_LOGPROBS),
    ] = None

    prediction: Annotated[
        PredictedReply | None,
        Field(
            description="a text that the reply is expected to follow, which makes it faster on a server with "
            "--speculative and changes no token"
        ),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        Field(description="auto (default): the model may call tools; required: it must; or the tool to call"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="whether a reply may have several calls; default true")
    ] = None
    functions: Annotated[list[Any] | None, NotBuilt([], why="the model would not know them")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, NotBuilt("none", "auto", why="the call would not be forced")
    ] = None
    modalities: Annotated[list[str] | None, NotBuilt(["text"], why="the reply would be text")] = None
    audio: Annotated[dict[str, Any] | None, NotBuilt(why="the reply would be text")] = None
    reasoning_effort: Annotated[
        str | None,
        Field(description="a variable of the chat template; not used if the template does not read it"),
    ] = None
    reasoning: Annotated[ReasoningWish | None, Field(description="an extension")] = None
    web_search_options: Annotated[dict[str, Any] | None, NotBuilt(why="nothing is searched")] = None
    moderation: Annotated[dict[str, Any] | None, NotBuilt(why="nothing is checked")] = None

    @property
    def uses_tools(self) -> bool:
        return self.tool_choice != "none"

    def wish(self, tools: Sequence[dict[str, Any]]) -> ToolWish:
        return tool_wish(check_tools(tools), self.tool_choice, parallel=self.parallel_tool_calls is not False)

    @property
    def effort(self) -> str | None:
        if self.reasoning_effort is not None or self.reasoning is None:
            return self.reasoning_effort
        return "none" if self.reasoning.enabled is False else self.reasoning.effort

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for fields of `SamplingParams` and for the prompt; see `renamed_fields`."""
        names = {**super().client_names, "logprobs": "top_logprobs", "prompt": "messages"}
        return names if self.reasoning_effort else {**names, "reasoning_effort": "reasoning.effort"}

    def sampling(self, defaults: GenerationDefaults, *, longest: int) -> SamplingParams:
        n_top = self.top_logprobs
        if n_top and not self.logprobs:
            message = f"top_logprobs is {n_top} without logprobs; set logprobs to true, or leave it out"
            raise InvalidRequest(message, param="top_logprobs")
        most = self.most_tokens(self.wanted_tokens, defaults.max_tokens, longest)
        logprobs = (n_top or 0) if self.logprobs else None
        prediction = None if self.prediction is None else self.prediction.text
        return self.sampling_params(
            defaults.sampling,
            max_tokens=most,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prediction=prediction,
        )


class AnswerFunction(BaseModel):
    """The called function. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class AnswerCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(BaseModel):
    """The model's reply. `content` is null if the reply has only tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: Annotated[str | None, Field(description="left out if there is none")] = None
    tool_calls: Annotated[list[AnswerCall] | None, Field(description="left out if there are none")] = None


class ChatChoice(GeneratedChoice):
    """One reply."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(GeneratedResponse):
    """The response to POST /v1/chat/completions without `stream`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: Annotated[list[int] | None, Field(description="with return_token_ids")] = None
    prompt_logprobs: PromptLogprobs | None = None


router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_chat_completion(body: ChatCompletionRequest, call: CallOf) -> Response:
    """Reply to a conversation, in one response or, with `stream`, as server-sent events."""
    body.check_stream_options()
    model = call.accept(body.scheduling, model=body.model, user=body.user)

    def conversation() -> ConversationFields:
        check_number(1, body.n_choices, call.options, model)
        return body

    ready = await prepared(call, model, body, conversation)
    model.check_routed([ready.prompt], ready.rules.sampling)
    if body.prediction is not None and ready.rules.prediction is None:
        call.unused.note("prediction", "nothing of this reply is drafted (docs/speculation.md)")
    extras = None
    scores_prompt = body.prompt_logprobs is not None
    if body.logprobs or scores_prompt or body.return_routed_experts or body.return_token_ids:
        extras = OutputExtras(
            names=TokenNames(model.tokenizer),
            shown=ready.rules.shown,
            write_logprobs=chat_logprobs if body.logprobs else None,
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=scores_prompt,
        )
    plan = None if ready.plan.is_plain else ready.plan
    response_id = new_response_id("chatcmpl")
    choices = Choices(call, [ready.prompt], ready.rules, extras=extras, response_id=response_id, plan=plan)
    return await answer(body, model, choices, call.receive, CHAT_FORM)
