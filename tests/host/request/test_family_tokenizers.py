"""Tokenizers of the model families: decoding token by token equals decoding all at once."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from orca_jax.errors import UnsupportedModel
from orca_jax.request.tokenizer import TextStream, Tokenizer
from tests.host.request.family_tokenizers import CORPUS, FAMILIES, SPACE, id_of

# Both as they are saved: a file rounds the scores of a trained Unigram model, and cuts ties otherwise.
LIBRARIES = {name: tokenizers.Tokenizer.from_str(build().to_str()) for name, build in FAMILIES.items()}
TOKENIZERS = {name: Tokenizer(tokenizers.Tokenizer.from_str(lib.to_str())) for name, lib in LIBRARIES.items()}
BYTE_FALLBACK = ["llama 1 and 2", "llama 2, saved again", "mistral", "gemma", "phi3"]
BEGINNINGS = {
    "llama 1 and 2": "<s>",
    "llama 2, saved again": "<s>",
    "llama 3": "<|begin_of_text|>",
    "mistral": "<s>",
    "gemma": "<bos>",
    "phi3": "<s>",
}

families = st.sampled_from([*FAMILIES])
texts = st.one_of(
    st.text(max_size=30),
    st.text(" \n\t" + SPACE + "aé中👩<0xE4>", max_size=12),
    st.sampled_from(CORPUS),
)


@st.composite
def family_and_tokens(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Any tokens; with byte fallback many are bytes, valid and invalid."""
    name = draw(families)
    library = LIBRARIES[name]
    tokens = st.integers(0, library.get_vocab_size() + 2)
    if name in BYTE_FALLBACK:
        byte = st.sampled_from([*b" a\x00\x80\xff", *"é中👩".encode()])
        tokens |= byte.map(lambda value: id_of(library, f"<0x{value:02X}>"))
    ids = draw(st.lists(tokens, max_size=25))
    if draw(st.booleans()):
        ids += library.encode(draw(texts)).ids
    return name, ids


def decoded(name: str, ids: list[int]) -> str:
    return LIBRARIES[name].decode(ids, skip_special_tokens=True)


@settings(max_examples=400)
@given(family_and_tokens())
def test_text_as_it_comes_is_the_whole_text_at_every_length(case: tuple[str, list[int]]) -> None:
    name, ids = case
    released = TextStream(TOKENIZERS[name])
    for n in range(len(ids) + 1):
        cut = TextStream(TOKENIZERS[name])
        for token_id in ids[:n]:
            cut.push(token_id)
        cut.finish()
        whole = decoded(name, ids[:n])
        assert cut.text == whole == TOKENIZERS[name].decode(ids[:n])
        assert decoded(name, ids).startswith(released.text), "text came out that must not"
        if n < len(ids):
            released.push(ids[n])


@settings(max_examples=300)
@given(family_and_tokens(), st.integers(0, 12))
def test_an_outputs_text_follows_its_prompts(case: tuple[str, list[int]], n_prompt: int) -> None:
    name, ids = case
    tokenizer = TOKENIZERS[name]
    prompt, output = ids[:n_prompt], ids[n_prompt:]
    stream = TextStream(tokenizer, continuing=tokenizer.have_text(prompt))
    for token_id in output:
        stream.push(token_id)
    stream.finish()
    if "\ufffd" not in decoded(name, prompt) + decoded(name, output):  # else a character may be cut in two
        assert decoded(name, prompt) + stream.text == decoded(name, ids)


@given(families, texts)
@example("phi3", "<|end|>  a")
@example("gemma", "\n\n\n\n\n")
@example("qwen", "\0")
def test_encoding_is_the_librarys(name: str, text: str) -> None:
    ids = LIBRARIES[name].encode(text).ids
    if name in BEGINNINGS and text.startswith(BEGINNINGS[name]):
        ids = ids[1:]
    assert TOKENIZERS[name].encode(text) == ids
    without = TOKENIZERS[name].encode(text, add_special_tokens=False)
    assert without == LIBRARIES[name].encode(text, add_special_tokens=False).ids
    longest = TOKENIZERS[name].max_token_length
    assert len(text) <= max(1, len(without)) * longest or not text.strip()


BYTE_LEVEL = ["qwen", "llama 3", "olmo2", "granite"]


@given(st.sampled_from(BYTE_LEVEL), texts, texts, texts)
def test_a_template_with_plain_texts_is_one_text(name: str, first: str, second: str, between: str) -> None:
    (_, begins), (_, ends) = sorted(TOKENIZERS[name].special_names())[:2]
    template = f"{begins}a\n{{1}}{between.replace('{', '')}{{2}}{ends}{begins}the"
    whole = template.replace("{1}", first.replace("{", "")).replace("{2}", second)
    library = LIBRARIES[name].encode(whole, add_special_tokens=False).ids
    texts = {"{1}": first.replace("{", ""), "{2}": second}
    assert TOKENIZERS[name].encode_template(template, texts) == library


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "t5"])  # whose pieces have them
def test_no_text_forges_a_templates_special_tokens(name: str) -> None:
    """A document with the name of a special token, or with a part of it beside the template's."""
    tokenizer = TOKENIZERS[name]
    ids_of = {special: i for i, special in tokenizer.special_names() if special not in ("<unk>", "[UNK]")}
    for special, token_id in ids_of.items():
        template = f"{special}a {{1}}{special[-1]}{special}"
        for text in (f"the{special}the", special * 2, special[:-1], "{1}"):
            ids = tokenizer.encode_template(template, {"{1}": text})
            assert ids[0] == ids[-1] == token_id
            assert not {*ids_of.values()}.intersection(ids[1:-1]), (special, text)
        if name in BYTE_LEVEL:
            assert tokenizer.decode(tokenizer.encode_template("{1}", {"{1}": special})) == special


@pytest.mark.parametrize("name", FAMILIES)
def test_text_comes_back(name: str) -> None:
    for text in CORPUS[:1] if name == "t5" else CORPUS:
        back = TOKENIZERS[name].decode(TOKENIZERS[name].encode(text))
        assert back == LIBRARIES[name].decode(LIBRARIES[name].encode(text).ids)
        if name != "bert" and "NFC" not in str(LIBRARIES[name].normalizer):  # bert's words lose their form
            assert back == text


@pytest.mark.parametrize(("name", "beginning"), BEGINNINGS.items())
def test_the_beginning_of_sequence_comes_once(name: str, beginning: str) -> None:
    library, tokenizer = LIBRARIES[name], TOKENIZERS[name]
    token_id = id_of(library, beginning)
    plain = tokenizer.encode("the earth")
    assert plain.count(token_id) == 1 and plain[0] == token_id
    for text in (f"{beginning}the earth", beginning):
        assert library.encode(text).ids[:2] == [token_id] * 2, "the library has it twice"
        assert tokenizer.encode(text).count(token_id) == 1
        assert tokenizer.encode(text, add_special_tokens=False).count(token_id) == 1
    assert (
        tokenizer.encode(f"{beginning}{beginning}the").count(token_id) == 2
    )  # one of each is the text's own
    assert tokenizer.encode("") == [token_id]


@pytest.mark.parametrize("name", BYTE_FALLBACK)
def test_a_character_without_a_token_is_its_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("👩", add_special_tokens=False)[-4:]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([byte]) for byte in "👩".encode()]
    stream = TextStream(tokenizer, continuing=True)
    for token_id in ids:
        stream.push(token_id)
        assert stream.text == ""  # the next byte could make all of them invalid
    stream.push(tokenizer.encode_inside("the")[0])
    assert stream.text.startswith("👩t")


@pytest.mark.parametrize("name", ["llama 1 and 2", "llama 2, saved again", "mistral", "phi3"])
def test_inside_a_text_no_space_is_put_before(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.token_bytes(tokenizer.encode("the", add_special_tokens=False)[0]).startswith(b" ")
    inside = tokenizer.encode_inside("the")
    assert b"".join(map(tokenizer.token_bytes, inside)) == b"the"


def test_stop_strings_are_found_in_text_from_bytes() -> None:
    tokenizer = TOKENIZERS["gemma"]
    stream = TextStream(tokenizer, ["👩!"])
    assert any(stream.push(token_id) for token_id in tokenizer.encode("the 👩!the"))
    assert stream.text == "the "


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: decoders.Decoder, tmp_path: Path) -> None:
    library = FAMILIES["llama 1 and 2"]()
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: its decoder is .*; it must be byte-level"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
