"""Searching the text of a grammar takes time linear in its length."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.grammar import source
from orca_jax.grammar.source import shortened
from orca_jax.request.sampling_params import SamplingParams

PIECES = [
    *(
        "\\/",
        "/a",
        "/\\/",
        '"a',
        '"\\"',
        "?!",
        "w",
        "-a",
        "a[",
        "a[\n",
        "a[]",
        "a::",
        "\\",
        "\n",
        " ",
        " \t\n",
    ),
    *(
        "temperature ",
        "temperature\n",
        "stop",
        "a[temperature\n",
        "a[stop",
        "a[//",
        "//",
        '"',
        "/",
        '"/',
        "<[",
    ),
    *("a[/x/", 'a["x"', 'a["\\', "::", "0 |\n", "^\n", "1(1): ", "error: \n"),
]


def fastest(work: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(5):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def read(text: str) -> None:
    try:
        source.grammar_text(SamplingParams(guided_grammar=text))
    except InvalidSamplingParameter:
        pass


@pytest.mark.parametrize(
    "before",
    [
        "",
        "a[",
        'a["',
        *(pytest.param(text, marks=pytest.mark.long) for text in ("a[/", "a[temperature", "a")),
    ],
)
def test_twice_the_text_takes_twice_the_time(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_LARK", 1 << 20)
    monkeypatch.setattr(source, "MAX_OPERATORS", 1 << 20)
    slow = list[str]()
    for piece in PIECES:
        for work in (read, shortened):
            some, more = (before + piece * (n // len(piece)) for n in (4_000, 64_000))
            one, many = fastest(partial(work, some)), fastest(partial(work, more))
            if many > 0.05 and many > 16 * 4 * one:  # linear: 16 times
                slow.append(f"{piece!r}, {work.__name__}: {one:.4f} s, then {many:.4f} s")
    assert not slow


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a" <[5]>',
        'start: "a\\"" <[5]>',
        "start: /a\\// <[5]>",
        'start: "//" <[5]>',
        "start: /a/ /b/ <[5]> /c/",
        '// "\nstart: <[5]>',
        '// /\nstart: "x" <[5]>',
        'start: "x\n  <[5]>',
    ],
)
def test_a_token_by_its_id_is_found_outside_of_texts(lark: str) -> None:
    with pytest.raises(InvalidSamplingParameter, match="by its id"):
        source.grammar_text(SamplingParams(guided_grammar=lark))


@pytest.mark.parametrize(
    "lark", ['start: "<["', "start: /<[a]/", 'start: "\\"<["', "start: /\\/<[a]/", 'start: "a" // <[5]>']
)
def test_and_not_inside(lark: str) -> None:
    assert source.grammar_text(SamplingParams(guided_grammar=lark)) is not None
