"""Reads the fields of a config.json, checked by type, and writes the fields that families have in common."""

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
    "relu2": "relu2",
}
HF_ACTIVATIONS: Mapping[Activation, str] = {
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "relu2": "relu2",
    "xielu": "xielu",
}


# Fields of a model with an encoder, which generation_config.json may have instead of config.json.
DECODER_IDS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


class ConfigFields:
    """The fields of a config file, read by name and checked by type. A null counts as absent.

    The object remembers which fields were read, so that the rest can be refused or named.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], within: str = "", unread: list[str] | None = None
    ) -> None:
        self.path = path
        self._values = values
        self._within = within
        self._read: set[str] = set()
        self._unread: list[str] = [] if unread is None else unread  # shared by all sections of a file

    def _bad(self, name: str, rule: str) -> BadModelConfig:
        found = shown(self._values.get(name))
        return BadModelConfig(f"{shown(self.path)}: {self._within}{name}: expected {rule}, found {found}")

    def full_name(self, name: str = "") -> str:
        """The name of a field, or of the section itself, with those of the sections around it."""
        return f"{self._within}{name}".rstrip(".")

    def raw(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def section(self, name: str) -> "ConfigFields | None":
        """The fields of an object in the file; None where the file lacks it."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(name, "an object")
        return ConfigFields(self.path, cast("dict[str, Any]", value), f"{self._within}{name}.", self._unread)

    def with_values(self, values: Mapping[str, Any], *, default: bool) -> "ConfigFields":
        """The same section with `values` added, as defaults or in place of the section's own.

        A field that is read of the one counts as read of the other.
        """
        both = {**values, **self._values} if default else {**self._values, **values}
        found = ConfigFields(self.path, both, self._within, self._unread)
        found._read = self._read
        return found

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of unread fields that are worth reporting."""
        return tuple(dict.fromkeys(self._unread))

    def leave(self, name: str) -> None:
        """Leave a field unread, and note its name."""
        self._read.add(name)
        self._unread.append(f"{self._within}{name}")

    def leave_others(self, unread: Mapping[str, str]) -> None:
        """Leave all other fields unread, and note the names of uncommon ones.

        Raises UnsupportedModel for a field whose name and value suggest that it changes what a model computes
        (unread_fields.py). `unread` has names that do not, each with the reason.
        """
        for name in sorted(set(self._values) - self._read):
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
        """Raise UnsupportedModel for any unread field, unless it is null, false, empty or `harmless`."""
        for name in sorted(set(self._values) - self._read - set(harmless)):
            value = self._values[name]
            if not says_nothing(value):
                raise UnsupportedModel(
                    f"{shown(self.path)}: {self._within}{shown(name)} is {shown(value)}: this field is not "
                    "known, and may change what the model computes; remove it if it does not"
                )

    def whole(self, name: str, alias: str = "", default: int | None = None) -> int:
        """A whole number under `name`, or under transformers' general name `alias`."""
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
        return self._typed(name, bool, "true or false", default)

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e12 < value < 1e12:
            raise self._bad(name, "a number")  # not an infinity, or an integer of 400 digits
        return value

    def number_or_null(self, name: str, default: float | None) -> float | None:
        """A number, or None for null; `default` where the file has no such field."""
        if self.raw(name) is not None:
            return self.number(name, 0.0)
        return None if name in self._values else default

    def required_number(self, name: str) -> float:
        """A number that the file must have."""
        if self.raw(name) is None:
            raise self._bad(name, "a number")
        return self.number(name, 0.0)

    def text(self, name: str, default: str) -> str:
        return self._typed(name, str, "text", default)

    def _typed(self, name: str, kind: type[_T], rule: str, default: _T) -> _T:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._bad(name, rule)
        return value

    def _list(self, name: str, rule: str) -> list[object]:
        value = self.raw(name)
        if value is not None and not isinstance(value, list):
            raise self._bad(name, rule)
        return cast("list[object]", value or [])

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty where the file lacks it."""
        found = self._list(name, "a list of numbers")
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in found):
            raise self._bad(name, "a list of numbers")
        return tuple(cast("list[float]", found))

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; None where the file lacks it."""
        found = self._list(name, "a list of names")
        if not all(isinstance(one, str) for one in found):
            raise self._bad(name, "a list of names")
        return None if self.raw(name) is None else tuple(cast("list[str]", found))

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One token id or a list of them; None where the file has none, or an empty list."""
        value = self.raw(name)
        if value is None or value == []:
            return None
        ids = value if isinstance(value, list) else [value]
        if len(ids) > 1024 or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._bad(name, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def choice(self, name: str, choices: Mapping[str, _T], default: str) -> _T:
        """Look a text up in `choices`. Raises UnsupportedModel for any other text."""
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
        """Raise UnsupportedModel unless a flag that changes the computation is `value`, or missing."""
        if self.flag(name, value) is not value:
            wanted, found = str(value).lower(), str(not value).lower()
            raise UnsupportedModel(
                f"{shown(self.path)}: {self._within}{name}: expected {wanted}, found {found}; "
                f"{meaning} is not supported"
            )

    def n_labels(self) -> int:
        """The number of a classifier's labels, 2 where the file has none."""
        labels = self.section("id2label")
        return self.whole("num_labels", default=2) if labels is None else len(labels.names())

    def special_ids(self) -> dict[str, Any]:
        bos = self.token_ids("bos_token_id")
        return {
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": self.token_ids("eos_token_id") or (),
        }

    def decoder_ids(self, start: int | None) -> dict[str, Any]:
        """Read the ids that begin and end the output of a model with an encoder; `start` is a default."""
        found: dict[str, Any] = {}
        for name in DECODER_IDS:
            ids = self.token_ids(name)
            if ids is not None and len(ids) > 1:
                where = f"{shown(self.path)}: {self._within}{name}"
                raise UnsupportedModel(f"{where} is {shown(list(ids))}; only one id is supported")
            found[name] = ids[0] if ids else None
        return found | ({"decoder_start_token_id": start} if found["decoder_start_token_id"] is None else {})


def decoder_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that every family with an encoder writes in the same way."""
    return {"is_encoder_decoder": True} | {name: getattr(model, name) for name in DECODER_IDS}


def general_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that every family writes in the same way."""
    return {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids) or None,
        "tie_word_embeddings": model.embedding.tied,
        "vocab_size": model.vocab_size,
    }
