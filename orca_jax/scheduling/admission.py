"""Which requests an engine of given sizes can run at all."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.config import ServingConfig
from orca_jax.errors import EmptyPrompt, PromptTooLong, RequestTooLarge, TokenOutOfRange
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.request import Request


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that `check_prompt` accepted, together with up to `n_output` output tokens."""

    token_ids: tuple[int, ...]
    n_output: int


def check_prompt(
    prompt_ids: Sequence[int], n_output: int, *, config: ServingConfig, model: ModelConfig
) -> CheckedPrompt:
    """Reject a request that the model cannot take, or that `select` would wait for forever.

    Raises EmptyPrompt, TokenOutOfRange, PromptTooLong or RequestTooLarge.
    """
    if not prompt_ids:
        raise EmptyPrompt("the prompt has no token; it needs at least one", param="prompt")
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < model.vocab_size:
            message = f"token id {token_id} is not in the vocabulary, which has 0 to {model.vocab_size - 1}"
            raise TokenOutOfRange(message, param="prompt")
    n_input = len(prompt_ids)
    if n_input >= model.n_positions:
        message = f"the prompt has {n_input} tokens; the model's {model.n_positions} positions must hold "
        message += f"an output token as well, so give it at most {model.n_positions - 1}"
        raise PromptTooLong(message, param="prompt")
    limit, source = longest_request(config=config, model=model)
    if n_input + n_output > limit:
        message = f"{n_input} input and {n_output} output tokens are asked for, and "
        message += f"{source} allow {limit} together; "
        message += f"ask for at most {limit - n_input}" if n_input < limit else "shorten the prompt"
        raise RequestTooLarge(message, param="max_tokens")
    return CheckedPrompt(tuple(prompt_ids), n_output)


def admissible(request: Request, *, config: ServingConfig, model: ModelConfig) -> None:
    """The same for a request that goes straight into a pool: a RequestPool's `check`."""
    n_input = len(request.prompt_ids)
    assert not n_input or request.max_tokens > n_input, "max_tokens counts input and output"
    check_prompt(request.prompt_ids, request.max_tokens - n_input, config=config, model=model)


def longest_request(*, config: ServingConfig, model: ModelConfig) -> tuple[int, str]:
    """The most input and output tokens that one request can have together, and what sets the limit."""
    return min(
        (model.n_positions, "the model's positions"),
        (config.n_blocks * config.block_size, "n_slots in whole blocks"),
        # After the loss of a worker a request runs again, with all its tokens but the last in one iteration.
        (config.max_batch_tokens + 1, "max_batch_tokens"),
    )
