"""Loads a model's chat templates from its checkpoint, or from a file of the operator's."""

from pathlib import Path

from orca_jax.errors import CorruptFile
from orca_jax.request.chat.chat_template import MAX_SOURCE, ChatTemplate, NamedTemplates, Templates
from orca_jax.request.tokenizer_config import MORE_TEMPLATES, read_tokenizer_config
from orca_jax.small_files import read_text

_DEFAULT = "default"
_MAX_TEMPLATES = 64


def load_chat_template(directory: Path | None, file: Path | None) -> Templates | None:
    """The template in `file`, else those of the checkpoint in `directory`, else None.

    A checkpoint has its template in chat_template.jinja, with more in additional_chat_templates/NAME.jinja;
    or in tokenizer_config.json, as the only one or as a list with names. The text of special tokens comes
    from tokenizer_config.json and special_tokens_map.json. Raises CorruptFile, which names the file at fault.
    """
    if file is not None:
        return template_from(file, directory)
    if directory is None:
        return None
    config = read_tokenizer_config(directory)
    tokens = config.special_tokens
    files = _template_files(directory)
    if files:
        sources = {name: (_read(path), str(path)) for name, path in files.items()}
    else:
        origin = f"chat_template in {config.path}"
        sources = {name: (text, origin) for name, text in _named(config.chat_template, config.path).items()}
    templates = {
        name: ChatTemplate(source, special_tokens=tokens, origin=origin)
        for name, (source, origin) in sources.items()
    }
    if templates.keys() == {_DEFAULT}:
        return templates[_DEFAULT]
    return NamedTemplates(templates) if templates else None


def template_from(given: str | Path, directory: Path | None) -> ChatTemplate:
    """A template from a file or a text, with the special tokens in `directory`. Raises CorruptFile."""
    tokens = {} if directory is None else read_tokenizer_config(directory).special_tokens
    if isinstance(given, str):
        return ChatTemplate(given, special_tokens=tokens)
    return ChatTemplate(_read(given), special_tokens=tokens, origin=str(given))


def _template_files(directory: Path) -> dict[str, Path]:
    files = sorted((directory / MORE_TEMPLATES).glob("*.jinja"))
    if len(files) > _MAX_TEMPLATES:
        raise CorruptFile(
            f"{directory} has {len(files)} additional chat templates; {_MAX_TEMPLATES} are allowed"
        )
    named = {path.stem: path for path in files}
    default = directory / "chat_template.jinja"
    return {_DEFAULT: default, **named} if default.exists() else named


def _named(value: object, path: Path) -> dict[str, str]:
    """The templates in `chat_template` of tokenizer_config.json: one text, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
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
    if len(named) > _MAX_TEMPLATES:
        raise CorruptFile(f"{path}: chat_template has {len(named)} templates; {_MAX_TEMPLATES} are allowed")
    return named


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_SOURCE)
    except ValueError as error:
        raise CorruptFile(str(error)) from error
