"""The input of `orca generate --input`: lines of JSON objects."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from orca_jax.errors import InvalidRequest
from orca_jax.request.sampling_params import SamplingParams, with_defaults

MAX_LINE_BYTES = 1 << 22
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadLine(InvalidRequest):
    """A line that is not a valid request."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input; `data` is None if the line is too long."""

    number: int
    end: int  # offset of its end in the input, in bytes
    data: bytes | None

    def values(self) -> dict[str, Any]:
        """The JSON object of the line. Raises BadLine for anything else."""
        if self.data is None:
            raise BadLine(f"the line has more than {MAX_LINE_BYTES} bytes", param="line")
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"the line is not UTF-8: {error.reason} at byte {error.start}"
            raise BadLine(message, param="line") from error
        try:
            values = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
        except RecursionError as error:
            raise BadLine("the line is not usable JSON: it is nested too deeply", param="line") from error
        except ValueError as error:
            raise BadLine(f"the line is not JSON: {error}", param="line") from error
        if not isinstance(values, dict):
            raise BadLine(f"the line holds {type(values).__name__}, not an object", param="line")
        return values


def read_lines(source: BinaryIO) -> Iterator[Line]:
    """The lines that are not blank. Never holds more of a line than MAX_LINE_BYTES."""
    number = end = 0
    while data := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        end += len(data)
        too_long = len(data) > MAX_LINE_BYTES
        while too_long and not data.endswith(b"\n") and (data := source.readline(MAX_LINE_BYTES)):
            end += len(data)
        if number == 1 and not too_long:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if too_long or data.strip():
            yield Line(number, end, None if too_long else data)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key appears twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_N_BYTES = 8  # of a hash; nobody attacks the lines of their own file
# A larger file is identified by its size and samples, so that a model of any size takes seconds at most.
_WHOLE_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12
_MODEL_FILES = ("config.json", "orca.json", "*.safetensors")
_TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_as_json = json.JSONEncoder(sort_keys=True, default=str).encode
_DEFAULTS = {  # as JSON, in which true is not 1
    field.name: _as_json(field.default if field.default_factory is MISSING else field.default_factory())
    for field in fields(SamplingParams)
}


def request_hash(line: Line, values: Mapping[str, Any] | None, defaults: SamplingParams) -> str:
    """The hash of a line's request: prompt and sampling parameters, whether from the line or from flags.

    `values` is the line's object. If it is None, the line is not an object and its bytes are hashed.
    Parameters with default values are left out, so that new parameters do not change old requests' hashes.
    """
    if values is None:
        return _hash(b"line", line.data or b"")
    request = _without_defaults(with_defaults(_flags(defaults), values))
    return _hash(b"request", _as_json(request).encode("ascii"))


def model_hash(model: Path | None, text: Path | None, settings: Mapping[str, object]) -> str:
    """The hash of a model's files and of the settings that change its outputs.

    `model` and `text` are the directories of its weights and its tokenizer, or a GGUF file for both, if any;
    their names do not count.
    Large files are identified by their size and some of their bytes.
    """
    files = [] if model is None else [model] if model.is_file() else _files(model, _MODEL_FILES)
    # Orbax's files are in folders.
    if model is not None and model.is_dir() and all(path.suffix != ".safetensors" for path in files):
        files += _files(model, ["*/**/*"])
    files += [] if text is None or text.is_file() else _files(text, _TEXT_FILES)
    parts = [_as_json(settings).encode("ascii")]
    for path in files:
        parts += [path.name.encode("utf-8", "surrogateescape"), *_contents(path)]
    return _hash(b"model", *parts)


@lru_cache(maxsize=4)
def _flags(defaults: SamplingParams) -> dict[str, Any]:
    return _without_defaults({field.name: getattr(defaults, field.name) for field in fields(SamplingParams)})


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if name not in _DEFAULTS or _as_json(value) != _DEFAULTS[name]
    }


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[: 2 * _N_BYTES]


def _files(directory: Path, patterns: Iterable[str]) -> list[Path]:
    found = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    return [path for path in found if path.is_file()]


def _contents(path: Path) -> Iterable[bytes]:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return [file.read()]
        places = [i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]
        samples = [os.pread(file.fileno(), _SAMPLE_BYTES, place) for place in places]
        return [size.to_bytes(8, "little"), *samples]
