"""What a client sees of one choice beside its text: the prompt before it, and log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from orca_jax.request.request import FinishReason
from orca_jax.service.generation import Piece
from server.gateway.gateway import LiveRequest
from server.http.fields.logprobs import Logprobs, LogprobsWriter
from server.http.fields.token_names import TokenNames
from server.http.fields.token_places import PlacedToken, TokenPlaces, prompt_places


@dataclass(frozen=True, kw_only=True, slots=True)
class Telling:
    """What a request wants told. `prompts` are the texts of its prompts, where they come before the output;
    with `only_prompts` that is all, and the one token that was generated is not shown.
    """

    names: TokenNames
    logprobs: LogprobsWriter | None = None
    prompts: Sequence[str] | None = None
    only_prompts: bool = False

    def written(self, tokens: Sequence[PlacedToken]) -> Logprobs | None:
        """The log-probabilities of these tokens as the client gets them, if it asked for them."""
        return None if self.logprobs is None else self.logprobs(tokens, self.names)


class Shown(NamedTuple):
    """What a client gets of a piece: its text, and the tokens that are told of with it."""

    piece: Piece
    tokens: list[PlacedToken]


class ChoiceOutput:
    """One choice, from its first piece to its last. All that is shown of it is the same, however its output
    was cut into pieces. `prompt` is the text of its prompt, None where that is not wanted; `scored` is the
    request that was asked for the prompt's log-probabilities, of this choice or another of the same prompt.
    """

    def __init__(self, telling: Telling, scored: LiveRequest, prompt: str | None) -> None:
        self._telling = telling
        self._scored = scored
        self._prompt = prompt  # that has yet to come out
        self._places = TokenPlaces(telling.names.tokenizer, len(prompt or ""))

    @property
    def n_to_tell(self) -> int:
        """Tokens of a prompt that are told of with the next piece."""
        return 0 if self._prompt is None else len(self._scored.prompt_ids)

    def take(self, piece: Piece) -> Shown:
        """What to show of the next piece; of the first, once the request that was `scored` has its first."""
        tokens = list[PlacedToken]()
        if self._telling.only_prompts:
            piece = Piece((), "", None if piece.finish_reason is None else FinishReason.LENGTH)
        elif self._telling.logprobs is not None:
            tokens = self._places.take(piece)
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            piece = replace(piece, text=prompt + piece.text)
            tokens = self._prompt_tokens(prompt) + tokens
        return Shown(piece, tokens)

    def _prompt_tokens(self, prompt: str) -> list[PlacedToken]:
        known = self._scored.prompt_logprobs
        if known is None:
            return []
        return prompt_places(self._scored.prompt_ids, prompt.encode(), known, self._telling.names.tokenizer)
