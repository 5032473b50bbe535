"""How many bytes a request keeps while it waits."""

from collections.abc import Sequence

from orca_jax.request.sampling_params import SamplingParams

_REQUEST = 4096  # whatever it asks for: the request, its mailbox, its parameters
_TOKEN_ID = 40  # a place in a tuple, and the number
_STOP_TOKEN = 240  # a token id in a tuple and in two sets
_BIAS = 160  # an entry of a dictionary, a whole number and a real one
_CHARACTER = 4
_TEXT = 80  # a text besides its characters
_STOP = 300
_STOP_CHARACTER = 24  # of a stop string: itself, and a state of the automaton
_BAD_CHARACTER = 36  # of a bad word: itself, and its tokens as they stand alone and behind a blank
_BAD_WORD = 400
_GRAMMAR_STATE = 128 << 10  # how far the output has come, with the bits of its next mask


def weight_in_bytes(prompt_ids: Sequence[int], sampling: SamplingParams) -> int:
    """An estimate from above of what a queued request holds, with what was made of its parameters.

    It costs no more than a look at each text. Outputs of one prompt share most of what each is charged with
    here. A compiled grammar is not in it: the compiler has a bound of its own.
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
