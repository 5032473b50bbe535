"""Makes the tokenizer of a GGUF file: byte-level BPE, or SentencePiece's BPE or Unigram with scores.

A file has the tokens with a type each, and merges with the name of a pre-tokenizer (where
tokenizer.ggml.model is "gpt2"), scores from which the merges follow ("llama"), or scores that are
log-probabilities ("t5"). A name stands for the normalizer and the regular expressions of the model's original
tokenizer.json; a name that is not in the table is refused, since text cut in other places has other tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from orca_jax.errors import BadModelConfig, CorruptFile, UnsupportedModel, is_failure, shown
from orca_jax.gguf_file import GgufFile

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's
_MOST_TOKEN_CHARACTERS = 1024
# Token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask")  # sic

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}{_OTHERS}"


def _o200k(contractions: str, digits: str) -> str:
    words = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    starts = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contractions}" for word in words)
    return rf"{starts}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The cuts of a text before its bytes are merged: by each of `patterns`, then by GPT-2's if `gpt2`.

    With `digits` each digit stands alone. With `whole_first` a piece that is a token is not merged from its
    bytes. `adds_start` is the default of tokenizer.ggml.add_bos_token.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    composed: bool = False  # Unicode's NFC
    whole_first: bool = False
    adds_start: bool = False

    def steps(self) -> list[Any]:
        found: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        found += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return [*found, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)]


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer(gpt2=True, digits=True)
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), whole_first=True, adds_start=True)
_DBRX = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), composed=True)
_GPT4O = PreTokenizer((_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_TEKKEN = PreTokenizer((_o200k("", r"\p{N}"),), whole_first=True, adds_start=True)
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
}


def has_tokenizer(file: GgufFile) -> bool:
    """Whether a file has a tokenizer."""
    return file.text(f"{_PREFIX}model", "none") not in ("none", "no_vocab")


def special_tokens(file: GgufFile) -> dict[str, str]:
    """The texts of special tokens, by transformers' names. Raises BadModelConfig or CorruptFile."""
    names = {"unknown": "unk", "seperator": "sep", "padding": "pad"}
    key = f"{_PREFIX}tokens"
    ids = {name: i for name, i in _special_ids(file, file.length(key)).items() if name not in ("eot", "eom")}
    texts = file.texts_at(key, ids.values())
    return {f"{names.get(name, name)}_token": texts[i] for name, i in ids.items()}


def gguf_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Make the tokenizer of a file.

    Raises UnsupportedModel for a kind or a pre-tokenizer that is not read, BadModelConfig or CorruptFile.
    """
    kind = file.text(f"{_PREFIX}model", "none")
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{file.path}: {_PREFIX}model: expected one of {', '.join(_KINDS)}, found {shown(kind)}"
        )
    vocabulary = Vocabulary(file)
    try:
        tokenizer = _KINDS[kind](vocabulary)
        _add_tokens(tokenizer, vocabulary)
    except BaseException as error:  # the library raises plain Exception, and may panic
        if not is_failure(error) or isinstance(error, UnsupportedModel | BadModelConfig | CorruptFile):
            raise
        raise CorruptFile(f"{file.path} has no valid tokenizer: {shown(str(error))}") from error
    return tokenizer


def _special_ids(file: GgufFile, n_tokens: int) -> dict[str, int]:
    """The ids of special tokens by llama.cpp's names, as far as there are such tokens."""
    ids = {name: file.whole(f"{_PREFIX}{name}_token_id", -1) for name in _SPECIAL_IDS}
    return {name: i for name, i in ids.items() if i in range(n_tokens)}


class Vocabulary:
    """The tokens of a file, their types, and the ids of special tokens.

    Raises BadModelConfig or CorruptFile.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: Sequence[str] = file.texts(f"{_PREFIX}tokens")
        if not self.tokens:
            raise BadModelConfig(f"{file.path}: {_PREFIX}tokens: expected the tokens, found none")
        if (longest := max(map(len, self.tokens))) > _MOST_TOKEN_CHARACTERS:
            raise CorruptFile(
                f"{file.path}: {_PREFIX}tokens: expected at most {_MOST_TOKEN_CHARACTERS} characters in "
                f"each, found {longest}"
            )
        self.types = [int(one) for one in self._of_each("token_type")]
        self.ids = _special_ids(file, len(self.tokens))

    def _of_each(self, key: str) -> Sequence[Any]:
        """A number for each token; empty where the file lacks them."""
        found = self.file.numbers(f"{_PREFIX}{key}").tolist()
        if found and len(found) != len(self.tokens):
            raise BadModelConfig(
                f"{self.file.path}: {_PREFIX}{key}: expected {len(self.tokens)} numbers, one for each token, "
                f"found {len(found)}"
            )
        return found

    def of_type(self, *types: int) -> list[int]:
        """The ids of tokens of these types."""
        return [i for i, one in enumerate(self.types) if one in types]

    def unknown(self) -> int | None:
        """The id of the token for text that no other token has."""
        return self.ids.get("unknown", next(iter(self.of_type(_UNKNOWN)), None))

    def scores(self) -> Sequence[float]:
        """Each piece's score. Raises BadModelConfig without them."""
        found = self._of_each("scores")
        if not found:
            where = f"{self.file.path}: {_PREFIX}scores"
            raise BadModelConfig(f"{where}: expected a score for each token, found none")
        return found

    def by_text(self) -> dict[str, int]:
        """The id of each text, the first one's where two tokens have the same."""
        return {text: i for i, text in reversed([*enumerate(self.tokens)])}

    def flag(self, name: str, default: bool) -> bool:
        return self.file.flag(f"{_PREFIX}{name}", default)


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    file, key = vocabulary.file, f"{_PREFIX}pre"
    name = file.text(key, "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{file.path}: {key}: expected one of {', '.join(PRE_TOKENIZERS)}, found {shown(name)}; give the "
            "model's tokenizer.json with --tokenizer"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in file.texts(f"{_PREFIX}merges"))]
    model = models.BPE(vocab=vocabulary.by_text(), merges=merges, ignore_merges=pre.whole_first)
    tokenizer = tokenizers.Tokenizer(model)
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre.steps())
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, vocabulary, start=pre.adds_start)
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    ids = vocabulary.by_text()
    has_bytes = bool(vocabulary.of_type(_BYTE))
    unknown = vocabulary.unknown()
    model = models.BPE(
        vocab=ids,
        merges=_merges(vocabulary, ids),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = tokenizers.Tokenizer(model)
    prefixed = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    _add_ends(tokenizer, vocabulary, start=True)
    return tokenizer


def _unigram(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """T5's: pieces of the greatest sum of scores, after SentencePiece's normalization."""
    unknown = vocabulary.unknown()
    scored = list(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    tokenizer = tokenizers.Tokenizer(
        models.Unigram(scored, unk_id=unknown, byte_fallback=bool(vocabulary.of_type(_BYTE)))
    )
    table = vocabulary.file.numbers(f"{_PREFIX}precompiled_charsmap").astype(np.uint8).tobytes()
    if table:
        tokenizer.normalizer = normalizers.Precompiled(table)
    prefixed = vocabulary.flag("add_space_prefix", True)
    spaces = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always" if prefixed else "never")
    single = [pre_tokenizers.WhitespaceSplit()] if vocabulary.flag("remove_extra_whitespaces", True) else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*single, spaces])
    tokenizer.decoder = decoders.Metaspace(
        replacement=_SPACE, prepend_scheme="always" if prefixed else "never"
    )
    _add_ends(tokenizer, vocabulary, start=False, end=True)
    return tokenizer


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece merges: by its score.

    Each place in each piece is tried at once, by hashes: Gemma's 260,000 pieces have 1.7 million. Of a pair
    whose hashes are alike by chance the library finds that it makes no piece.
    """
    scores, no_parts = np.array(vocabulary.scores()), {_UNKNOWN, _CONTROL, _BYTE}
    types = vocabulary.types
    parts = {text: i for text, i in ids.items() if text and not (types and types[i] in no_parts)}
    if not parts:
        return []
    texts, id_of = [*parts], np.fromiter(parts.values(), np.int64, len(parts))
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    hashes = _SubstringHashes("".join(texts))
    end = np.cumsum(lengths)
    start = end - lengths
    by_hash = _Lookup(hashes.of(start, end))

    whole = np.repeat(np.arange(len(texts)), lengths - 1)  # the piece of each place between two characters
    at = np.arange(len(whole)) + whole + 1
    left = by_hash.find(hashes.of(start[whole], at))
    whole, at, left = (each[left >= 0] for each in (whole, at, left))
    right = by_hash.find(hashes.of(at, end[whole]))
    whole, left, right = (each[right >= 0] for each in (whole, left, right))
    order = np.lexsort((id_of[right], id_of[left], id_of[whole], -scores[id_of[whole]]))
    pairs = (map(texts.__getitem__, each[order].tolist()) for each in (left, right))
    return list(zip(*pairs, strict=True))


class _SubstringHashes:
    """Hashes of 64 bits of the substrings of a text: polynomials of their characters, modulo 2 ** 64."""

    _BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
        self._inverse = _powers(pow(self._BASE, -1, 1 << 64), len(codes))
        sums = np.cumsum(codes * _powers(self._BASE, len(codes))[:-1], dtype=np.uint64)
        self._sums = np.concatenate([np.zeros(1, np.uint64), sums])

    def of(self, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The hashes of text[start:end]."""
        return (self._sums[end] - self._sums[start]) * self._inverse[start]


def _powers(base: int, n: int) -> npt.NDArray[np.uint64]:
    """base ** 0 to base ** n, modulo 2 ** 64."""
    factors = np.full(n + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


class _Lookup:
    """The places of keys in an array."""

    def __init__(self, keys: npt.NDArray[np.uint64]) -> None:
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def find(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The place of each key; -1 where there is none."""
        near = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[near] == keys, self._order[near], -1)


def _add_ends(
    tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, *, start: bool, end: bool = False
) -> None:
    """Make the tokenizer add the tokens that begin and end a text; `start` and `end` are the defaults."""
    before, after = list[tuple[str, int]](), list[tuple[str, int]]()
    for name, default, where in (("bos", start, before), ("eos", end, after)):
        i = vocabulary.ids.get(name)
        if i is not None and vocabulary.flag(f"add_{name}_token", default):
            where.append((vocabulary.tokens[i], i))
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(text for text, _ in before), "$A", *(text for text, _ in after)],
            special_tokens=[*before, *after],
        )


def _add_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Make the tokenizer find special tokens, and a user's own, in a text before all other tokens."""
    named = set(vocabulary.ids.values())
    special = sorted({*vocabulary.of_type(_UNKNOWN, _CONTROL), *named})
    added = [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in special]
    tokenizer.add_special_tokens([one for one in added if one.content])
    added = [
        AddedToken(vocabulary.tokens[i], normalized=False)
        for i in vocabulary.of_type(_USER_DEFINED)
        if i not in named and vocabulary.tokens[i]
    ]
    tokenizer.add_tokens(added)


_KINDS: Mapping[str, Callable[[Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "t5": _unigram,
}
