"""The values of a config.json, checked by type as a family takes them; and those that most families write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.model_config import Activation, ModelConfig
from orca_jax.families.strict_json import shown

_T = TypeVar("_T")

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same formula with its constant cut to ten digits
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu": "gelu",
    "relu": "relu",
}
HF_ACTIVATIONS: Mapping[Activation, str] = {
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


class ConfigFields:
    """The values of a config file, taken by name and checked by type. JSON's null is as good as absent."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def _bad(self, name: str, rule: str) -> BadModelConfig:
        return BadModelConfig(
            f"{shown(self.path)}: {name}: expected {rule}, found {shown(self._values.get(name))}"
        )

    def raw(self, name: str) -> Any:
        return self._values.get(name)

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

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._bad(name, "text")
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One token id or a list of them; None where the file says nothing."""
        value = self.raw(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not 1 <= len(ids) <= 1024 or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._bad(name, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def choice(self, name: str, choices: Mapping[str, _T], default: str) -> _T:
        """What a text stands for. Raises UnsupportedModel where it is none of `choices`."""
        text = self.text(name, default)
        if text not in choices:
            raise UnsupportedModel(
                f"{shown(self.path)}: {name}: expected one of {', '.join(choices)}, found '{shown(text)}'"
            )
        return choices[text]

    def activation(self, name: str, default: str) -> Activation:
        return self.choice(name, _ACTIVATIONS, default)

    def must_be(self, name: str, value: bool, meaning: str) -> None:
        """Refuse an option that changes what is computed."""
        if self.flag(name, value) is not value:
            raise UnsupportedModel(
                f"{shown(self.path)}: {name}: expected {str(value).lower()}, found {str(not value).lower()}; "
                f"{meaning} is not supported"
            )

    def special_ids(self) -> dict[str, Any]:
        bos = self.token_ids("bos_token_id")
        return {
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": self.token_ids("eos_token_id") or (),
        }


def general_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that every family writes the same way."""
    return {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids) or None,
        "tie_word_embeddings": model.embedding.tied,
        "vocab_size": model.vocab_size,
    }
