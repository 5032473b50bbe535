"""Chat templates: the checkpoint's Jinja template turns a conversation into the prompt the model expects."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from orca_jax.errors import CorruptFile, InvalidRequest
from server.gateway.template_sandbox import Refusal, Sandbox, run
from server.settings.small_files import read_text

MAX_SOURCE = 1_000_000  # characters of a template, and bytes of its file
MAX_OUTPUT = 4_000_000  # characters
MAX_SECONDS = 2.0

_MAX_JSON_BYTES = 16_000_000  # tokenizer_config.json may list every added token
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class BadConversation(InvalidRequest):
    """The model's chat template rejects these messages or fails on them."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class ChatTemplate:
    """A Jinja chat template in the form of Hugging Face's tokenizers, run in a sandbox. Thread-safe.

    The template sees `messages`, `add_generation_prompt`, `tools` and `documents` (always None), the special
    tokens by name, and the functions `raise_exception` and `strftime_now`. Its output contains the special
    tokens, so encode it without adding more.

    `source` has at most MAX_SOURCE characters, the output at most MAX_OUTPUT. Loops and calls stop after
    `max_seconds`. The cost of a single expression, such as `'a' * 10 ** 12`, is not limited: the template is
    the operator's own file. The messages come from clients and are data only: nothing in them is executed.

    Raises CorruptFile, which names `origin`, if `source` is not a valid template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the chat template",
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise CorruptFile(f"{origin} has {len(source)} characters; at most {MAX_SOURCE} are taken")
        try:
            self._template = Sandbox().template(source)
        except jinja2.TemplateSyntaxError as error:
            raise CorruptFile(f"{origin}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # Python's compiler has limits of its own, and many exceptions for them
            raise CorruptFile(f"{origin} is no usable template: {_describe(error)}") from error
        self._special_tokens = dict(special_tokens or {})
        self._max_seconds = max_seconds

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text for `messages`, each with `role` and `content`.

        With `add_generation_prompt` the text ends with the start of the model's reply. Raises
        BadConversation.
        """
        variables = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces = list[str]()
        length = 0
        try:
            for piece in run(self._template, variables, self._max_seconds):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT:
                    raise Refusal(f"the text would have more than {MAX_OUTPUT} characters")
        except Refusal as error:
            raise BadConversation(f"the model's chat template refuses the messages: {error}") from error
        except Exception as error:  # a template can raise anything that Python code can
            message = f"the model's chat template fails with these messages: {_describe(error)}"
            raise BadConversation(message) from error
        return "".join(pieces)


def load_chat_template(directory: Path | None, file: Path | None) -> ChatTemplate | None:
    """The template in `file`, else the one of the checkpoint in `directory`, else None.

    A checkpoint has its template in chat_template.jinja or in tokenizer_config.json, there as the only one or
    as the one named `default`. The text of special tokens comes from tokenizer_config.json and
    special_tokens_map.json. Raises CorruptFile, which names the file at fault.
    """
    config_file = None if directory is None else directory / "tokenizer_config.json"
    config = _read_object(config_file)
    special_tokens = dict[str, str]()
    if directory is not None and config_file is not None:
        map_file = directory / "special_tokens_map.json"
        special_tokens |= _special_tokens(_read_object(map_file), map_file)
        special_tokens |= _special_tokens(config, config_file)
        own_file = directory / "chat_template.jinja"
        file = own_file if file is None and own_file.exists() else file
    if file is not None:
        return ChatTemplate(_read(file, MAX_SOURCE), special_tokens=special_tokens, origin=str(file))
    source = _default_template(config.get("chat_template"), config_file)
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=special_tokens, origin=f"chat_template in {config_file}")


def _default_template(value: object, path: Path | None) -> str | None:
    """The default in `chat_template` of tokenizer_config.json: one template, or a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    named = dict[str, str]()
    for entry in value if isinstance(value, list) else [value]:
        name, template = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(template, str):
            raise CorruptFile(
                f"{path}: chat_template must be a text, or a list of objects with a 'name' and a 'template'"
            )
        if name in named:
            raise CorruptFile(f"{path}: chat_template has the name {name[:80]!r} twice")
        named[name] = template
    return named.get("default")


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


def _read(path: Path, max_bytes: int) -> str:
    try:
        return read_text(path, max_bytes)
    except ValueError as error:
        raise CorruptFile(str(error)) from error


def _read_object(path: Path | None) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if path is None or not path.exists():
        return {}
    try:
        value = json.loads(_read(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not usable JSON: {_describe(error)}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
