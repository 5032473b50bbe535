"""The outputs that are asked of one prompt, all running at once."""

from typing import TYPE_CHECKING, Any

from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.generation import Generation

if TYPE_CHECKING:
    from orca_jax import LLM


def start(llm: "LLM", prompt: Any, sampling: SamplingParams) -> list[Generation]:
    """One for each of `sampling.n`; the first alone has the log-probabilities of the prompt.

    Raises as `LLM.stream` does, and then none of them runs.
    """
    started = list[Generation]()
    try:
        for one in sampling.choices(prompt_once=True):
            if started:  # it is encoded once
                prompt = started[0].prompt_ids
            started.append(llm.stream(prompt, one))
    except BaseException:
        close(started)
        raise
    return started


def close(outputs: list[Generation]) -> None:
    """End those that still run."""
    for output in outputs:
        output.close()
