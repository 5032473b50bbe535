"""Which requests an engine of given sizes can take at all."""

from orca_jax.config import ServingConfig
from orca_jax.errors import EmptyPrompt, PromptTooLong, RequestTooLarge, TokenOutOfRange
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.request import Request


def admissible(request: Request, *, config: ServingConfig, model: ModelConfig) -> None:
    """Refuse a request that the model cannot take, or that `scheduler.select` would break at for ever.

    It is the pool's `check`. Raises EmptyPrompt, TokenOutOfRange, PromptTooLong or RequestTooLarge.
    """
    if not request.prompt_ids:
        raise EmptyPrompt("the prompt has no token; it needs at least one", param="prompt")
    for token_id in (min(request.prompt_ids), max(request.prompt_ids)):
        if not 0 <= token_id < model.vocab_size:
            message = f"token id {token_id} is not in the vocabulary, which has 0 to {model.vocab_size - 1}"
            raise TokenOutOfRange(message, param="prompt")
    n_input = len(request.prompt_ids)
    if n_input >= model.n_positions:
        message = f"the prompt has {n_input} tokens; the model's {model.n_positions} positions must hold "
        message += f"an output token as well, so give it at most {model.n_positions - 1}"
        raise PromptTooLong(message, param="prompt")
    assert request.max_tokens > n_input, "max_tokens counts input and output"
    limit, source = longest_request(config=config, model=model)
    if request.max_tokens > limit:
        message = f"{n_input} input and {request.max_tokens - n_input} output tokens are asked for, and "
        message += f"{source} allow {limit} together; "
        message += f"ask for at most {limit - n_input}" if n_input < limit else "shorten the prompt"
        raise RequestTooLarge(message, param="max_tokens")


def longest_request(*, config: ServingConfig, model: ModelConfig) -> tuple[int, str]:
    """The most input and output tokens that one request can have together, and what sets the limit."""
    return min(
        (model.n_positions, "the model's positions"),
        (config.n_blocks * config.block_size, "n_slots in whole blocks"),
        # After a fault a request runs again with all its tokens but the last in one iteration.
        (config.max_batch_tokens + 1, "max_batch_tokens"),
    )
