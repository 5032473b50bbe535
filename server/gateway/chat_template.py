"""Chat templates: a conversation becomes a text as the model knows it, by the checkpoint's Jinja template."""

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
    """Messages that the model's chat template refuses, or cannot make a text of."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers have it, run in a sandbox. May be used by many threads.

    It sees `messages`, `add_generation_prompt`, `tools` and `documents` (None here), the special tokens by
    their names, and the functions `raise_exception` and `strftime_now`. What it writes holds the special
    tokens that belong there, so it is to be encoded without adding others.

    `source` has at most MAX_SOURCE characters, the result MAX_OUTPUT; loops and calls end after
    `max_seconds`. Not bounded is what a single expression does, as in `'a' * 10 ** 12`: the template is the
    operator's own file. The messages are a client's, and are data: nothing in them is ever run.

    Raises CorruptFile, which names `origin`, for a source that is no template.
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
        except Exception as error:  # Python's compiler has limits of its own, and says so in many ways
            raise CorruptFile(f"{origin} is no usable template: {_told(error)}") from error
        self._special_tokens = dict(special_tokens or {})
        self._max_seconds = max_seconds

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The text of `messages`, each with `role` and `content`; the model goes on where it ends.

        With `add_generation_prompt` it ends with the beginning of an answer. Raises BadConversation.
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
        except Exception as error:  # a template may fail in any way that Python code can
            message = f"the model's chat template fails with these messages: {_told(error)}"
            raise BadConversation(message) from error
        return "".join(pieces)


def load_chat_template(directory: Path | None, file: Path | None) -> ChatTemplate | None:
    """The template in `file`, or else the one of the checkpoint in `directory`; None where there is none.

    A checkpoint has it in chat_template.jinja or in tokenizer_config.json, there alone or as the one named
    `default`. The special tokens' texts come from tokenizer_config.json and special_tokens_map.json. Raises
    CorruptFile, which names the file at fault.
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
    source = _default_of(config.get("chat_template"), config_file)
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=special_tokens, origin=f"chat_template in {config_file}")


def _default_of(found: object, path: Path | None) -> str | None:
    """What `chat_template` in tokenizer_config.json holds: a template, or a list of them with names."""
    if found is None or isinstance(found, str):
        return found
    named = dict[str, str]()
    for entry in found if isinstance(found, list) else [found]:
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
        found = config.get(name)
        text = found.get("content") if isinstance(found, dict) else found
        if isinstance(text, str):
            tokens[name] = text
        elif found is not None:
            raise CorruptFile(f"{path}: {name} must be a text, or an object with a text as its 'content'")
    return tokens


def _read(path: Path, max_bytes: int) -> str:
    try:
        return read_text(path, max_bytes)
    except ValueError as error:
        raise CorruptFile(str(error)) from error


def _read_object(path: Path | None) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is no such file."""
    if path is None or not path.exists():
        return {}
    try:
        value = json.loads(_read(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not usable JSON: {_told(error)}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
