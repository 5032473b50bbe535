"""The arguments of `LLM`, normalized: prompts and sampling parameters as lists of equal length."""

# Users' values are checked at run time too, whatever the annotations promise.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Sequence
from typing import Any

import numpy as np

from orca_jax.errors import InvalidPrompt, InvalidSamplingParameter, UnknownAdapter
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer


def prompt_token_ids(model: str, tokenizer: Tokenizer | None, prompt: object) -> list[int]:
    """A prompt's token ids; `model` is the model's name. Raises InvalidPrompt."""
    if isinstance(prompt, str):
        if tokenizer is None:
            message = f"{model} has no tokenizer, so a prompt must be a list of token ids"
            raise InvalidPrompt(message, param="prompt")
        return tokenizer.encode(prompt)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        message = f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        raise InvalidPrompt(message, param="prompt")
    for i, token_id in enumerate(prompt):
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            message = f"element {i} of the prompt is {token_id!r}; token ids are whole numbers"
            raise InvalidPrompt(message, param="prompt")
    return [int(token_id) for token_id in prompt]


def decoder_token_ids(model: str, tokenizer: Tokenizer | None, prompt: object) -> list[int] | None:
    """The token ids that a decoder's output continues, without special tokens; None if none are given.

    Raises InvalidPrompt.
    """
    if prompt is None:
        return None
    if isinstance(prompt, str) and tokenizer is not None:
        return tokenizer.encode(prompt, add_special_tokens=False)
    return prompt_token_ids(model, tokenizer, prompt)


def listed_pairs(prompts: Any, decoder_prompts: Any) -> list[tuple[Any, Any]]:
    """Each prompt with its decoder prompt, or None. Raises InvalidPrompt."""
    listed = listed_prompts(prompts)
    begun = [None] * len(listed) if decoder_prompts is None else listed_prompts(decoder_prompts)
    if len(begun) != len(listed):
        message = f"there are {len(begun)} decoder_prompts for {len(listed)} prompts; give one for each"
        raise InvalidPrompt(message, param="decoder_prompts")
    return list(zip(listed, begun, strict=True))


def listed_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, from one or several. A sequence that begins with a number is one prompt."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [prompts]
    prompts = list(prompts)
    first_is_prompt = not prompts or isinstance(prompts[0], str | Sequence | np.ndarray)
    return prompts if first_is_prompt else [prompts]


def one_adapter_each(adapter: object, n_prompts: int) -> list[Any]:
    """The adapter's name of each prompt, from one for all or a list. Raises UnknownAdapter."""
    if not isinstance(adapter, list | tuple):
        return [adapter] * n_prompts
    if len(adapter) != n_prompts:
        message = f"there are {len(adapter)} adapters for {n_prompts} prompts; give one, or one for each"
        raise UnknownAdapter(message, param="adapter")
    return list(adapter)


def one_for_each(params: Any, n_prompts: int) -> list[SamplingParams]:
    """The sampling parameters of each prompt. Raises InvalidSamplingParameter."""
    if params is None:
        params = SamplingParams()
    listed = [params] * n_prompts if isinstance(params, SamplingParams) else params
    if not isinstance(listed, list | tuple) or not all(isinstance(each, SamplingParams) for each in listed):
        message = f"sampling_params is {params!r}; it must be a SamplingParams or a list of them"
        raise InvalidSamplingParameter(message, param="sampling_params")
    if len(listed) != n_prompts:
        message = (
            f"there are {len(listed)} sampling_params for {n_prompts} prompts; give one, or one for each"
        )
        raise InvalidSamplingParameter(message, param="sampling_params")
    return list(listed)
