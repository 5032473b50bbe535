"""The offset of each token in a text, and when it is released, checked against every byte of the text."""

import codecs
import itertools
from collections.abc import Sequence

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from orca_jax.request.tokenizer import TextStream, Tokenizer
from orca_jax.service.output import Piece
from server.http.fields.logprobs import PlacedToken, TokenPlaces, prompt_places
from tests.host.engines import SOON, orca, simulated

# Besides the 256 bytes: runs of bytes that split characters anywhere.
RUNS = [
    b"ab",
    b"a\xf0",
    b"\x9f\x98",
    b"\xf0\x9f\x98",
    b"\x80b",
    "é€".encode(),
    "😀!😀".encode(),
    b"\xc3\xa9\xe2",
]
CHARACTER = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def tokenizer_of_runs() -> Tokenizer:
    written = ["".join(CHARACTER[byte] for byte in run) for run in RUNS]
    vocabulary = {**BYTE_OF_CHARACTER, **{text: 256 + i for i, text in enumerate(written)}}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    return Tokenizer(library)


RUNNING = tokenizer_of_runs()
SPECIAL = 256 + len(RUNS)
UNKNOWN = SPECIAL + 7
TOKENS = st.lists(
    st.sampled_from([*b"ab", *"é€😀".encode(), 0xFF, *range(256, SPECIAL), SPECIAL, UNKNOWN]), max_size=14
)


def character_of_byte(data: bytes) -> list[int]:
    """For each byte, the index of its character in `data.decode("utf-8", "replace")`."""
    bad: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note", note)
    text = data.decode("utf-8", "note")
    ends = dict(bad)
    places, at = list[int](), 0
    for number, character in enumerate(text):
        n = ends[at] - at if at in ends else len(character.encode())
        places += [number] * n
        at += n
    assert at == len(data)
    return places


def true_offsets(tokens: Sequence[int]) -> list[int | None]:
    """The offset of each token that has text."""
    parts = [RUNNING.token_bytes(token) for token in tokens]
    places = character_of_byte(b"".join(parts))
    starts = itertools.accumulate(map(len, parts), initial=0)
    return [places[start] if part else None for start, part in zip(starts, parts, strict=False)]


def known(tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -float(i), ((token, -float(i)),)) for i, token in enumerate(tokens)]


def pieces_of(tokens: Sequence[int], stops: Sequence[str], cuts: Sequence[bool], ends: bool) -> list[Piece]:
    """An output in pieces that end at `cuts`, or of one token each."""
    stream = TextStream(RUNNING, stops)
    pieces = list[Piece]()
    for i, token in enumerate(known(tokens)):
        stopped = stream.push(token.token_id)
        last = stopped or i == len(tokens) - 1
        if last:
            stream.finish()
        reason = (FinishReason.STOP if stream.stopped or ends else FinishReason.LENGTH) if last else None
        pieces.append(Piece((token.token_id,), stream.take(), reason, (token,)))
        if last:
            break
    joined = list[Piece]()
    for piece, is_cut in zip(pieces, itertools.chain(cuts, itertools.repeat(True)), strict=False):
        if joined and not is_cut:
            before = joined.pop()
            piece = Piece(
                before.token_ids + piece.token_ids,
                before.text + piece.text,
                piece.finish_reason,
                before.logprobs + piece.logprobs,
            )
        joined.append(piece)
    return joined


@given(
    tokens=TOKENS,
    stops=st.lists(st.text(st.sampled_from("aabé€😀\ufffd"), min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.booleans(), max_size=14),
    ends=st.booleans(),
    offset=st.integers(0, 3),
)
@example(list("😀".encode()), [], [], False, 0)
@example([0xF0, SPECIAL, 0x9F, ord("a")], [], [], True, 0)
@example([ord("a"), ord("a"), ord("b")], ["ab"], [], False, 0)
@example([ord("a"), 0xF0, 0x9F, UNKNOWN], [], [], True, 0)
@example([ord("a"), 0xA9], ["a\ufffd"], [], False, 0)
def test_tokens_are_released_with_their_text_at_its_offset(
    tokens: list[int], stops: list[str], cuts: list[bool], ends: bool, offset: int
) -> None:
    pieces = pieces_of(tokens, stops, cuts, ends)
    places = TokenPlaces(RUNNING, offset)
    out, n_out = list[PlacedToken](), offset
    tokens = [token for piece in pieces for token in piece.token_ids]  # those before the end of sequence
    offsets = [None if at is None else at + offset for at in true_offsets(tokens)]
    for piece in pieces:
        out += places.take(piece)
        n_out += len(piece.text)
        begun = [i for i, at in enumerate(offsets) if at is not None and at < n_out]
        n_begun = begun[-1] + 1 if begun else 0
        assert len(out) == (len(tokens) if piece.finish_reason is FinishReason.LENGTH else n_begun)
    assert [(placed.token_id, placed.logprob, placed.top) for placed in out] == [
        (placed.token_id, placed.logprob, placed.top) for placed in known(tokens)[: len(out)]
    ]
    assert [placed.offset for placed, at in zip(out, offsets, strict=False) if at is not None] == [
        at for at in offsets[: len(out)] if at is not None
    ]
    assert [placed.offset for placed in out] == sorted(placed.offset for placed in out)
    assert all(offset <= placed.offset <= n_out for placed in out)


def test_a_stop_string_of_which_the_last_bytes_are_no_character_ends_the_output() -> None:
    with orca(simulated(lambda _, index: b"a\xf0"[index]), tokenizer=RUNNING) as service:
        result = service.submit([1], SamplingParams(max_tokens=2, stop=("a\ufffd",))).result(SOON)
    assert (result.text, result.finish_reason) == ("", FinishReason.STOP)


@given(TOKENS)
def test_a_prompts_tokens_have_the_offsets_of_its_decoded_text(tokens: list[int]) -> None:
    text = RUNNING.decode(tokens)
    out = prompt_places(tokens, text.encode(), known(tokens)[1:], RUNNING)
    assert [placed.token_id for placed in out] == tokens
    assert [at for at in true_offsets(tokens) if at is not None] == [
        placed.offset for placed, at in zip(out, true_offsets(tokens), strict=True) if at is not None
    ]
    assert [placed.logprob for placed in out] == [None, *(-float(i) for i in range(1, len(tokens)))][
        : len(tokens)
    ]


@given(st.text(st.sampled_from("ab</s>é€😀"), min_size=1, max_size=8), st.booleans())
def test_the_name_of_a_special_token_in_a_prompt_counts_as_text(text: str, begins: bool) -> None:
    """If `begins`, the tokenizer prepends a special token that is not in the text, like OPT's."""
    text = f"{text}</s>é"
    tokens = [*([SPECIAL] if begins and not text.startswith("</s>") else []), *RUNNING.encode(text)]
    out = prompt_places(tokens, text.encode(), known(tokens)[1:], RUNNING)
    at = 0
    for placed in out:
        name = RUNNING.token_bytes(placed.token_id) or (b"" if placed is out[0] and begins else b"</s>")
        whole = text.encode()[:at].decode("utf-8", "ignore")  # the number of complete characters before it
        assert placed.offset == len(whole)
        at += len(name)
    assert at == len(text.encode())


def test_without_a_tokenizer_every_token_is_released_at_once() -> None:
    places = TokenPlaces(None)
    for i, token in enumerate(known([5, 6])):
        piece = Piece((token.token_id,), "", FinishReason.STOP if i else None, (token,))
        assert places.take(piece) == [PlacedToken(token.token_id, 0, token.logprob, token.top)]
