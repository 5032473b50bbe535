"""The table of request fields that are accepted but not used, with the reason for each.

None of them could change the tokens or the meaning of an answer: they are hints, annotations or metadata. A
response's header `x-orca-ignored` names those that its request had. A field that could change an answer is
refused instead (NotBuilt, in strict.py), and so is an unknown field, which may be a misspelt parameter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Hint(NamedTuple):
    """Why a field is not used, and its neutral values, which the header does not mention."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def asks_nothing(self, value: object) -> bool:
        return value is None or is_one_of(value, self.neutral)


def is_one_of(value: object, others: tuple[Any, ...]) -> bool:
    """Whether `value` equals one of `others` as JSON does: false is not 0."""
    return any(type(value) is type(other) and value == other for other in others)


_CACHE = "prompts with the same beginning always share their cached keys and values"
_CACHE_CONTROL = Hint(_CACHE)
_BREAKPOINT = Hint(_CACHE)
_TIER = "there is one tier of service; `priority` orders requests"
_METADATA = "metadata for the client alone"
_CALLER = Hint("every call is made by the model", ({"type": "direct"},))
_DEFERRED = Hint("every tool is shown to the model from the start", (False,))
_SEARCH = Hint("the server cannot run it, and the request has other tools")
_TOOLSET = Hint("a call and its result belong together by their id")
_PADDING = Hint("events are not padded against an observer of their sizes", (False,))
_PARSED = Hint("a client library's parsed copy of the text")
_PASSED_THROUGH = Hint("something that another provider added to its reply")
_ANNOTATIONS = Hint("the model does not read the sources of an earlier reply", ([],))

_OPENAI = {
    "safety_identifier": Hint("the API key identifies the client, and `user` labels the access log"),
    "prompt_cache_key": Hint(_CACHE),
    "prompt_cache_options": Hint(_CACHE),
    "prompt_cache_retention": Hint(_CACHE),
    "service_tier": Hint(_TIER, ("auto", "default")),
    "client_metadata": Hint(_METADATA),
}

# Hints by place and field name. Each model of server/http names its place (`Strict.place`).
HINTS: Mapping[str, Mapping[str, Hint]] = {
    "stream_options": {"include_obfuscation": _PADDING},
    "/v1/chat/completions": {
        **_OPENAI,
        "store": Hint("chat completions are not stored; /v1/responses are", (False,)),
        "metadata": Hint(_METADATA, ({},)),
        "verbosity": Hint("no chat template reads it", ("medium",)),
    },
    "reasoning of chat": {
        "max_tokens": Hint("only the request's max_tokens limits a reply"),
        "summary": Hint("reasoning comes whole, not as a summary"),
    },
    "messages of chat": {
        "annotations": _ANNOTATIONS,
        "cache_control": _CACHE_CONTROL,
        "id": Hint("the client's name for the message"),
        "parsed": _PARSED,
        "provider_specific_fields": _PASSED_THROUGH,
        "reasoning_details": _PASSED_THROUGH,
        "thinking_blocks": _PASSED_THROUGH,
    },
    "content parts of chat": {
        "annotations": _ANNOTATIONS,
        "cache_control": _CACHE_CONTROL,
        "prompt_cache_breakpoint": _BREAKPOINT,
    },
    "tool_calls of chat": {
        "cache_control": _CACHE_CONTROL,
        "extra_content": _PASSED_THROUGH,
        "index": Hint("calls are in the order of their list"),
        "provider_specific_fields": _PASSED_THROUGH,
    },
    "tool_calls.function of chat": {
        "parsed_arguments": _PARSED,
        "provider_specific_fields": _PASSED_THROUGH,
    },
    "tools of chat": {
        "cache_control": _CACHE_CONTROL,
        "defer_loading": _DEFERRED,
        "eager_input_streaming": Hint("arguments are streamed as they are generated in any case"),
    },
    "/v1/responses": {
        **_OPENAI,
        "access_programs": Hint("this server has none"),
        "context_management": Hint("nothing of a conversation is left out or summarised", ([],)),
        "image": Hint("no images are read or made"),
        "max_tool_calls": Hint("it limits calls of tools that the server itself runs, and it runs none"),
    },
    "include": {
        "reasoning.encrypted_content": Hint("reasoning comes as text, which can be sent back"),
        "code_interpreter_call.outputs": Hint("a reply has no such item"),
        "computer_call_output.output.image_url": Hint("a reply has no such item"),
        "file_search_call.results": Hint("a reply has no such item"),
        "message.input_image.image_url": Hint("a reply has no such item"),
        "web_search_call.action.sources": Hint("a reply has no such item"),
        "web_search_call.results": Hint("a reply has no such item"),
    },
    "text": {"verbosity": Hint("no chat template reads it", ("medium",))},
    "reasoning": {
        "context": Hint("the chat template decides which earlier reasoning the model reads", ("auto",)),
        "generate_summary": Hint("reasoning comes whole, not as a summary"),
        "summary": Hint("reasoning comes whole, not as a summary"),
    },
    "input items": {
        "caller": _CALLER,
        "encrypted_content": Hint("only the server that encrypted it can read it"),
        "internal_chat_message_metadata_passthrough": Hint(_METADATA),
        "parsed_arguments": _PARSED,
        "phase": Hint("it follows from the order of the items"),
        "summary": Hint("the model reads the whole reasoning, in content", ([],)),
    },
    "outputs among input items": {
        "name": Hint("an output belongs to its call by the call's id"),
        "namespace": Hint("an output belongs to its call by the call's id"),
    },
    "types of input items": {
        "web_search_call": Hint("the model reads the text that it wrote after the search"),
        "image_generation_call": Hint("no images are read"),
    },
    "content parts of responses": {
        "annotations": _ANNOTATIONS,
        "parsed": _PARSED,
        "logprobs": Hint("the model does not read log-probabilities of an earlier reply", ([],)),
        "prompt_cache_breakpoint": _BREAKPOINT,
    },
    "tools of responses": {
        "defer_loading": _DEFERRED,
        "output_schema": Hint("chat templates have no place for it"),
    },
    "custom tools": {"format": Hint("the model reads the grammar, but is not forced to follow it")},
    "types of tools of responses": {
        "image_generation": _SEARCH,
        "tool_search": _DEFERRED,
        "web_search": _SEARCH,
        "web_search_2025_08_26": _SEARCH,
        "web_search_preview": _SEARCH,
        "web_search_preview_2025_03_11": _SEARCH,
    },
    "/v1/messages": {
        "anthropic_beta": Hint("features are not switched by name"),
        "anthropic_version": Hint("there is one version"),
        "betas": Hint("features are not switched by name"),
        "billing_policy": Hint("nothing is billed"),
        "cache_control": _CACHE_CONTROL,
        "context_management": Hint("nothing of a conversation is left out or summarised", ({"edits": []},)),
        "diagnostics": Hint("`usage` says how much of the prompt was cached"),
        "fallback_credit_token": Hint("nothing is billed"),
        "fallbacks": Hint("one model is served"),
        "inference_geo": Hint("the server is where its operator runs it"),
        "service_tier": Hint(_TIER, ("auto", "standard_only")),
        "speed": Hint("every request is served as fast as the engine can", ("standard",)),
        "user_profile_id": Hint("the API key identifies the client"),
        "workspace_id": Hint("the API key identifies the client"),
    },
    "blocks of messages": {
        "cache_control": _CACHE_CONTROL,
        "caller": _CALLER,
        "citations": _ANNOTATIONS,
        "signature": Hint("reasoning that is sent back is not checked", ("",)),
        "toolset_name": _TOOLSET,
    },
    "tools of messages": {
        "cache_control": _CACHE_CONTROL,
        "defer_loading": _DEFERRED,
        "eager_input_streaming": Hint("inputs are streamed as they are generated in any case"),
    },
    "types of blocks of messages": {
        "redacted_thinking": Hint("only the provider that encrypted this reasoning can read it"),
    },
    "types of tools of messages": {
        "tool_search_tool_bm25_20251119": _DEFERRED,
        "tool_search_tool_regex_20251119": _DEFERRED,
        "web_fetch_20250910": _SEARCH,
        "web_fetch_20260209": _SEARCH,
        "web_fetch_20260309": _SEARCH,
        "web_fetch_20260318": _SEARCH,
        "web_search_20250305": _SEARCH,
        "web_search_20260209": _SEARCH,
        "web_search_20260318": _SEARCH,
    },
    "thinking": {
        "block_binding": Hint("reasoning that is sent back is not checked"),
        "display": Hint("reasoning comes whole", ("summarized",)),
    },
    "output_config": {"task_budget": Hint("only max_tokens limits a reply")},
}
