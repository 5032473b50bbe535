"""What becomes of sampling parameters once model and tokenizer are known: compiled once, begun per output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from orca_jax.errors import NotSupported
from orca_jax.families.model_config import ModelConfig
from orca_jax.grammar.constraint import Constraint, ConstraintRules
from orca_jax.grammar.grammar import GrammarCompiler
from orca_jax.request.bad_words import BadWords
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.stop_strings import StopStrings
from orca_jax.request.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class OutputRules:
    """Checked and compiled; as many outputs as one likes may begin with them, from any thread.

    What is large in them is made once and shared by all `choices`.
    """

    sampling: SamplingParams
    end_token_ids: frozenset[int]  # a token that ends the output
    _constraints: ConstraintRules
    _stops: StopStrings | None
    _tokenizer: Tokenizer | None

    def choices(self, *, prompt_once: bool = False) -> "list[OutputRules]":
        """Those of each of the `n` outputs that were asked for, as in SamplingParams."""
        return [replace(self, sampling=one) for one in self.sampling.choices(prompt_once=prompt_once)]

    def text_stream(self, prompt_ids: Sequence[int] = ()) -> TextStream | None:
        """Decodes the output that follows this prompt; None if the model has no tokenizer."""
        if self._tokenizer is None:
            return None
        return TextStream(
            self._tokenizer,
            self._stops or (),
            min_tokens=self.sampling.min_tokens,
            continuing=self._tokenizer.have_text(prompt_ids),
        )

    def constraint(self) -> Constraint | None:
        """Which tokens may come, of an output that begins."""
        return self._constraints.begin()


class RuleMaker:
    """Makes OutputRules for one model. Safe to use from many threads."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def rules(self, sampling: SamplingParams) -> OutputRules:
        """The rules; a grammar that was not compiled lately takes up to seconds.

        Raises InvalidSamplingParameter, and NotSupported where text is asked for and there is no tokenizer.
        """
        sampling.check_token_ids(self._model.vocab_size)
        needs_text = next((n for n in ("stop", "bad_words") if getattr(sampling, n)), sampling.grammar)
        if needs_text is not None and self._tokenizer is None:
            message = f"{needs_text} needs text, and this model has no tokenizer"
            raise NotSupported(message, param=needs_text)
        end_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            end_token_ids |= frozenset(self._model.eos_token_ids)
        constraints = ConstraintRules(
            vocab_size=self._model.vocab_size,
            # An end of sequence is none of the text even where it does not end the output.
            end_token_ids=end_token_ids | frozenset(self._model.eos_token_ids),
            min_tokens=sampling.min_tokens,
            bad_words=BadWords(self._sequences(sampling.bad_words)),
            allowed_token_ids=sampling.allowed_token_ids,
            grammar=None if sampling.grammar is None else self._grammars.compile(sampling),
        )
        if sampling.allowed_token_ids is not None:
            _ = constraints.base  # made here: it takes time with each of them, and is wanted by the scheduler
        stops = StopStrings(sampling.stop) if sampling.stop else None
        return OutputRules(sampling, end_token_ids, constraints, stops, self._tokenizer)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Made for the first request that has a grammar: it reads the whole vocabulary."""
        assert self._tokenizer is not None
        model = self._model
        return GrammarCompiler(
            self._tokenizer, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )

    def _sequences(self, words: Sequence[str]) -> Iterator[list[int]]:
        """The tokens of each word: at the beginning of a text, inside one, and after a space."""
        if self._tokenizer is None:
            return
        for text in (text for word in words for text in (word, f" {word.lstrip()}")):
            forms = [self._tokenizer.encode(text, add_special_tokens=False)]
            if self._tokenizer.drops_first_space:
                forms.append(self._tokenizer.encode_inside(text))
            yield from filter(None, forms)
