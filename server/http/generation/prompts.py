"""Encodes and checks prompts before anything runs.

The cost grows with the prompts' length, so call these functions in `run_for_request`.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from orca_jax.errors import InvalidPrompt, InvalidRequest
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.served_model import ServedModel
from server.settings.options import EndpointOptions

T = TypeVar("T")


def encode(model: ServedModel, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
    """Token ids of each prompt. Raises InvalidPrompt and PromptTooLong, which name the prompt at fault."""
    return _each(prompts, lambda prompt: model.encode(prompt) if isinstance(prompt, str) else prompt)


def texts(model: ServedModel, prompts: Sequence[str] | Sequence[list[int]]) -> list[str]:
    """The text of each prompt; empty for token ids if the model has no tokenizer."""
    return [_text(model, prompt) for prompt in prompts]


def check(model: ServedModel, prompts: Sequence[Sequence[int]], rules: OutputRules) -> list[CheckedPrompt]:
    """Check all prompts before any is submitted. Raises a leaf of InvalidRequest."""
    return _each(prompts, lambda prompt: model.service.check(prompt, rules))


def check_number(n_prompts: int, n: int, options: EndpointOptions, model: ServedModel) -> None:
    """Raise InvalidRequest if there is no prompt, or if the request asks for too many choices.

    All choices are submitted together, so they must fit into one owner's share of an empty queue.
    """
    if not n_prompts:
        raise InvalidPrompt("prompt is an empty list; give at least one", param="prompt")
    most = min(options.max_choices, model.serving.max_queue_each)
    if n_prompts * n > most:
        count = f"{n} for each of {n_prompts} prompts" if n_prompts > 1 else f"n is {n}"
        message = f"too many choices ({count}); one request may ask for {most} in all"
        raise InvalidRequest(message, param="n" if n > 1 else "prompt")


def _text(model: ServedModel, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if model.tokenizer is None else model.tokenizer.decode(prompt)


def _each(prompts: Sequence[T], work: Callable[[T], object]) -> list:
    results = []
    for i, prompt in enumerate(prompts):
        try:
            results.append(work(prompt))
        except InvalidRequest as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"prompt {i}: {error}", param=error.param) from error
    return results
