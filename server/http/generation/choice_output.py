"""Additions to a choice's text in a response: the echoed prompt, log-probabilities and token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from orca_jax.request.request import FinishReason
from orca_jax.request.token_text import TokenText
from orca_jax.service.output import Piece
from server.gateway.gateway import LiveRequest
from server.http.fields.logprobs import (
    Logprobs,
    LogprobsWriter,
    PlacedToken,
    TokenNames,
    TokenPlaces,
    prompt_places,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputExtras:
    """What a request asked for besides output text.

    `shown` has the text of special tokens that are part of the output text. `write_logprobs` writes
    log-probabilities, None if they were not requested. `prompts` are the prompts' texts if they are to be
    echoed before the output. With `only_prompts` nothing else is shown: the one token that was generated is
    left out. With `token_ids` those of the prompt and of the output are returned.
    """

    names: TokenNames
    shown: Mapping[int, TokenText] = field(default_factory=dict[int, TokenText])
    write_logprobs: LogprobsWriter | None = None
    prompts: Sequence[str] | None = None
    only_prompts: bool = False
    token_ids: bool = False

    def logprobs(self, tokens: Sequence[PlacedToken]) -> Logprobs | None:
        """The log-probabilities of these tokens in the response's form, if they were requested."""
        return None if self.write_logprobs is None else self.write_logprobs(tokens, self.names)


class ShownPiece(NamedTuple):
    """A piece as a client sees it, and the tokens whose log-probabilities come with it."""

    piece: Piece
    tokens: list[PlacedToken]


class ChoiceOutput:
    """One choice, from its first piece to its last. What is shown does not depend on how the output is split.

    `prompt` is the text of the prompt to echo, or None. `scored` is the request that computes the prompt's
    log-probabilities: this choice's, or that of another choice of the same prompt.
    """

    def __init__(self, extras: OutputExtras, scored: LiveRequest, prompt: str | None) -> None:
        self._extras = extras
        self._scored = scored
        self._prompt = prompt  # None once it has been shown
        tokenizer = extras.names.tokenizer
        continuing = tokenizer is None or tokenizer.have_text(scored.prompt_ids)
        self._places = TokenPlaces(tokenizer, len(prompt or ""), continuing=continuing, shown=extras.shown)

    @property
    def n_prompt_tokens(self) -> int:
        """Prompt tokens that will be shown with the next piece."""
        return 0 if self._prompt is None else len(self._scored.prompt_ids)

    def take(self, piece: Piece) -> ShownPiece:
        """What to show of the next piece. Call it only once the `scored` request has its first piece."""
        tokens = list[PlacedToken]()
        if self._extras.only_prompts:
            reason = None if piece.finish_reason is None else FinishReason.LENGTH
            piece = Piece((), "", reason, weights_version=piece.weights_version)
        elif self._extras.write_logprobs is not None:
            tokens = self._places.take(piece)
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            piece = replace(piece, text=prompt + piece.text)
            tokens = self._prompt_tokens(prompt) + tokens
        return ShownPiece(piece, tokens)

    def _prompt_tokens(self, prompt: str) -> list[PlacedToken]:
        logprobs = self._scored.prompt_logprobs
        if logprobs is None:
            return []
        return prompt_places(self._scored.prompt_ids, prompt.encode(), logprobs, self._extras.names.tokenizer)
