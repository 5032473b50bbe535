"""The `n` outputs of one prompt, running concurrently, and their text on a terminal."""

from typing import TYPE_CHECKING, Any

from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.generation import Generation

if TYPE_CHECKING:
    from orca_jax import LLM

_NO_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def start(llm: "LLM", prompt: Any, sampling: SamplingParams) -> list[Generation]:
    """Start `sampling.n` outputs; only the first has the prompt's log-probabilities.

    Raises as `LLM.stream` does, after stopping the outputs already started.
    """
    started = list[Generation]()
    try:
        for choice in sampling.choices(prompt_once=True):
            if started:  # tokenize only once
                prompt = started[0].prompt_ids
            started.append(llm.stream(prompt, choice))
    except BaseException:
        close(started)
        raise
    return started


def close(outputs: list[Generation]) -> None:
    """Cancel the outputs that are still running."""
    for output in outputs:
        output.close()


def printable(text: str) -> str:
    """The text with control characters replaced, which a terminal executes, but for line breaks and tabs."""
    return text.translate(_NO_CONTROLS)
