"""Sampling parameters checked and compiled for a model and its tokenizer: once per prompt, not per output."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from orca_jax.errors import NotSupported
from orca_jax.families.model_config import ModelConfig
from orca_jax.grammar.constraint import BadWords, Constraint, ConstraintRules
from orca_jax.grammar.grammar import GrammarCompiler
from orca_jax.iteration.rows.beams import Beams
from orca_jax.iteration.rows.drafted import Drafted, takes_drafts
from orca_jax.iteration.rows.scored import ScoredOutput
from orca_jax.request.beam_search import begin_search, check_beams
from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.request import PLAIN, RowKind
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.stop_strings import StopStrings
from orca_jax.request.token_text import TextDecoder, TokenText
from orca_jax.request.tokenizer import TextStream, Tokenizer
from orca_jax.scheduling.admission import check_routing
from orca_jax.speculation.drafter import Speculation
from orca_jax.speculation.prediction import MOST_PREDICTED, Prediction


@dataclass(frozen=True, slots=True)
class OutputRules:
    """Checked and compiled sampling parameters, for any number of outputs. Safe to use from any thread.

    The large parts are made once and shared by all `choices`.
    """

    sampling: SamplingParams
    end_token_ids: frozenset[int]  # the tokens that end the output
    _constraints: ConstraintRules | None
    _stops: StopStrings | None
    _tokenizer: Tokenizer | None
    _forced: Mapping[int, int]  # the model's forced tokens by index in the output
    shown: Mapping[int, TokenText]  # special tokens that belong to the text
    _speculation: Speculation | None  # the engine's, if outputs by these rules are drafted
    prediction: Prediction | None = None  # if it is drafted
    form: OutputForm = PLAIN_TEXT  # that they were made for

    def choices(self, *, prompt_once: bool = False) -> "list[OutputRules]":
        """The rules of each of the `n` outputs requested; see `SamplingParams.choices`."""
        choices = self.sampling.choices(prompt_once=prompt_once)
        return [
            self if sampling is self.sampling else replace(self, sampling=sampling) for sampling in choices
        ]

    def text_stream(self, prompt_ids: Sequence[int] = ()) -> TextStream | None:
        """A decoder for an output that follows this prompt; None if the model has no tokenizer."""
        if self._tokenizer is None:
            return None
        return TextStream(
            self._tokenizer,
            self._stops or (),
            min_tokens=self.sampling.min_tokens,
            continuing=self._tokenizer.have_text(prompt_ids),
            shown=self.shown,
        )

    def follow_text(self, prompt_ids: Sequence[int]) -> bool:
        """Whether an output after this prompt continues a text; see `Tokenizer.have_text`."""
        return self._tokenizer is None or self._tokenizer.have_text(prompt_ids)

    def text_decoder(self, *, continuing: bool) -> TextDecoder | None:
        """A decoder for the tokens of an output, without stop strings; None if there is no tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.text_decoder(continuing=continuing)

    def token_text(self, token_id: int) -> TokenText | None:
        """A token's share of the text; None for a token without text."""
        shown = self.shown.get(token_id)
        return shown if shown or self._tokenizer is None else self._tokenizer.token_text(token_id)

    def kind(self, scored_ids: Sequence[int] = ()) -> RowKind:
        """The row kind of a new request; `scored_ids` is its output if that is only scored."""
        if self.sampling.use_beam_search:
            return Beams(begin_search(self.sampling, self.end_token_ids, self._forced))
        if scored_ids:
            return ScoredOutput(scored_ids)
        return PLAIN if self._speculation is None else Drafted(self._speculation, self.prediction)

    def constraint(self) -> Constraint | None:
        """The constraint of a new output; None if every token is always allowed."""
        return None if self._constraints is None else self._constraints.begin()


class RuleMaker:
    """Makes OutputRules for one model, whose engine may draft outputs. Safe to use from many threads."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        max_batch_size: int = 1 << 20,
        speculation: Speculation | None = None,
    ) -> None:
        self._model = model
        self._speculation = speculation
        self._max_batch_size = max_batch_size
        self._tokenizer = tokenizer

    def rules(self, sampling: SamplingParams, form: OutputForm = PLAIN_TEXT) -> OutputRules:
        """Check and compile. A grammar that is not cached may take seconds.

        Raises InvalidSamplingParameter, and NotSupported if a parameter needs a tokenizer and there is none.
        """
        sampling.check_token_ids(self._model.vocab_size)
        check_routing(sampling, self._model)
        needs_text = next((n for n in ("stop", "bad_words") if getattr(sampling, n)), sampling.grammar)
        if needs_text is not None and self._tokenizer is None:
            message = f"{needs_text} needs a tokenizer, and this model has none"
            raise NotSupported(message, param=needs_text)
        end_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            end_token_ids |= frozenset(self._model.eos_token_ids)
        if sampling.use_beam_search:
            sizes = {"vocab_size": self._model.vocab_size, "max_batch_size": self._max_batch_size}
            check_beams(sampling, end_token_ids, **sizes)
        # A beam search applies forced tokens itself, and has no other constraint.
        beams = sampling.use_beam_search
        constraints = None if beams else self._constraints(sampling, end_token_ids, form)
        stops = StopStrings(sampling.stop) if sampling.stop else None
        forced = self._forced(sampling.max_tokens)
        shown = {} if self._tokenizer is None else self._tokenizer.special_texts(form.shown)
        speculation = self._speculation if not beams and takes_drafts(sampling) else None
        prediction = None if speculation is None else self._prediction(sampling.prediction)
        return OutputRules(
            sampling,
            end_token_ids,
            constraints,
            stops,
            self._tokenizer,
            forced,
            shown,
            speculation,
            prediction,
            form,
        )

    def _prediction(self, text: str | None) -> Prediction | None:
        """A predicted output in tokens, as far as it is drafted."""
        if not text or self._tokenizer is None:
            return None
        beginning = text[: MOST_PREDICTED * self._tokenizer.max_token_length]
        return Prediction(self._tokenizer.encode(beginning, add_special_tokens=False))

    def _constraints(
        self, sampling: SamplingParams, end_token_ids: frozenset[int], form: OutputForm
    ) -> ConstraintRules | None:
        """The rules for the next token; None for most requests, which allow every token."""
        allowed, forced = sampling.allowed_token_ids, self._forced(sampling.max_tokens)
        has_grammar = sampling.grammar is not None or form.lark is not None
        unbound = not (sampling.min_tokens or sampling.bad_words or has_grammar or forced)
        if unbound and allowed is None:
            return None
        constraints = ConstraintRules(
            vocab_size=self._model.vocab_size,
            # With ignore_eos an end-of-sequence token does not end the output, but it is still not text.
            end_token_ids=end_token_ids | frozenset(self._model.eos_token_ids),
            min_tokens=sampling.min_tokens,
            bad_words=BadWords(self._sequences(sampling.bad_words)),
            allowed_token_ids=allowed,
            grammar=self._grammars.compile(sampling, form) if has_grammar else None,
            forced=forced,
        )
        if allowed is not None:
            _ = constraints.base  # takes time per allowed token: computed now, so the scheduler does not wait
        return constraints

    def _forced(self, max_tokens: int) -> dict[int, int]:
        """The model's forced tokens by index in the output; in an output of one token, the last counts."""
        first, last = self._model.forced_bos_token_id, self._model.forced_eos_token_id
        forced = {} if first is None else {0: first}
        return forced if last is None else forced | {max_tokens - 1: last}

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Made for the first request with a grammar, because it reads the whole vocabulary."""
        assert self._tokenizer is not None
        model = self._model
        return GrammarCompiler(
            self._tokenizer, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )

    def _sequences(self, words: Sequence[str]) -> Iterator[list[int]]:
        """The token sequences of each word: at the start of a text, within it, and after a space.

        A sequence with a token outside the model's vocabulary is never generated, so it is left out.
        """
        if self._tokenizer is None:
            return
        n_tokens = self._model.vocab_size
        for text in (text for word in words for text in (word, f" {word.lstrip()}")):
            forms = [self._tokenizer.encode(text, add_special_tokens=False)]
            if self._tokenizer.drops_first_space:
                forms.append(self._tokenizer.encode_inside(text))
            yield from (form for form in forms if form and max(form) < n_tokens)
