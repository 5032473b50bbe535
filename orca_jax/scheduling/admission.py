"""Admission to the queue: which requests an engine can run, and how much host memory a request takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.config import ServingConfig
from orca_jax.errors import EmptyPrompt, NotSupported, PromptTooLong, RequestTooLarge, TokenOutOfRange
from orca_jax.families.model_config import Encoder, ModelConfig
from orca_jax.request.adapter import Adapter
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.pooling import Pooling
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.beam_blocks import most_blocks

# The host memory of a waiting request, in bytes:
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
_BLOCK_HASH = 96  # of the prefix cache: a digest, and its place in a list
_GRAMMAR_STATE = 128 << 10  # the output's position, with the bits of its next mask


TokenName = Callable[[int], str | None]  # a tokenizer's name for a token id


def unnamed(_: int) -> str | None:
    """A TokenName for a model without a tokenizer."""
    return None


class LengthLimit(NamedTuple):
    """The most input plus output tokens of a request, and the name of the size that sets this limit."""

    n_tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that admission accepted, together with up to `n_output` output tokens.

    With an encoder, `encoder_ids` is the prompt and `token_ids` the decoder's. `scored_ids` are the output
    tokens if they are known and only scored. The service adds the other fields; they are as in `Request`.
    """

    token_ids: tuple[int, ...]
    n_output: int
    encoder_ids: tuple[int, ...] = ()
    scored_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None
    priority: int = 0
    cache_salt: tuple[str, ...] = ()
    block_hashes: tuple[bytes, ...] | None = None
    adapter: Adapter | None = None
    kv_transfer: KVTransferParams | None = None

    @property
    def n_input(self) -> int:
        """The number of tokens that the user sent; with an encoder, those that it reads."""
        return len(self.encoder_ids or self.token_ids)


def check_prompt(
    prompt_ids: Sequence[int],
    n_output: int,
    *,
    model: ModelConfig,
    limit: LengthLimit,
    token_name: TokenName = unnamed,
) -> CheckedPrompt:
    """Reject a request that the model cannot run, or that would wait for slots forever.

    Raises EmptyPrompt, TokenOutOfRange, PromptTooLong or RequestTooLarge.
    """
    check_in_vocabulary(prompt_ids, model, token_name)
    n_input = len(prompt_ids)
    if n_input >= model.n_positions:
        message = f"the prompt has {n_input} tokens; the model has {model.n_positions} positions and needs "
        message += f"one for the output, so the prompt may have at most {model.n_positions - 1}"
        raise PromptTooLong(message, param="prompt")
    if n_input + n_output > limit.n_tokens:
        message = f"the request needs {n_input} input and {n_output} output tokens, but "
        message += f"{limit.source} allow {limit.n_tokens} together; "
        n_left = limit.n_tokens - n_input
        message += f"ask for at most {n_left} output tokens" if n_left > 0 else "shorten the prompt"
        raise RequestTooLarge(message, param="max_tokens")
    return CheckedPrompt(tuple(prompt_ids), n_output)


_STATES: Mapping[Pooling, str] = {
    "last": "the state of the last token",
    "cls": "the state of the first token",
    "mean": "the mean of all states",
}


def check_use(model: ModelConfig, pooling: Pooling | None) -> None:
    """Raise NotSupported unless the model makes embeddings with `pooling`, or with None other outputs."""
    if pooling is None and model.only_pools:
        what, use = "makes embeddings and generates nothing", "/v1/embeddings or LLM.embed"
        if model.is_bidirectional:
            what += ", since its tokens see later ones"
        elif model.ranker:
            what, use = "ranks texts and generates nothing", "/v1/rerank or /v1/score"
        else:
            what += ", as its folder 1_Pooling says"
            use += "; a checkpoint with a head generates if that folder is taken away"
        raise NotSupported(f"this model {what}; use {use}", param="prompt")
    reads = model.ranker_head.pooling
    if pooling not in (None, reads) and model.ranker:
        message = f"pooling is {pooling!r}; this model ranks texts by {_STATES[reads]}; use {reads}"
        raise NotSupported(message, param="pooling")
    if pooling is not None and model.encoder is not None:
        raise NotSupported("embeddings are not supported for a model with an encoder", param="prompt")
    if pooling == "cls" and not model.is_bidirectional:
        message = (
            "pooling is 'cls', the first token's state, and in this model that token sees no other; use "
        )
        raise NotSupported(f"{message}last or mean", param="pooling")


def check_routing(sampling: SamplingParams, model: ModelConfig) -> None:
    """Raise NotSupported if the request asks for experts that the model does not have."""
    if sampling.return_routed_experts and not any(model.expert_routing):
        why = "its layers choose different numbers of experts" if model.has_experts else "it has no experts"
        message = f"return_routed_experts is not supported for this model: {why}; leave it out"
        raise NotSupported(message, param="return_routed_experts")


def check_search(
    n_input: int, n_encoder: int, sampling: SamplingParams, model: ModelConfig, config: ServingConfig
) -> None:
    """Raise RequestTooLarge if the beams of a search could need more blocks than there are.

    Beams share the blocks of the `n_input` tokens before the output, and of `n_encoder` encoder tokens.
    Raises NotSupported where layers are recurrent: beams would have to copy their states.
    """
    if not sampling.use_beam_search:
        return
    if model.has_state:
        message = "use_beam_search is not supported for a model with recurrent layers; leave it out"
        raise NotSupported(message, param="use_beam_search")
    most = most_blocks(n_input, n_input + sampling.max_tokens, sampling.n_beams, config.block_size)
    most += -(-n_encoder // config.block_size)
    if most > config.n_blocks:
        message = f"{sampling.n_beams} beams of up to {sampling.max_tokens} output tokens can take {most} "
        message += f"blocks of slots, and there are {config.n_blocks}; ask for fewer beams or output tokens"
        raise RequestTooLarge(message, param="max_tokens")


def check_in_vocabulary(
    token_ids: Sequence[int], model: ModelConfig, token_name: TokenName = unnamed
) -> None:
    """Raise EmptyPrompt if there are no token ids, and TokenOutOfRange for one outside the vocabulary.

    A tokenizer may have tokens without an embedding in the model, such as image placeholders. The error says
    their name, which `token_name` returns.
    """
    if not token_ids:
        raise EmptyPrompt("the prompt has no tokens; it needs at least one", param="prompt")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < model.vocab_size:
            name = token_name(token_id)
            named = "" if name is None else f" ({name!r}, which the model has no embedding of)"
            last = model.vocab_size - 1
            message = f"token id {token_id}{named} is not in the vocabulary; ids are 0 to {last}"
            raise TokenOutOfRange(message, param="prompt")


def admissible(request: Request, *, config: ServingConfig, model: ModelConfig) -> None:
    """Check a request that is added to a pool directly: pass this to RequestPool as `check`."""
    n_input = len(request.prompt_ids)
    assert not n_input or request.max_tokens > n_input, "max_tokens counts input and output"
    limit = longest_request(config=config, model=model)
    check_prompt(request.prompt_ids, request.max_tokens - n_input, model=model, limit=limit)


def longest_request(*, config: ServingConfig, model: ModelConfig) -> LengthLimit:
    """The limit on a request's tokens in an engine of these sizes."""
    limits = [
        LengthLimit(model.n_positions, "the model's positions"),
        LengthLimit(config.n_blocks * config.block_size, "n_slots in whole blocks"),
    ]
    if not config.scheduling.chunked_prefill:
        # After a preemption or the loss of a worker, one iteration recomputes all tokens except the last.
        limits.append(LengthLimit(config.max_batch_tokens + 1, "max_batch_tokens without chunked_prefill"))
    return min(limits)


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Checks the inputs of an engine whose model may have an encoder."""

    config: ServingConfig
    model: ModelConfig
    token_name: TokenName = unnamed

    def split(
        self, prompt_ids: Sequence[int], decoder_ids: Sequence[int] | None, sampling: SamplingParams
    ) -> tuple[tuple[int, ...], Sequence[int]]:
        """Return the encoder's input (empty without an encoder) and the decoder's prompt, not yet checked.

        Raises EmptyPrompt, TokenOutOfRange, PromptTooLong or NotSupported.
        """
        start = self.model.decoder_start_token_id
        if self.model.encoder is None or start is None:
            if decoder_ids is not None:
                message = "decoder_prompt is for models with an encoder, and this one has none; leave it out"
                raise NotSupported(message, param="decoder_prompt")
            return (), prompt_ids
        if sampling.prompt_logprobs is not None:
            message = "prompt_logprobs are not supported for a model with an encoder; leave it out"
            raise NotSupported(message, param="prompt_logprobs")
        check_in_vocabulary(prompt_ids, self.model, self.token_name)
        begun = tuple(decoder_ids or ())
        begun = begun if begun[:1] == (start,) else (start, *begun)
        limit = self._limit(self.model.encoder, len(begun) + sampling.max_tokens)
        if len(prompt_ids) > limit.n_tokens:
            message = f"the prompt has {len(prompt_ids)} tokens, and the encoder can read at most "
            raise PromptTooLong(f"{message}{limit.n_tokens}: {limit.source}", param="prompt")
        return tuple(prompt_ids), begun

    def _limit(self, encoder: Encoder, n_decoder: int) -> LengthLimit:
        """The limit on an encoder's input when the decoder needs room for `n_decoder` tokens."""
        block_size = self.config.block_size
        n_left = self.config.n_blocks - -(-n_decoder // block_size)  # the two share no block
        slots = f"n_slots are {self.config.n_slots}, and the decoder's {n_decoder} tokens need theirs"
        n_decoded, tokens = 1, "max_batch_tokens, less the decoder's first token"
        if not self.config.scheduling.chunked_prefill:
            # After the loss of a worker one iteration runs the encoder and all tokens except the last.
            n_decoded, tokens = n_decoder - 1, "max_batch_tokens without chunked_prefill, less the decoder's"
        limits = [
            LengthLimit(encoder.n_positions, "the encoder has no more positions"),
            LengthLimit(max(0, n_left) * block_size, slots),
            LengthLimit(max(0, self.config.max_batch_tokens - n_decoded), tokens),
        ]
        return min(limits)


def weight_in_bytes(prompt_ids: Sequence[int], sampling: SamplingParams, n_hashes: int = 0) -> int:
    """Estimate a queued request's host memory from above, in bytes, with data derived from its parameters.

    `n_hashes` counts the prompt's blocks that the prefix cache can look up. The estimate reads only lengths,
    no texts. Outputs of one prompt share most of what each is charged for here. Compiled grammars are not
    included: the compiler has its own limit.
    """
    n = _REQUEST + _TOKEN_ID * len(prompt_ids) + _BLOCK_HASH * n_hashes
    n += _BIAS * len(sampling.logit_bias)
    n += _STOP_TOKEN * len(sampling.stop_token_ids)
    n += 2 * _TOKEN_ID * len(sampling.allowed_token_ids or ())
    for text in sampling.stop:
        n += _STOP + _STOP_CHARACTER * len(text)
    for text in sampling.bad_words:
        n += _BAD_WORD + _BAD_CHARACTER * len(text)
    n += (2 * _TOKEN_ID + _CHARACTER) * len(sampling.prediction or "")
    for text in (sampling.guided_json, sampling.guided_regex, sampling.guided_grammar):
        n += _TEXT + _CHARACTER * len(text) if isinstance(text, str) else 0
    if sampling.grammar is not None:
        n += _GRAMMAR_STATE
    for text in sampling.guided_choice or ():
        n += _TEXT + _CHARACTER * len(text)
    return n
