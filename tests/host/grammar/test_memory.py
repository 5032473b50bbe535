"""The memory of grammars is bounded, and a panic in one ends only its output."""

import gc
from typing import Any

import numpy as np
import pytest

from orca_jax.errors import InvalidPrompt, InvalidSamplingParameter, OutputFailed, QueueFull
from orca_jax.grammar import grammar as rooms
from orca_jax.grammar import memory as grammar_memory
from orca_jax.grammar import source
from orca_jax.grammar.grammar import Grammar, GrammarCompiler
from orca_jax.grammar.memory import HeapGrowth, LiveGrammars, grown_by
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import TextStream, Tokenizer
from tests.host.engines import LETTERS

N = 256


class PanicException(BaseException):
    """A stand-in for pyo3's PanicException, which cannot be imported."""


class Panicking:
    """A stand-in for any object that is written in Rust."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error or PanicException("index out of bounds: the len is 3\n<backtrace> and more")

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object, **__: object) -> Any:
            raise self._error

        return fail


def compiler() -> GrammarCompiler:
    return GrammarCompiler(LETTERS, vocab_size=N, eos_token_ids=[])


def compiled(compiler: GrammarCompiler, regex: str) -> Grammar:
    grammar = compiler.compile(SamplingParams(guided_regex=regex))
    assert grammar is not None
    return grammar


# What they hold.


@pytest.mark.skipif(grammar_memory._heap is None, reason="this C library does not tell")
def test_heap_growth_measures_a_grammar() -> None:
    schemas = {
        "small": '{"type": "boolean"}',
        "large": '{"prefixItems": [{"multipleOf": 19997}], "type": "array"}',
    }
    sizes = dict[str, int]()
    for name, schema in schemas.items():
        grammar = compiler().compile(SamplingParams(guided_json=schema))
        assert grammar is not None
        sizes[name] = grammar.n_bytes_compiled
    assert sizes["small"] < 3 << 20 < 6 << 20 < sizes["large"] < 60 << 20


def test_where_the_heap_cannot_be_asked_one_is_charged_with_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_memory, "_heap", None)
    assert HeapGrowth().n_bytes() == 4 << 20
    counts = iter([10**9, 10, 10, 10**12])
    monkeypatch.setattr(grammar_memory, "_heap", lambda: next(counts))
    assert HeapGrowth().n_bytes() == 64 << 10  # others have given back
    assert HeapGrowth().n_bytes() == 256 << 20  # others have taken


def test_a_grammar_in_use_grows_to_a_bound() -> None:
    grammar = compiled(compiler(), "[ab]+")
    before = grammar.n_bytes
    state, into = grammar.start(), np.empty(N // 32, np.int32)
    for _ in range(10):
        state.allowed(into)
        state.allowed(into)  # known already
        state.accept(97)
    assert grammar.n_bytes - before >= grown_by(10) > 0
    assert grown_by(10**9) == 32 << 20


def sized(monkeypatch: pytest.MonkeyPatch, each: int, most: int) -> None:
    monkeypatch.setattr(HeapGrowth, "n_bytes", lambda _: each)
    monkeypatch.setattr(rooms, "grown_by", lambda _: 0)
    monkeypatch.setattr(rooms, "MAX_BYTES", most)


def test_the_oldest_that_are_kept_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, 100, 300)
    cache = compiler()
    first, second = id(compiled(cache, "a")), compiled(cache, "b")
    third = compiled(cache, "c")
    assert cache._live.n_bytes() == 300
    compiled(cache, "d")
    assert cache._live.n_bytes() == 300
    assert compiled(cache, "b") is second and compiled(cache, "c") is third
    assert "a" not in {text.lark[8:-1] for text in cache._kept}
    assert first


def test_cached_grammars_have_bytes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if there is room in all, the cache has room for two of 100 bytes; a larger one is kept alone."""
    sized(monkeypatch, 100, 10_000)
    monkeypatch.setattr(rooms, "KEPT_BYTES", 250)
    cache = compiler()
    first = compiled(cache, "a")
    second = compiled(cache, "b")
    assert compiled(cache, "a") is first  # used again, so not the oldest
    third = compiled(cache, "c")
    assert cache._live.n_bytes() == 300  # the second is still in use
    assert compiled(cache, "a") is first and compiled(cache, "c") is third
    assert compiled(cache, "b") is not second
    del first, second, third
    monkeypatch.setattr(HeapGrowth, "n_bytes", lambda _: 1000)
    large = compiled(cache, "d")
    assert cache._live.n_bytes() == 1000 and compiled(cache, "d") is large


def test_grammars_in_use_leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, 100, 300)
    cache = compiler()
    states = [compiled(cache, regex).start() for regex in "abc"]
    with pytest.raises(QueueFull, match="the maximum; try again later"):
        compiled(cache, "d")
    with pytest.raises(QueueFull):
        compiled(cache, "e")
    states.pop()
    gc.collect()
    assert compiled(cache, "d")


def test_unreferenced_grammars_are_not_counted() -> None:
    live = LiveGrammars()
    grammar = compiled(compiler(), "a")
    live.add(grammar)
    live.add(grammar)
    assert live.n_bytes() == grammar.n_bytes
    del grammar
    gc.collect()
    assert live.n_bytes() == 0


# Panics.


@pytest.mark.parametrize("error", [None, RuntimeError("out of luck")])
def test_a_panic_ends_the_output_that_met_it(error: Exception | None) -> None:
    grammar = compiled(compiler(), "[ab]+")
    states = [grammar.start() for _ in range(3)]
    into = np.empty(N // 32, np.int32)
    for state in states[:2]:
        state._matcher = Panicking(error)  # type: ignore[assignment]
    states[0].allowed(into)
    assert into.any()  # something may always come, so that sampling goes on
    assert states[1].accept(97)
    for state in states[:2]:
        assert (
            state.failure is not None and "llguidance failed" in state.failure and "\n" not in state.failure
        )
        assert state.accept(97)
        state.allowed(into)
    assert grammar.worn
    assert not states[2].accept(97) and states[2].failure is None


def test_a_panic_before_an_output_begins() -> None:
    grammar = compiled(compiler(), "[ab]+")
    grammar._matcher = Panicking()  # type: ignore[assignment]
    with pytest.raises(OutputFailed, match="index out of bounds"):
        grammar.start()


def test_a_panic_where_a_regular_expression_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "regex_to_lark", Panicking().call)
    with pytest.raises(
        InvalidSamplingParameter, match="guided_regex cannot be followed: index out of bounds"
    ):
        compiled(compiler(), "a")


def test_exceptions_that_end_a_thread_are_not_failures() -> None:
    state = compiled(compiler(), "[ab]+").start()
    state._matcher = Panicking(KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        state.accept(97)
    with pytest.raises(KeyboardInterrupt):
        state.allowed(np.empty(N // 32, np.int32))


def test_a_panic_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(LETTERS._tokenizer)
    tokenizer._tokenizer = Panicking()  # type: ignore[assignment]
    with pytest.raises(InvalidPrompt, match="index out of bounds"):
        tokenizer.encode("abc")
    stream = TextStream(tokenizer)
    assert not stream.push(97)
    assert stream.take() == "\ufffd"
