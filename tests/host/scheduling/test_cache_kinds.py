"""The blocks that each kind of cache takes of a request, against what is counted by hand."""

import pytest

from orca_jax.iteration.rows.beams import Beams
from orca_jax.request.beam_search import BeamSearch
from orca_jax.request.request import PLAIN, Request, RowKind
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.cache_kinds import blocks_at_first, slots_to_reserve


def request(n_prompt: int, n_output: int, n_encoder: int = 0, kind: RowKind = PLAIN) -> Request:
    sampling = SamplingParams(max_tokens=n_output)
    ids, encoder_ids = tuple(range(n_prompt)), tuple(range(n_encoder))
    return Request("x", ids, n_prompt + n_output, sampling, 0, encoder_ids=encoder_ids, kind=kind)


@pytest.mark.parametrize(
    ("n_prompt", "n_output", "n_encoder", "n_beams", "at_first", "most"),
    [
        (8, 1, 0, None, 2, 3),  # 9 tokens in blocks of 4
        (7, 1, 0, None, 2, 2),
        (1, 11, 9, None, 4, 6),  # an encoder's 9 tokens share no block with the decoder's
        (1, 11, 8, None, 3, 5),
        (9, 7, 0, 3, 3, 8),  # beams share the prompt's 2 full blocks; each has 2 more
        (9, 7, 4, 1, 4, 5),
    ],
)
def test_blocks_by_hand(
    n_prompt: int, n_output: int, n_encoder: int, n_beams: int | None, at_first: int, most: int
) -> None:
    kind = PLAIN if n_beams is None else Beams(BeamSearch(n_beams, max_tokens=n_output))
    asked = request(n_prompt, n_output, n_encoder, kind)
    assert blocks_at_first(asked, 4) == at_first
    assert slots_to_reserve(asked, 4) == 4 * most


def test_after_a_preemption_the_output_needs_blocks_too() -> None:
    asked = request(7, 9, 5)
    asked.output_ids += [1, 2]
    assert blocks_at_first(asked, 4) == 3 + 2
