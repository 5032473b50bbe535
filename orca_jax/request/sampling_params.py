"""Sampling and output parameters of a request.

The one definition for the offline API, both endpoints and the command line; docs/generation.md gives the
order in which they are applied.
"""

# Users' values are checked at run time too, whatever the annotations promise.
# pyright: reportUnnecessaryIsInstance=false, reportUnnecessaryComparison=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from orca_jax.errors import InvalidSamplingParameter

MAX_TOP_LOGPROBS = 20
MAX_BEAMS = 16
MAX_BIASES = 4096
MAX_BAD_WORDS = 8192  # characters in total: an output is compared with each at every token

# Devices compute in float32. A divisor, or a value that probabilities are compared with, is kept far enough
# from zero to be representable there: logits below 1e28 stay finite.
TEMPERATURE_RANGE = (1e-10, 100.0)  # and 0, which divides by nothing
TOP_P_RANGE = (1e-10, 1.0)
REPETITION_RANGE = (0.01, 100.0)

_SHORT = 80  # characters of a rejected value in a message
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = _SHORT
_MAX_GRAMMAR = 1 << 16  # characters
_GRAMMARS = ("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar")
MAX_LENGTH_PENALTY = 10.0
# Parameters that change, cut off or return probabilities, or end an output by its text.
_NOT_WITH_BEAMS = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("min_tokens", "stop", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", *_GRAMMARS),
    "return_routed_experts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Checked when made; raises InvalidSamplingParameter, which names the field.

    Sampling: `temperature` 0 is greedy, otherwise it is 1e-10 to 100; `top_k` 0 (or -1), `top_p` 1 and
    `min_p` 0 keep every token. `repetition_penalty` (0.01 to 100) 1, `frequency_penalty` 0,
    `presence_penalty` 0 and an empty `logit_bias` (token id to the value added) change nothing. `seed` None:
    the service draws one and reports it.

    Allowed tokens: `allowed_token_ids` (None: all), `bad_words` (forbidden texts, at most 8,192 characters in
    total), and one grammar: `guided_json` (a JSON schema), `guided_json_object` (any JSON object),
    `guided_regex`, `guided_choice` (one of these texts), `guided_grammar` (Lark syntax). The end of the
    grammar ends the request, and the grammar wins over `min_tokens` and `bad_words` if they leave no token.

    Stopping: after `max_tokens` output tokens (as in OpenAI's API, without the prompt's), at an
    end-of-sequence token unless `ignore_eos`, at one of `stop_token_ids`, before one of the texts `stop`;
    the last three only once there are `min_tokens`.

    Extra output: `logprobs` n returns the log-probability of each output token and of the n most likely ones,
    `prompt_logprobs` the same for the prompt. They are the model's, before any of the above is applied.
    `return_routed_experts` returns the experts that every token of prompt and output, but the last, chose in
    a mixture of experts; such a request does not begin with cached tokens, whose experts are not known.

    Speculation changes no token (docs/speculation.md): with `speculative` "off" the engine drafts nothing of
    this output, and `prediction` is a text that the output is expected to follow, which is drafted first.

    `n` outputs are generated from one prompt; output i has the seed `seed + i`.

    With `use_beam_search` they are the `n` best of a search with `best_of` beams (None: `n`; at most 16), as
    Hugging Face's `num_beams`: best by log-probability over length to the power of `length_penalty` (-10 to
    10). `early_stopping` says when the search ends once it has as many complete outputs as beams: true, at
    once; false, when no beam has a better score; "never", when none can get one. A search draws nothing, and
    refuses parameters that change probabilities or end outputs by their text (docs/generation.md).
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    guided_json: str | Mapping[str, Any] | bool | None = field(default=None, hash=False)
    guided_json_object: bool = False
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    speculative: Literal["off"] | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        self._integer("n", 1, 1 << 16)
        self._integer("max_tokens", 1, 1 << 30)
        self._integer("min_tokens", 0, 1 << 30)
        self._real("temperature", *TEMPERATURE_RANGE, or_zero=True)
        self._real("top_p", *TOP_P_RANGE)
        self._integer("top_k", -1, 1 << 30)
        if self.top_k == -1:
            self._set("top_k", 0)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", *REPETITION_RANGE)
        self._real("frequency_penalty", -2.0, 2.0)
        self._real("presence_penalty", -2.0, 2.0)
        if self.logit_bias != {}:
            self._set("logit_bias", self._checked_bias())
        if self.stop != ():
            self._set("stop", self._texts("stop", 16, one_text=True))
        if self.bad_words != ():
            self._set("bad_words", self._checked_words())
        if self.stop_token_ids != ():
            self._set("stop_token_ids", self._token_ids("stop_token_ids", 0, 256))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", self._token_ids("allowed_token_ids", 1, 1 << 22))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_TOP_LOGPROBS)
        for name in ("ignore_eos", "return_routed_experts", "guided_json_object", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "must be true or false")
        self._check_grammar()
        if self.seed is not None:
            self._integer("seed", -(1 << 63), (1 << 63) - self.n)
        if self.speculative not in (None, "off"):
            self._refuse("speculative", "must be 'off', or left out; the engine's options name the drafter")
        if not isinstance(self.prediction, str | None):
            self._refuse("prediction", "must be a text")
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"must be at most max_tokens, which is {self.max_tokens}")
        self._check_beams()

    @property
    def n_beams(self) -> int:
        """The beams of a beam search."""
        return self.n if self.best_of is None else self.best_of

    @property
    def grammar(self) -> str | None:
        """The name of the field that asks for a grammar, or None."""
        return next((name for name in _GRAMMARS if getattr(self, name) not in (None, False)), None)

    def choices(self, *, prompt_once: bool = False) -> "list[SamplingParams]":
        """The parameters of each of the `n` outputs: with n 1, and with their own seed if there is one.

        With `prompt_once` only the first asks for the prompt's log-probabilities, which are the same for all.
        A beam search is one request, which has all outputs.
        """
        if self.n == 1 or self.use_beam_search:
            return [self]
        choices: list[SamplingParams] = []
        for i in range(self.n):
            choice = copy.copy(self)  # its values are already checked
            choice._set("n", 1)
            choice._set("seed", None if self.seed is None else self.seed + i)
            if prompt_once and i:
                choice._set("prompt_logprobs", None)
            choices.append(choice)
        return choices

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise InvalidSamplingParameter, naming the field, for a token id outside the model's vocabulary."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(self, name)
            if token_ids and (largest := max(token_ids)) >= vocab_size:
                message = f"{name} has {largest}; the model's token ids go from 0 to {vocab_size - 1}"
                raise InvalidSamplingParameter(message, param=name)

    # The checks of the fields.

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse(self, name: str, rule: str) -> None:
        value = _short(getattr(self, name))
        raise InvalidSamplingParameter(f"{name} is {value}; it {rule}", param=name)

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not _DEFAULTS[name] and not _is_whole(value, low, high):
            self._refuse(name, f"must be a whole number from {low} to {high}")

    def _real(self, name: str, low: float, high: float, *, or_zero: bool = False) -> None:
        value = getattr(self, name)
        if value is _DEFAULTS[name]:
            return
        if not _is_number(value) or not (low <= value <= high or (or_zero and value == 0)):
            start = "0, or a number" if or_zero else "a number"
            self._refuse(name, f"must be {start} from {low:g} to {high:g}")

    def _checked_words(self) -> tuple[str, ...]:
        words = self._texts("bad_words", 256)
        n_characters = sum(map(len, words))
        if n_characters > MAX_BAD_WORDS:
            message = f"bad_words has {n_characters} characters; its texts may have {MAX_BAD_WORDS} together"
            raise InvalidSamplingParameter(message, param="bad_words")
        return words

    def _checked_bias(self) -> dict[int, float]:
        """`logit_bias` with integer keys: in JSON keys are strings."""
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_BIASES:
            rule = f"must map up to {MAX_BIASES} token ids to numbers from -100 to 100"
            self._refuse("logit_bias", rule)
        bias = dict[int, float]()
        for key, value in self.logit_bias.items():
            token_id: object = key
            if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
                token_id = int(key)
            if not _is_whole(token_id, 0, 1 << 30) or not _is_number(value) or not -100 <= value <= 100:
                message = f"logit_bias has {_short(key)}: {_short(value)}; it must map token ids to "
                raise InvalidSamplingParameter(message + "numbers from -100 to 100", param="logit_bias")
            assert isinstance(token_id, int)
            if token_id in bias:
                message = f"logit_bias has token id {token_id} twice; give it once"
                raise InvalidSamplingParameter(message, param="logit_bias")
            bias[token_id] = float(value)
        return bias

    def _texts(self, name: str, most: int, *, one_text: bool = False) -> tuple[str, ...]:
        value = getattr(self, name)
        if one_text and isinstance(value, str):
            value = (value,)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > most:
            count = f"{len(value)} texts" if isinstance(value, tuple | list) else _short(value)
            alternative = "a text or " if one_text else ""
            message = f"{name} is {count}; it must be {alternative}a list of up to {most} texts"
            raise InvalidSamplingParameter(message, param=name)
        for text in value:
            if not isinstance(text, str) or not 1 <= len(text) <= 1024:
                message = f"{name} has {_short(text)}; each of its texts must have 1 to 1024 characters"
                raise InvalidSamplingParameter(message, param=name)
        return tuple(value)

    def _token_ids(self, name: str, least: int, most: int) -> tuple[int, ...]:
        value = getattr(self, name)
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not is_list or not least <= len(value) <= most:
            count = f"a list of {len(value)}" if is_list else _short(value)
            message = f"{name} is {count}; it must be a list of {least} to {most} token ids"
            raise InvalidSamplingParameter(message, param=name)
        token_ids: dict[int, None] = {}
        for token_id in value:
            if not _is_whole(token_id, 0, 1 << 30):
                message = f"{name} has {_short(token_id)}; token ids are whole numbers from 0"
                raise InvalidSamplingParameter(message, param=name)
            assert isinstance(token_id, int)
            token_ids[token_id] = None
        return tuple(token_ids)

    def _check_beams(self) -> None:
        if self.best_of is not None:
            self._integer("best_of", 1, 1 << 16)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            self._refuse("early_stopping", 'must be true, false or "never"')
        self._real("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not self.use_beam_search:
            if self.best_of not in (None, 1, self.n):
                self._refuse("best_of", f"must be 1 or n, which is {self.n}, without use_beam_search")
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _DEFAULTS[name]:
                    self._refuse(name, "needs use_beam_search")
            return
        if not self.n <= self.n_beams <= MAX_BEAMS:
            name = "n" if self.best_of is None else "best_of"
            self._refuse(name, f"must be from n to {MAX_BEAMS} beams with use_beam_search, and n is {self.n}")
        if self.temperature not in (0, 1):
            self._refuse("temperature", "must be 0 or 1 with use_beam_search, which draws nothing")
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value is not False and value != _DEFAULTS[name]:
                self._refuse(name, "does not go with use_beam_search; leave it out")

    def _check_grammar(self) -> None:
        given = [name for name in _GRAMMARS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            message = f"{given[0]} and {given[1]} are both given; an output follows one grammar"
            raise InvalidSamplingParameter(message, param=given[1])
        if given and self.allowed_token_ids is not None:
            message = f"allowed_token_ids and {given[0]} are both given; give one of them"
            raise InvalidSamplingParameter(message, param="allowed_token_ids")
        for name in ("guided_regex", "guided_grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= _MAX_GRAMMAR):
                self._refuse(name, f"must be a text of 1 to {_MAX_GRAMMAR} characters")
        if self.guided_choice is not None:
            if not isinstance(self.guided_choice, tuple | list) or not self.guided_choice:
                self._refuse("guided_choice", "must be a list of 1 to 1024 texts")
            self._set("guided_choice", self._texts("guided_choice", 1024))
        if self.guided_json is not None and self.guided_json is not False:
            self._set("guided_json", self._json_schema())

    def _json_schema(self) -> str:
        """`guided_json` as JSON text, whatever its type."""
        schema = self.guided_json
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            parsed = json.loads(text) if len(text) <= _MAX_GRAMMAR else None
        except (TypeError, ValueError, RecursionError) as error:
            message = f"guided_json is not a JSON schema: {error!s:.{_SHORT}}"
            raise InvalidSamplingParameter(message, param="guided_json") from error
        if not isinstance(parsed, dict | bool) or parsed is False:
            rule = f"must be a JSON schema: an object, of up to {_MAX_GRAMMAR} characters of JSON"
            self._refuse("guided_json", rule)
        return text


_DEFAULTS: dict[str, Any] = {
    one.name: one.default if one.default_factory is MISSING else one.default_factory()
    for one in fields(SamplingParams)
}


def _short(value: object) -> str:
    """A rejected value for a message; reads no more of it than is shown."""
    return _shown.repr(value)[:_SHORT]


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)  # isfinite cannot convert a very large int


_NOTHING_RECOMMENDED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the `given` fields of SamplingParams with a model's `defaults` for the others.

    A beam search draws nothing, so it ignores a model's sampling defaults.
    """
    if given.get("use_beam_search"):
        return {**defaults, **_NOTHING_RECOMMENDED, **given}
    return {**defaults, **given}
