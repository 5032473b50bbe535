"""The values of a config.json, checked by type as a family takes them; and those that most families write."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.model_config import Activation, ModelConfig
from orca_jax.families.strict_json import shown
from orca_jax.families.unread_fields import UNREAD, harm_of, is_common, says_nothing

_T = TypeVar("_T")

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same formula with its constant cut to ten digits
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
HF_ACTIVATIONS: Mapping[Activation, str] = {
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


# Of a model with an encoder; a generation_config.json may have them instead of config.json.
DECODER_IDS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


class ConfigFields:
    """The values of a config file, taken by name and checked by type. JSON's null is as good as absent."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], within: str = "", unread: list[str] | None = None
    ) -> None:
        self.path = path
        self._values = values
        self._within = within
        self._taken: set[str] = set()
        self._unread: list[str] = [] if unread is None else unread  # shared by all sections of a file

    def _bad(self, name: str, rule: str) -> BadModelConfig:
        found = shown(self._values.get(name))
        return BadModelConfig(f"{shown(self.path)}: {self._within}{name}: expected {rule}, found {found}")

    def raw(self, name: str) -> Any:
        self._taken.add(name)
        return self._values.get(name)

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def section(self, name: str) -> "ConfigFields | None":
        """The values of an object in the file; None where it is not there."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(name, "an object")
        return ConfigFields(self.path, cast("dict[str, Any]", value), f"{self._within}{name}.", self._unread)

    def with_values(self, values: Mapping[str, Any], *, default: bool) -> "ConfigFields":
        """The same section with further values, as defaults or in place of those that it has."""
        both = {**values, **self._values} if default else {**self._values, **values}
        return ConfigFields(self.path, both, self._within, self._unread)

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of the fields that `leave_others` left unused and that are worth naming."""
        return tuple(dict.fromkeys(self._unread))

    def leave(self, name: str) -> None:
        """Leave a field unused, and note its name."""
        self._taken.add(name)
        self._unread.append(f"{self._within}{name}")

    def leave_others(self, unread: Mapping[str, str]) -> None:
        """Leave all fields that were not taken unused, and note the names of those that few files have.

        Raises UnsupportedModel for a field that by its name and value changes what a model computes
        (unread_fields.py), unless it is in `unread`, by name with the reason why it does not.
        """
        for name in sorted(set(self._values) - self._taken):
            value = self._values[name]
            harm = None if name in unread or name in UNREAD else harm_of(name, value)
            if harm is not None:
                raise UnsupportedModel(
                    f"{shown(self.path)}: {self._within}{shown(name)} is {shown(value)}: this field is not "
                    f"known here, and may change {harm.changes}; remove it if the model computes the same "
                    "without it"
                )
            if not says_nothing(value) and not is_common(name):
                self._unread.append(f"{self._within}{shown(name)}")

    def refuse_others(self, harmless: Iterable[str]) -> None:
        """Raise UnsupportedModel for any field not taken, unless it is null, false, empty or `harmless`."""
        for name in sorted(set(self._values) - self._taken - set(harmless)):
            value = self._values[name]
            if not says_nothing(value):
                raise UnsupportedModel(
                    f"{shown(self.path)}: {self._within}{shown(name)} is {shown(value)}: this field is not "
                    "known, and may change what the model computes; remove it if it does not"
                )

    def whole(self, name: str, alias: str = "", default: int | None = None) -> int:
        """A whole number under its name, or under the general one that transformers takes for it too."""
        if self.raw(alias) is not None:
            if self.raw(name) is not None and self.raw(name) != self.raw(alias):
                raise BadModelConfig(
                    f"{shown(self.path)} disagrees with itself: {name} is {shown(self.raw(name))}, "
                    f"{alias} is {shown(self.raw(alias))}"
                )
            name = alias
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, "a whole number")
        return value

    def whole_or_null(self, name: str, default: int | None) -> int | None:
        """A whole number, or None for null; `default` where the file has no such field."""
        if self.raw(name) is not None:
            return self.whole(name)
        return None if name in self._values else default

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
            raise self._bad(name, "a number")  # which an infinity, or an integer of 400 digits, is not
        return value

    def number_or_null(self, name: str, default: float | None) -> float | None:
        """A number, or None for null; `default` where the file has no such field."""
        if self.raw(name) is not None:
            return self.number(name, 0.0)
        return None if name in self._values else default

    def required_number(self, name: str) -> float:
        """A number that must be there."""
        if self.raw(name) is None:
            raise self._bad(name, "a number")
        return self.number(name, 0.0)

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._bad(name, "text")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty where the file says nothing."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(one, int | float) and not isinstance(one, bool) for one in cast("list[object]", value)
        ):
            raise self._bad(name, "a list of numbers")
        return tuple(cast("list[float]", value))

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; None where the file says nothing."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(one, str) for one in cast("list[object]", value)
        ):
            raise self._bad(name, "a list of names")
        return tuple(cast("list[str]", value))

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One token id or a list of them; None where the file says nothing, or has an empty list."""
        value = self.raw(name)
        if value is None or value == []:
            return None
        ids = value if isinstance(value, list) else [value]
        if len(ids) > 1024 or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._bad(name, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def choice(self, name: str, choices: Mapping[str, _T], default: str) -> _T:
        """What a text stands for. Raises UnsupportedModel where it is none of `choices`."""
        text = self.text(name, default)
        if text not in choices:
            raise UnsupportedModel(
                f"{shown(self.path)}: {self._within}{name}: expected one of {', '.join(choices)}, "
                f"found '{shown(text)}'"
            )
        return choices[text]

    def activation(self, name: str, default: str) -> Activation:
        return self.choice(name, _ACTIVATIONS, default)

    def must_be(self, name: str, value: bool, meaning: str) -> None:
        """Refuse an option that changes what is computed."""
        if self.flag(name, value) is not value:
            wanted, found = str(value).lower(), str(not value).lower()
            raise UnsupportedModel(
                f"{shown(self.path)}: {self._within}{name}: expected {wanted}, found {found}; "
                f"{meaning} is not supported"
            )

    def special_ids(self) -> dict[str, Any]:
        bos = self.token_ids("bos_token_id")
        return {
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": self.token_ids("eos_token_id") or (),
        }

    def decoder_ids(self, start: int | None) -> dict[str, Any]:
        """What a model with an encoder begins and ends its output with; `start` where no file says it."""
        found: dict[str, Any] = {}
        for name in DECODER_IDS:
            ids = self.token_ids(name)
            if ids is not None and len(ids) > 1:
                where = f"{shown(self.path)}: {self._within}{name}"
                raise UnsupportedModel(f"{where} is {shown(list(ids))}; only one id is supported")
            found[name] = ids[0] if ids else None
        return found | ({"decoder_start_token_id": start} if found["decoder_start_token_id"] is None else {})


def decoder_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that every family with an encoder writes the same way."""
    return {"is_encoder_decoder": True} | {name: getattr(model, name) for name in DECODER_IDS}


def general_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that every family writes the same way."""
    return {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids) or None,
        "tie_word_embeddings": model.embedding.tied,
        "vocab_size": model.vocab_size,
    }
