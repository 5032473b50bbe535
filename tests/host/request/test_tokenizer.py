"""Text and tokens as in the tokenizers library, but token by token, and never past a stop string."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from orca_jax.errors import CorruptFile, InvalidPrompt, NotACheckpoint, UnsupportedModel
from orca_jax.request.stop_strings import StopSearch, StopStrings
from orca_jax.request.tokenizer import TextStream, Tokenizer
from tests.lines_run import n_lines_run

CORPUS = [
    "In the beginning God created the heaven and the earth.",
    "naïve café — “quoted” … 中文字符 和 日本語 テキスト",
    "emoji 👩‍👩‍👧‍👦 🇮🇸 é combining",
    "\tdef f(x):\n\t\treturn x  # tabs and   spaces\r\n",
]
SPECIAL, SPACED, LATIN = "<|end|>", "two words", "ÿé"


def build() -> tokenizers.Tokenizer:
    """Byte-level BPE of about 400 tokens with a special token and two added ones that are plain text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken(SPACED), AddedToken(LATIN)])
    return tokenizer


LIBRARY = build()
TOKENIZER = Tokenizer(LIBRARY)
N_TOKENS = LIBRARY.get_vocab_size()

# Single bytes, so that characters are split and broken in every way; the others; ids without a token.
byte_tokens = st.sampled_from(
    [LIBRARY.token_to_id(character) for character in pre_tokenizers.ByteLevel.alphabet()]
)
token_ids = st.lists(st.one_of(byte_tokens, st.integers(0, N_TOKENS + 3)), max_size=40)
texts = st.one_of(st.text(max_size=30), st.sampled_from(CORPUS))


def one_character_bytes(text: str) -> list[int]:
    """Tokens of one byte each."""
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(N_TOKENS)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


# The tokenizer


@given(texts)
@example(SPECIAL)
@example(f"a {SPACED} b")
def test_encode_is_the_librarys_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == LIBRARY.encode(text).ids
    assert TOKENIZER.decode(ids) == text.replace(SPECIAL, "")


@given(token_ids)
def test_decode_is_the_librarys(ids: list[int]) -> None:
    # So it is for LATIN, an added token that the library reads as the bytes of its characters.
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("template", "n_before", "n_after"),
    [(f"{SPECIAL} $A", 1, 0), (f"$A {SPECIAL}", 0, 1), (f"{SPECIAL} $A {SPECIAL}", 1, 1)],  # Llama, T5, BART
)
def test_special_tokens_are_added_where_the_file_says_so(
    tmp_path: Path, template: str, n_before: int, n_after: int
) -> None:
    library = build()
    special_id = library.token_to_id(SPECIAL)
    library.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(SPECIAL, special_id)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_file(tmp_path / "tokenizer.json").encode("the")
    assert ids == [special_id] * n_before + TOKENIZER.encode("the") + [special_id] * n_after


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    library = build()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").encode(CORPUS[0]) == TOKENIZER.encode(CORPUS[0])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "caf\udce9"])
def test_text_that_is_no_unicode_is_refused(text: str) -> None:
    with pytest.raises(InvalidPrompt, match="lone surrogate") as caught:
        TOKENIZER.encode(text)
    assert caught.value.param == "prompt"


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    library.decoder = decoders.ByteLevel()
    with pytest.raises(InvalidPrompt, match="cannot encode"):
        Tokenizer(library).encode("b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "[" * 100_000,
        '{"model": {"type": "BPE", "vocab": {"a": 99999999999}, "merges": []}}',
        '{"model": {"type": "BPE", "vocab": {"a": 5}, "merges": [["a", "b"]]}}',
        # the library panics: a merge that is shorter than the prefix of what continues a word
        '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], '
        '"continuing_subword_prefix": "##"}}',
    ],
)
def test_a_corrupt_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(CorruptFile, match="too many for a tokenizer"):
        Tokenizer.from_file(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("decoder", [None, {"type": "BPEDecoder", "suffix": "</w>"}])
def test_another_kind_of_tokenizer_is_refused(tmp_path: Path, decoder: Any) -> None:
    values = json.loads(LIBRARY.to_str())
    values["decoder"] = decoder
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json.*byte-level"):
        Tokenizer.from_file(path)


# Text as it comes


def plain_cut(text: str, stops: list[str]) -> str:
    """The definition, a character at a time: the stop string that ends first, the longest if several do."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def could_begin(text: str, stops: list[str]) -> bool:
    """Whether `text` ends with a proper prefix of a stop string."""
    return any(text.endswith(stop[:n]) for stop in stops for n in range(1, len(stop)))


def check_stream(ids: list[int], stops: list[str]) -> None:
    full = LIBRARY.decode(ids, skip_special_tokens=True)
    expected = plain_cut(full, stops)
    stream = TextStream(TOKENIZER, stops)
    taken = ""
    for n, token_id in enumerate(ids, 1):
        stopped = stream.push(token_id)
        taken += stream.take()
        assert expected.startswith(taken), "text came out that must not"
        assert taken == stream.text
        if stopped:
            assert taken == expected
            break
        # Nothing is held without a reason: an open stop string, or an open character.
        known = TOKENIZER.decode(ids[:n])
        if not could_begin(known.rstrip("\ufffd"), stops) and not known.endswith("\ufffd"):
            assert taken == known
    stream.finish()
    taken += stream.take()
    stream.finish()
    assert taken + stream.take() == expected == stream.text
    assert stream.push(ids[0] if ids else 0) == stream.stopped


@given(token_ids)
def test_token_by_token_gives_the_text_of_all_at_once(ids: list[int]) -> None:
    check_stream(ids, [])


@given(
    st.text("ab…é\ufffd", max_size=30),
    st.lists(st.text("ab…é\ufffd", min_size=1, max_size=5), max_size=4),
    st.data(),
)
@example("abcd", ["abcd", "bc"], None)
@example("aab", ["ab"], None)
@example("ababac", ["abac"], None)
def test_stop_strings_are_cut_out_however_they_straddle_tokens(
    text: str, stops: list[str], data: Any
) -> None:
    ids = one_character_bytes(text)
    if data is not None and data.draw(st.booleans()):
        ids = TOKENIZER.encode(text)
    check_stream(ids, stops)


@given(token_ids, st.data())
def test_stop_strings_taken_from_random_tokens(ids: list[int], data: Any) -> None:
    full = LIBRARY.decode(ids, skip_special_tokens=True)
    places = st.integers(0, max(len(full) - 1, 0))
    stops = [
        full[start : start + data.draw(st.integers(1, 8))]
        for start in data.draw(st.lists(places, max_size=3))
        if full
    ]
    check_stream(ids, stops)


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.randoms(),
)
def test_where_a_stop_string_is_found_does_not_depend_on_the_pieces(
    text: str, stops: list[str], rng: random.Random
) -> None:
    shared = StopStrings(stops)
    whole = StopSearch(shared).feed(text)
    pieces, seen = StopSearch(shared), 0
    while seen < len(text):
        piece = text[seen : seen + rng.randint(0, 4)]
        found = pieces.feed(piece)
        if found is not None:
            assert whole == (seen + found[0], found[1])
            return
        seen += len(piece)
        assert pieces.n_open == max(
            n for stop in stops for n in range(len(stop)) if text[:seen].endswith(stop[:n])
        )
    assert whole is None


def test_a_special_token_is_no_text() -> None:
    stream = TextStream(TOKENIZER, [SPECIAL])
    (special_id,) = TOKENIZER.encode(SPECIAL)
    assert not stream.push(special_id)
    stream.finish()
    assert stream.text == ""


def test_a_character_comes_out_with_its_last_byte() -> None:
    stream = TextStream(TOKENIZER)
    came = []
    for token_id in one_character_bytes("é中👩"):
        stream.push(token_id)
        came.append(stream.take())
    assert came == ["", "é", "", "", "中", "", "", "", "👩"]


def test_an_open_character_becomes_a_replacement_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    stream.push(one_character_bytes("中")[0])
    assert stream.take() == ""
    stream.finish()
    assert stream.take() == "\ufffd"


@pytest.mark.parametrize("token", ["a", "\x80"])  # the second is no character by itself, ever
def test_a_tokens_cost_does_not_grow_with_the_text(token: str) -> None:
    stream = TextStream(TOKENIZER, ["aaab", "b" * 1000])
    token_id = {TOKENIZER.token_bytes(i): i for i in range(N_TOKENS)}[token.encode("latin-1")]
    for _ in range(10):
        stream.push(token_id)
    early = n_lines_run(lambda: stream.push(token_id))
    for _ in range(5000):
        stream.push(token_id)
    assert n_lines_run(lambda: stream.push(token_id)) <= early + 2
    assert len(stream._held) <= 3
