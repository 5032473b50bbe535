"""Structured output against oracles independent of llguidance: `re`, `json`, and lists of all texts."""

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from orca_jax.errors import InvalidSamplingParameter, QueueFull
from orca_jax.grammar import grammar as rooms
from orca_jax.grammar.grammar import Grammar, GrammarCompiler, GrammarState
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from tests.places import ROOT

DEMO = Tokenizer.from_file(ROOT / "orca_jax" / "demo_model" / "tokenizer.json")
DEMO_EOS, N_DEMO = 0, 2048
COMPILER = GrammarCompiler(DEMO, vocab_size=N_DEMO, eos_token_ids=[DEMO_EOS])


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Raise the time limits, so that a slow machine gets the same answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "COMPILE_SECONDS", 60.0)
        yield


SPECIAL, SECOND_SPECIAL = "<|end|>", "<|pad|>"


def small_tokenizer() -> Tokenizer:
    """Tokens a, b, c, Ã, ©, then ab, bc, abc and aa, and two special ones; ids 0 to 10."""
    vocabulary = {token: i for i, token in enumerate(["a", "b", "c", "Ã", "©", "ab", "bc", "abc", "aa"])}
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("a", "a")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL), AddedToken(SECOND_SPECIAL)])
    return Tokenizer(tokenizer)


SMALL = small_tokenizer()
END, PAD, N_SMALL = 9, 10, 11
SMALL_COMPILER = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[END])


def compiled(compiler: GrammarCompiler, **fields: Any) -> Grammar:
    grammar = compiler.compile(SamplingParams(**fields))
    assert grammar is not None
    return grammar


def allowed(state: GrammarState, vocab_size: int) -> list[int]:
    """The token ids of all bits that are set in the mask, also those past the vocabulary."""
    into = np.full(-(-vocab_size // 32), -1, np.int32)
    state.allowed(into)
    return np.flatnonzero(np.unpackbits(into.view(np.uint8), bitorder="little")).tolist()


def refused(compiler: GrammarCompiler, **fields: Any) -> str:
    """The error's message, after checking that the error names the field."""
    sampling = SamplingParams(**fields)
    with pytest.raises(InvalidSamplingParameter) as caught:
        compiler.compile(sampling)
    assert caught.value.param == sampling.grammar
    assert str(sampling.grammar) in str(caught.value)
    return str(caught.value)


def output(grammar: Grammar, choose: Callable[[Sequence[int]], int], n_tokens: int = 4000) -> bytes:
    """Choose among the allowed tokens until the grammar ends; return the output's text."""
    state, text = grammar.start(), b""
    for _ in range(n_tokens):
        token = choose(allowed(state, N_DEMO))
        text += DEMO.token_bytes(token)
        if state.accept(token):
            assert state.failure is None
            return text
        assert token != DEMO_EOS
    raise AssertionError("the output did not end")


def random_choice(seed: int, *, end_early: bool = True) -> Callable[[Sequence[int]], int]:
    """Choose any allowed token; after 30 tokens the end if it is allowed, else one of the shortest."""
    rng = np.random.default_rng(seed)
    n_chosen = itertools.count()

    def choose(tokens: Sequence[int]) -> int:
        if next(n_chosen) < 30:
            return int(rng.choice(tokens))
        if DEMO_EOS in tokens and end_early:
            return DEMO_EOS
        closing = [t for t in tokens if DEMO.token_bytes(t) in (b'"', b"}", b"]")]
        return int(rng.choice(closing or tokens))

    return choose


seeds = st.integers(0, 2**32 - 1)


def language(is_word: Callable[[str], bool], alphabet: str, longest: int) -> set[bytes]:
    texts = ("".join(t) for n in range(longest + 1) for t in itertools.product(alphabet, repeat=n))
    return {text.encode() for text in texts if is_word(text)}


def check_every_mask(grammar: Grammar, words: set[bytes], eos: Iterable[int] = (END,)) -> None:
    """Check all reachable texts: a token is allowed exactly if it continues to one of the words."""
    beginnings = {word[:n] for word in words for n in range(len(word) + 1)}
    tokens = {t: SMALL.token_bytes(t) for t in range(N_SMALL)}
    seen = set[bytes]()
    todo: list[list[int]] = [[]]
    while todo:
        path = todo.pop()
        text = b"".join(tokens[t] for t in path)
        if text in seen:
            continue
        seen.add(text)
        state = grammar.start()
        ends = [state.accept(token) for token in path]
        assert not any(ends[:-1])
        follow = {t for t, data in tokens.items() if data and text + data in beginnings}
        if path:
            assert ends[-1] == (not follow), text
        if path and ends[-1]:
            assert text in words
            assert state.failure is None
            continue
        expected = follow | (set(eos) if text in words else set[int]())
        assert set(allowed(state, N_SMALL)) == expected, text
        assert set(allowed(state, N_SMALL)) == expected, "asked a second time"
        todo += [[*path, token] for token in follow]


# Regular expressions.

FINITE = [
    "a",
    "ab?c?",
    "(ab|a)(bc|c)?",
    "[ab]{2,4}",
    "a{0,3}b",
    "(a|aa|abc){1,2}",
    "(|a)b(|c)",
    "é?a|éb",
    "^a|bc$",
]


@pytest.mark.parametrize("regex", FINITE)
def test_a_token_is_allowed_exactly_where_a_match_goes_on_with_it(regex: str) -> None:
    words = language(lambda text: re.fullmatch(regex, text) is not None, "abcé", 6)
    check_every_mask(compiled(SMALL_COMPILER, guided_regex=regex), words)


# A regular expression with the length of its longest match.
leaves = st.sampled_from([("a", 1), ("b", 1), ("[ab]", 1), ("ab", 2), ("", 0)])
regexes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda xy: (xy[0][0] + xy[1][0], xy[0][1] + xy[1][1])),
        st.tuples(inner, inner).map(lambda xy: (f"({xy[0][0]}|{xy[1][0]})", max(xy[0][1], xy[1][1]))),
        inner.map(lambda x: (f"({x[0]})?", x[1])),
        inner.map(lambda x: (f"({x[0]}){{1,3}}", 3 * x[1])),
    ),
    max_leaves=6,
).filter(lambda x: 0 < x[1] <= 7)


@settings(max_examples=60, deadline=None)
@given(regexes)
def test_that_holds_for_any_regular_expression(regex: tuple[str, int]) -> None:
    words = language(lambda text: re.fullmatch(regex[0], text) is not None, "ab", regex[1])
    check_every_mask(compiled(SMALL_COMPILER, guided_regex=regex[0]), words)


@pytest.mark.parametrize(
    "regex",
    [
        r"\d{3}-\d{4}",
        r"[A-Z][a-z]+( [A-Z][a-z]+)*",
        r"(yes|no|maybe)!?",
        r"a/b\/c\n?",
        r"[\da-f]+@[^\s@]+\.(com|org)",
        r"(?i)hello|bye",
        r".{1,20}",
        r'"[^"\n]*"',
        r"(a|b)*a(a|b){3}",
        r"\$[0-9]+(\.[0-9]{2})?",
        r"x\\",
        "one\ntwo|three",
        r"^from here to here$",
        r"[^a-z]{2,5}",
    ],
)
@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_the_whole_output_matches_the_regular_expression(regex: str, seed: int) -> None:
    choose = random_choice(seed)
    state, tokens = compiled(COMPILER, guided_regex=regex).start(), list[int]()
    for _ in range(200):
        tokens.append(choose(allowed(state, N_DEMO)))
        if state.accept(tokens[-1]):
            text = b"".join(map(DEMO.token_bytes, tokens)).decode("utf-8")  # strictly
            assert re.fullmatch(regex, text)
            return
    assert regex.endswith(("+)*", r"(com|org)", "{3}"))  # with nothing that must end them


# Choices and Lark.


@pytest.mark.parametrize(
    "choices",
    [("a",), ("a", "ab", "abc"), ("abc", "abc"), ("aab", "aba", "b"), ("é", "éa"), ("bcab", "c" * 5)],
)
def test_the_output_is_one_of_the_choices(choices: tuple[str, ...]) -> None:
    check_every_mask(compiled(SMALL_COMPILER, guided_choice=choices), {c.encode() for c in choices})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), min_size=1), seeds)
def test_choices_may_hold_any_characters(choices: list[str], seed: int) -> None:
    text = output(compiled(COMPILER, guided_choice=choices), random_choice(seed))
    assert text.decode("utf-8") in choices


def test_a_thousand_choices_are_cheap() -> None:
    choices = [f"number {i} of all" for i in range(1024)]
    text = output(compiled(COMPILER, guided_choice=choices), random_choice(3))
    assert text.decode() in choices


def test_a_lark_grammar_is_followed() -> None:
    lark = 'start: list\nlist: "(" item ("c" item)* ")" | "a"\nitem: list | "b"+\n'
    lark = lark.replace('"("', '"aa"').replace('")"', '"b"')  # the small tokenizer's letters
    state = compiled(SMALL_COMPILER, guided_grammar=lark).start()
    assert allowed(state, N_SMALL) == [0, 8]  # a, aa
    assert not state.accept(8)
    assert allowed(state, N_SMALL) == [0, 1, 5, 6, 8]  # ab and bc as well: an item and what is between items
    assert not state.accept(6)
    assert not state.accept(1)
    assert state.accept(1) is False  # bb: an item that may end the list, or go on


# JSON.

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["x", "yy", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_the_output_follows_the_schema(seed: int) -> None:
    text = output(compiled(COMPILER, guided_json=SCHEMA), random_choice(seed))
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind", "tags"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert value["kind"] in ("x", "yy", None)
    assert len(value["tags"]) <= 3 and all(type(tag) is bool for tag in value["tags"])


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_any_object_is_an_object(seed: int) -> None:
    text = output(compiled(COMPILER, guided_json_object=True), random_choice(seed))
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema", ["true", "{}", {"type": "array"}, {"anyOf": [{"type": "null"}, {"const": "é"}]}]
)
def test_a_schema_may_be_of_other_values(schema: Any) -> None:
    for seed in range(5):
        choose = random_choice(seed)
        state, text = compiled(COMPILER, guided_json=schema).start(), b""
        for _ in range(300):
            token = choose(allowed(state, N_DEMO))
            text += DEMO.token_bytes(token)
            if state.accept(token):
                json.loads(text)
                break


@pytest.mark.parametrize(
    "text", ['{"a":[1,2],"b":{}}', '{"a": [1, 2], "b": {}}', '{ "a" : [ 1 , 2 ] , "b" : { } }']
)
def test_json_may_be_written_with_and_without_spaces(text: str) -> None:
    schema = {"properties": {"a": {"type": "array"}, "b": {"type": "object"}}, "type": "object"}
    state = compiled(COMPILER, guided_json=schema).start()
    ends = [state.accept(token) for token in DEMO.encode(text)]
    assert state.failure is None
    assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("begun", ["{", '{"a":', "[1,", '{"a":1'])
def test_there_is_never_a_second_blank(begun: str) -> None:
    state = compiled(COMPILER, guided_json={"type": ["object", "array"]}).start()
    for token in [*DEMO.encode(begun), *DEMO.encode(" ")]:
        assert not state.accept(token)
    texts = [DEMO.token_bytes(token) for token in allowed(state, N_DEMO)]
    assert texts and not [text for text in texts if text[:1].isspace()]


# Tokens that are no text, and the end.


def test_a_special_token_is_never_part_of_the_output() -> None:
    """Not where the grammar has its name as text, nor where any text may come."""
    text = output(compiled(COMPILER, guided_choice=["<|endoftext|>"]), random_choice(1))
    assert text == b"<|endoftext|>"
    state = compiled(SMALL_COMPILER, guided_regex="(?s).{2,}").start()
    assert not {END, PAD} & set(allowed(state, N_SMALL))


@pytest.mark.parametrize("beyond", [1, 20, 21, 22, 53, 54, 1000])  # at the masks' words and behind them
def test_an_id_without_a_token_is_never_allowed(beyond: int) -> None:
    vocab_size = N_SMALL + beyond
    compiler = GrammarCompiler(SMALL, vocab_size=vocab_size, eos_token_ids=[END, vocab_size - 1, vocab_size])
    state = compiled(compiler, guided_regex="(?s).+").start()
    assert set(allowed(state, vocab_size)) == {0, 1, 2, 3, 5, 6, 7, 8}  # not ©, the end of a character
    assert not state.accept(0)
    ends = {END, vocab_size - 1}  # the second has no token, but the model takes it for the end
    assert set(allowed(state, vocab_size)) == {0, 1, 2, 3, 5, 6, 7, 8} | ends
    assert state.accept(vocab_size - 1)
    assert state.failure is None


def test_an_end_of_sequence_token_that_has_bytes_is_the_end_alone() -> None:
    state = compiled(
        GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[0]), guided_regex="(ab?)+"
    ).start()
    assert allowed(state, N_SMALL) == [5, 8]  # ab, aa; not a
    assert not state.accept(5)
    assert allowed(state, N_SMALL) == [0, 5, 8]
    assert state.accept(0)
    assert state.failure is None


@pytest.mark.parametrize("eos", [(), (END,), (END, PAD)])
def test_a_model_may_have_no_end_of_sequence_token_or_several(eos: tuple[int, ...]) -> None:
    compiler = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=eos)
    choices = ("a", "ab", "aab", "bcc")
    check_every_mask(compiled(compiler, guided_choice=choices), {c.encode() for c in choices}, eos)


def test_without_an_end_of_sequence_token_the_empty_text_alone_is_refused() -> None:
    compiler = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[])
    assert "end-of-sequence" in refused(compiler, guided_grammar='start: ""')
    state = compiled(SMALL_COMPILER, guided_grammar='start: ""').start()
    assert allowed(state, N_SMALL) == [END]
    assert state.accept(END)
    assert state.failure is None


def test_what_looks_like_a_token_id_in_a_text_is_text() -> None:
    assert output(compiled(COMPILER, guided_grammar='start: "<[" /<[0-9]>/'), random_choice(2))[:3] == b"<[<"


def test_the_output_ends_where_the_vocabulary_cannot_go_on() -> None:
    """The regular expression could continue only with a letter that no token has."""
    grammar = compiled(GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[]), guided_regex="az?")
    state = grammar.start()
    assert allowed(state, N_SMALL) == [0]
    assert state.accept(0)
    assert state.failure is None


# What is refused.


def chain(n: int) -> dict[str, Any]:
    """A schema whose definitions refer to one another, `n` deep."""
    links = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(n)}
    return {"$defs": {**links, f"a{n}": {}}, "$ref": "#/$defs/a0"}


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(n: int, name: str) -> str:
    return "start: x0\n".replace("x", name) + "".join(
        f"{name}{i}: {name}{i + 1} {name}{i + 1}\n" for i in range(n)
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_regex": r"\bword"}, "lookarounds not supported"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_regex": r"(a)\1"}, "backreferences"),
        ({"guided_regex": "a\ud800"}, "lone surrogate at character 1"),
        ({"guided_regex": "[^\\s\\S]"}, "none of this model's tokens"),
        ({"guided_choice": ["a", "\udfff"]}, "lone surrogate"),
        ({"guided_json": {"type": "objct"}}, "objct"),
        ({"guided_json": {"not": {"pattern": "a"}}}, "it has pattern inside of not or if"),
        ({"guided_json": {"uniqueItems": True}}, "it has uniqueItems: a grammar does not remember"),
        ({"guided_json": {"$ref": "#"}}, "no value is valid by it, or only infinite ones"),
        ({"guided_json": {"$ref": "http://example.com/a.json"}}, "example.com"),
        ({"guided_json": {"enum": []}}, "no value"),
        ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"guided_json": {"oneOf": [{"type": "string"}, {"enum": ["a"]}]}}, "write anyOf"),
        ({"guided_json": '{"const": "\\ud800"}'}, "hex escape"),
        ({"guided_grammar": "start: a"}, 'unknown name: "a"'),
        ({"guided_grammar": 'start: "a\n'}, "lexer error"),
        ({"guided_grammar": "begin: /a/"}, "no start rule"),
        ({"guided_grammar": "start: start"}, "none of this model's tokens"),
        ({"guided_grammar": "start: <|endoftext|>"}, "special tokens"),
        ({"guided_grammar": "start: <[0]>"}, "by its id"),
        ({"guided_grammar": f'start: "a" /x/ <[{N_DEMO}]>'}, "by its id"),
        ({"guided_grammar": '{"grammars": [{"json_schema": {}}]}'}, "expecting rule"),
        ({"guided_grammar": 'start: x\nx[lazy, suffix="]", temperature=2]: /.*/'}, "temperature"),
        ({"guided_grammar": 'start: x\nx[stop="b"]: /.*/'}, "suffix"),
        ({"guided_grammar": "start: p::0x0\np::_: /a/ p::incr(_)"}, "parameter"),
    ],
)
def test_an_invalid_grammar_is_refused_naming_its_field(fields: dict[str, Any], text: str) -> None:
    message = refused(COMPILER, **fields)
    assert text in message
    assert len(message) < 400 and "\n" not in message


AMBIGUOUS = "start: e\ne: " + "".join("e " * k + "| " for k in range(2, 30)) + "/[a-z]?/"
STARS = "start: r0\n" + "".join(f"r{i}: ((((((r{i + 1})*)*)*)*)*)*\n" for i in range(200)) + 'r200: "a"'


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "a" * 4097}, "4096"),
        ({"guided_regex": "a?" * 2000}, "too large"),
        ({"guided_regex": "(a|b|)" * 600}, "too large"),
        ({"guided_regex": "(" * 2000 + "a" + ")" * 2000}, "nested"),
        ({"guided_choice": [f"{i:04}" * 64 for i in range(1024)]}, "65536"),
        ({"guided_json": nested(200)}, "nested deeper than 100 schemas"),
        ({"guided_json": {"type": "object", "properties": {f"k{i}": {} for i in range(2500)}}}, ""),
        ({"guided_json": {"type": "string", "pattern": "a?" * 2500}}, "5000 characters of patterns"),
        ({"guided_json": {"type": "object", "patternProperties": {f"^{i}x": {} for i in range(99)}}}, "99"),
        ({"guided_json": {"prefixItems": [{"multipleOf": 7 * i + 1001} for i in range(50)]}}, "multipleOf"),
        ({"guided_json": {"type": "number", "multipleOf": 0.1234567}}, "multipleOf"),
        ({"guided_json": {"prefixItems": [{"multipleOf": 1e308}, {"multipleOf": 10**999}]}}, "multipleOf"),
        ({"guided_json": {"type": "number", "multipleOf": True}}, ""),
        ({"guided_json": {"allOf": [{"type": "string", "pattern": f"{c}.{{9}}"} for c in "abcdefghij"]}}, ""),
        (
            {
                "guided_json": {
                    "allOf": [
                        {"anyOf": [{"type": "object", "properties": {f"p{i}{k}": {}}} for k in range(4)]}
                        for i in range(8)
                    ]
                }
            },
            "",
        ),
        ({"guided_grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
        ({"guided_grammar": "// " + "x" * 8192 + '\nstart: "a"'}, "8192"),
        ({"guided_grammar": 'start: T\nT: /.*/ & ~"a"' + ' & ~"b"' * 40}, "41 `&`"),
        ({"guided_grammar": doubled(40, "T") + 'T40: "a"'}, "too big"),
        ({"guided_grammar": AMBIGUOUS}, "items"),
        ({"guided_grammar": STARS}, "items"),
    ],
)
def test_a_hostile_grammar_is_refused(fields: dict[str, Any], text: str) -> None:
    message = refused(COMPILER, **fields)
    assert text in message
    assert len(message) < 400 and "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a{1,1000}){1,1000}"},
        {"guided_regex": "(a|b)*a(a|b){30}"},
        {"guided_regex": "a{1,4000000000}"},
        {"guided_regex": ".*a.{200}"},
        {"guided_json": {"enum": [f"value {i}" for i in range(3000)]}},
        {"guided_json": {"type": "string", "minLength": 1000, "maxLength": 4_000_000_000}},
        {"guided_json": {"type": "array", "minItems": 1_000_000}},
        {"guided_json": {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}},
        {"guided_json": chain(1300)},
        {"guided_json": nested(50)},
        {"guided_grammar": doubled(40, "r") + 'r40: "a"'},
        {"guided_grammar": "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(700)) + 'r700: "a"'},
    ],
)
def test_grammars_that_only_look_hostile_run(fields: dict[str, Any]) -> None:
    grammar = compiled(COMPILER, **fields)
    rng = np.random.default_rng(0)
    state = grammar.start()
    for _ in range(30):
        if state.accept(int(rng.choice(allowed(state, N_DEMO)))):
            break
    assert state.failure is None


# While it runs.


def test_a_limit_hit_while_it_runs_ends_the_output_and_not_the_engine() -> None:
    fields = {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}
    grammar = compiled(COMPILER, **fields)
    state, other = grammar.start(), compiled(COMPILER, guided_regex="a{1,9}").start()
    (token,) = {t for t in allowed(state, N_DEMO) if DEMO.token_bytes(t) == b"a"}
    n_tokens = 0
    while not state.accept(token):
        n_tokens += 1
        assert n_tokens < 1000, "the limit was never hit"
        tokens = allowed(state, N_DEMO)
        assert tokens  # always one, so that sampling goes on
    assert state.failure is not None and "expressions" in state.failure and "\n" not in state.failure
    assert state.is_exhausted
    assert set(allowed(state, N_DEMO)) == {t for t in range(N_DEMO) if DEMO.token_bytes(t)}
    assert state.accept(token) and state.accept(DEMO_EOS)
    assert not other.accept(token) and other.failure is None
    again = compiled(COMPILER, **fields)  # what its requests share is used up
    assert again is not grammar
    assert again.start().accept(token) is False


def test_a_token_that_was_not_allowed_ends_the_output() -> None:
    for token in (1, END + 1, -1, N_SMALL, 10**6):  # b, special, and no ids at all
        state = compiled(SMALL_COMPILER, guided_regex="a+").start()
        assert state.accept(token)
        assert state.failure is not None and str(token) in state.failure
        assert not state.is_exhausted, "the model's doing, not the grammar's"


def test_an_output_that_begins_again_comes_to_the_same() -> None:
    grammar = compiled(COMPILER, guided_json=SCHEMA)
    masks = list[list[list[int]]]()
    for _ in range(2):
        state, choose = grammar.start(), random_choice(5)
        masks.append([])
        for _ in range(12):
            masks[-1].append(allowed(state, N_DEMO))
            state.accept(choose(masks[-1][-1]))
    assert masks[0] == masks[1]


def test_outputs_of_one_grammar_do_not_disturb_one_another() -> None:
    grammar = compiled(SMALL_COMPILER, guided_regex="ab|ba")
    one, two = grammar.start(), grammar.start()
    assert not one.accept(0) and not two.accept(1)
    assert allowed(one, N_SMALL) == [1] and allowed(two, N_SMALL) == [0]


# Compiling.


def test_without_a_grammar_parameter_there_is_no_grammar() -> None:
    assert COMPILER.compile(SamplingParams(guided_json_object=False)) is None


def test_a_grammar_is_kept_and_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "N_KEPT", 3)
    compiler = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[END])
    first = compiled(compiler, guided_regex="a")
    assert compiled(compiler, guided_regex="a") is first
    refused(compiler, guided_regex="(a")
    assert compiled(compiler, guided_choice=["a"]) is not first
    assert compiled(compiler, guided_regex="a") is first  # used again, so not the oldest
    compiled(compiler, guided_regex="b")
    assert compiled(compiler, guided_regex="a") is first
    for regex in ("c", "ab", "bc"):
        compiled(compiler, guided_regex=regex)
    assert compiled(compiler, guided_regex="a") is not first


def test_many_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[END])
    words = [("a", "ab"), ("b", "bc"), ("c", "cab"), ("abc", "aab")]

    def work(i: int) -> None:
        choices = words[i % len(words)]
        if i % 5 == 4:
            refused(compiler, guided_regex="(a")
        check_every_mask(compiled(compiler, guided_choice=choices), {c.encode() for c in choices})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation keeps its place until it ends, so that abandoned ones hold no more cores than places."""
    monkeypatch.setattr(rooms, "COMPILE_PLACES", 2)
    monkeypatch.setattr(rooms, "COMPILE_PATIENCE", 10**9)
    compiler = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[END])
    monkeypatch.setattr(rooms, "COMPILE_SECONDS", 0.02)
    go_on = threading.Event()
    compile_now = compiler._compile

    def compute_first(source: Any) -> Grammar | str:
        while not go_on.is_set():
            sum(range(1000))
        return compile_now(source)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", compute_first)
        for regex in ("a", "b", "a"):  # the last is known, and takes no place
            assert "takes more than 0.02 s" in refused(compiler, guided_regex=regex)
    with pytest.raises(QueueFull, match="2 other grammars"):
        compiler.compile(SamplingParams(guided_regex="c"))
    go_on.set()
    monkeypatch.setattr(rooms, "COMPILE_SECONDS", 60.0)
    assert compiled(compiler, guided_regex="c").start()
    finish_compilations()
    monkeypatch.setattr(rooms, "COMPILE_PATIENCE", 5)


def finish_compilations() -> None:
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join(60)


def test_a_compilation_that_only_waits_is_not_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the wall clock would count the waiting."""
    compiler = GrammarCompiler(SMALL, vocab_size=N_SMALL, eos_token_ids=[END])
    monkeypatch.setattr(rooms, "COMPILE_SECONDS", 0.02)
    go_on = threading.Event()
    compile_now = compiler._compile

    def wait_first(source: Any) -> Grammar | str:
        assert go_on.wait(60)
        return compile_now(source)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", wait_first)
        with pytest.raises(QueueFull, match="the machine is too busy"):
            compiler.compile(SamplingParams(guided_regex="a"))
    monkeypatch.setattr(rooms, "COMPILE_SECONDS", 60.0)
    go_on.set()
    finish_compilations()
    assert compiled(compiler, guided_regex="a").start()


def test_threads_begun_later_have_the_stack_they_had() -> None:
    before = threading.stack_size(1 << 20)
    try:
        compiled(COMPILER, guided_regex="stack")
        assert threading.stack_size() == 1 << 20
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize(
    "lark", ['start: "a <[5]>', "start: /a <[5]>", 'start: "a" /b <[5]>\n', "start: /a\\/ <[5]>"]
)
def test_a_text_that_does_not_end_hides_nothing(lark: str) -> None:
    """Our reader takes the rest of the line as its content; llguidance refuses it."""
    assert "lexer error" in refused(COMPILER, guided_grammar=lark)
