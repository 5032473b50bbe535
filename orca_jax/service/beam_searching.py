"""`LLM.beam_search`: beam search with the parameters that it has."""

from collections.abc import Sequence
from typing import Any

from orca_jax.request.beam_search import EarlyStopping
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.generation import GenerationResult


class BeamSearching:
    """What an LLM searches with; its `generate` does the work."""

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        decoder_prompts: Any = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[GenerationResult]:
        raise NotImplementedError

    def beam_search(
        self,
        prompts: Any,
        *,
        beam_width: int,
        max_tokens: int = 16,
        n: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        decoder_prompts: Any = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[GenerationResult]:
        """The `n` best outputs of each prompt with their `score`; those of a prompt are adjacent, best first.

        The search has `beam_width` beams, 1 to 16 and at most `max_batch_size`; see SamplingParams for the
        other parameters. Prompts and errors are those of `generate`.
        """
        sampling = SamplingParams(
            use_beam_search=True,
            best_of=beam_width,
            n=n,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        )
        return self.generate(
            prompts, sampling, decoder_prompts=decoder_prompts, priority=priority, cache_salt=cache_salt
        )
