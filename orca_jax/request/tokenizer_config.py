"""tokenizer_config.json and special_tokens_map.json: the special tokens by name, and chat templates."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_jax.errors import CorruptFile
from orca_jax.gguf_file import GgufFile, is_gguf, open_gguf
from orca_jax.request.gguf_tokenizer import special_tokens
from orca_jax.small_files import read_text

MORE_TEMPLATES = "additional_chat_templates"  # a folder next to these files, of NAME.jinja

_MAX_BYTES = 16_000_000  # tokenizer_config.json may list every added token
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`special_tokens` maps names such as `bos_token` to text. `chat_template` is unchecked JSON."""

    path: Path
    special_tokens: dict[str, str]
    chat_template: object


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Read the files in `directory`, both of which may be missing, or the metadata of a GGUF file.

    Raises CorruptFile, for a GGUF file any CheckpointError, which names the file.
    """
    if is_gguf(directory):
        return _of_gguf(open_gguf(directory))
    path = directory / "tokenizer_config.json"
    map_path = directory / "special_tokens_map.json"
    config = _read_object(path)
    tokens = _special_tokens(_read_object(map_path), map_path) | _special_tokens(config, path)
    return TokenizerConfig(path, tokens, config.get("chat_template"))


def _of_gguf(file: GgufFile) -> TokenizerConfig:
    """The special tokens and the templates of a file: "tokenizer.chat_template", and the named ones."""
    key = "tokenizer.chat_template"
    names = [name for name in file.texts(f"{key}s") if f"{key}.{name}" in file]
    named = [{"name": name, "template": file.text(f"{key}.{name}")} for name in names]
    default = file.text(key) if key in file else None
    if named and default is not None:
        named.append({"name": "default", "template": default})
    return TokenizerConfig(file.path, special_tokens(file), named or default)


def _special_tokens(config: dict[str, Any], path: Path) -> dict[str, str]:
    tokens = dict[str, str]()
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
        elif value is not None:
            raise CorruptFile(f"{path}: {name} must be a text, or an object with a text as its 'content'")
    return tokens


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        text = read_text(path, _MAX_BYTES)
    except ValueError as error:
        raise CorruptFile(str(error)) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{path} is not usable JSON: {type(error).__name__}: {str(error)[:200]}"
        raise CorruptFile(message) from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} holds {type(value).__name__}, not a JSON object")
    return value
