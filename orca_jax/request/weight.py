"""The memory of a waiting request."""

from collections.abc import Sequence

from orca_jax.request.sampling_params import SamplingParams

_REQUEST = 4096  # fixed cost: the request, its Output, its parameters
_TOKEN_ID = 40  # an element of a tuple, and the number
_STOP_TOKEN = 240  # a token id in a tuple and in two sets
_BIAS = 160  # a dictionary entry, an int and a float
_CHARACTER = 4
_TEXT = 80  # a string without its characters
_STOP = 300
_STOP_CHARACTER = 24  # of a stop string: the character, and a state of the automaton
_BAD_CHARACTER = 36  # of a bad word: the character, and its tokens at the start of a word and after a space
_BAD_WORD = 400
_GRAMMAR_STATE = 128 << 10  # the output's position, with the bits of its next mask


def weight_in_bytes(prompt_ids: Sequence[int], sampling: SamplingParams) -> int:
    """Upper estimate of a queued request's memory in bytes, including data derived from its parameters.

    Costs no more than the lengths of its texts. Outputs of one prompt share most of what each is charged for
    here. Compiled grammars are not included: the compiler has its own limit.
    """
    n = _REQUEST + _TOKEN_ID * len(prompt_ids)
    n += _BIAS * len(sampling.logit_bias)
    n += _STOP_TOKEN * len(sampling.stop_token_ids)
    n += 2 * _TOKEN_ID * len(sampling.allowed_token_ids or ())
    n += sum(_STOP + _STOP_CHARACTER * len(text) for text in sampling.stop)
    n += sum(_BAD_WORD + _BAD_CHARACTER * len(text) for text in sampling.bad_words)
    for text in (sampling.guided_json, sampling.guided_regex, sampling.guided_grammar):
        n += _TEXT + _CHARACTER * len(text) if isinstance(text, str) else 0
    if sampling.grammar is not None:
        n += _GRAMMAR_STATE
    return n + sum(_TEXT + _CHARACTER * len(text) for text in sampling.guided_choice or ())
