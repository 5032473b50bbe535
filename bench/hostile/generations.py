"""Attacks by the contents of requests: grammars, texts, numbers."""

import itertools
import json
import math
from typing import Any

from bench.hostile.target import CHAT, COMPLETIONS, Target

_AMBIGUOUS = "start: e\ne: " + "".join("e " * k + "| " for k in range(2, 30)) + "/[a-z]?/"
_STARS = "start: r0\n" + "".join(f"r{i}: ((((((r{i + 1})*)*)*)*)*)*\n" for i in range(200)) + 'r200: "a"'


def _doubled(n: int, name: str) -> str:
    rules = "".join(f"{name}{i}: {name}{i + 1} {name}{i + 1}\n" for i in range(n))
    return f'start: {name}0\n{rules}{name}{n}: "a"'


def _nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


# The costliest of tests/host/grammar/test_grammar.py, both rejected ones and ones that run.
_COSTLY: tuple[dict[str, Any], ...] = (
    {"guided_regex": "a?" * 2000},
    {"guided_regex": "(a|b|)" * 600},
    {"guided_regex": "(" * 2000 + "a" + ")" * 2000},
    {"guided_regex": "(a{1,1000}){1,1000}"},
    {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"guided_regex": "(a|b)*a(a|b){30}"},
    {"guided_regex": ".*a.{200}"},
    {"guided_choice": [f"{i:03}" * 21 for i in range(1000)]},
    {"guided_json": _nested(200)},
    {"guided_json": _nested(50)},
    {"guided_json": {"type": "object", "properties": {f"k{i}": {} for i in range(2500)}}},
    {"guided_json": {"type": "object", "patternProperties": {f"^{i}x": {} for i in range(32)}}},
    {"guided_json": {"prefixItems": [{"multipleOf": 7 * i + 101} for i in range(40)]}},
    {"guided_json": {"allOf": [{"type": "string", "pattern": f"{c}.{{9}}"} for c in "abcdefghij"]}},
    {"guided_json": {"enum": [f"value {i}" for i in range(3000)]}},
    {"guided_json": {"type": "string", "minLength": 1000, "maxLength": 4_000_000_000}},
    {"guided_json": {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}},
    {"guided_json": "[" * 60_000},
    {"guided_json": json.dumps(_nested(450))},
    {"guided_grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
    {"guided_grammar": 'start: T\nT: /.*/ & ~"a"' + ' & ~"b"' * 15},
    {"guided_grammar": _doubled(40, "T")},
    {"guided_grammar": _doubled(40, "r")},
    {"guided_grammar": _AMBIGUOUS},
    {"guided_grammar": _STARS},
    {"guided_grammar": "x[" + "a" * 8000},
    {"guided_grammar": 'x["' * 2700},
    {"guided_grammar": '"' * 8190},
    {"guided_grammar": "/" * 8190},
)


async def quadratic_grammars(target: Target) -> None:
    r"""Eight concurrent grammars of 8 KB of `\/`, all different."""
    numbers = itertools.count()

    async def attempt() -> None:
        body = {"prompt": "a", "max_tokens": 1, "guided_grammar": "\\/" * 4085 + f"{next(numbers)}"}
        await target.ask(target.post(COMPLETIONS, body))

    await target.repeat(8, attempt)


async def costly_grammars(target: Target) -> None:
    """Grammars, schemas and expressions at and just above the limits of compilation, each compiled twice."""
    bodies = [{"prompt": "a", "max_tokens": 32, "ignore_eos": True, **costly} for costly in _COSTLY]
    await target.flood(8, [target.post(COMPLETIONS, body) for body in bodies])


async def distinct_grammars(target: Target) -> None:
    """Requests that each have a new large grammar, with an output that makes it grow."""
    numbers = itertools.count(1_000_000 * target.number)

    async def attempt() -> None:
        number = next(numbers)
        some: list[dict[str, Any]] = [
            {"guided_regex": f"{number}(a{{1,{900 + number % 99}}}){{1,1000}}"},
            {"guided_regex": f"({number}|a|b)*a(a|b){{25}}"},
            {"guided_choice": [f"{number} {i:04} {'x' * 50}" for i in range(1000)]},
            {"guided_json": {"enum": [f"{number} {i}" for i in range(2000)]}},
            {"guided_json": {"prefixItems": [{"multipleOf": 7 * i + 101} for i in range(30)], "x": number}},
        ]
        grammar = some[number % len(some)]
        body = {"prompt": "a", "max_tokens": 24, "temperature": 2, "ignore_eos": True, **grammar}
        await target.ask(target.post(COMPLETIONS, body))

    await target.repeat(8, attempt)


async def stop_strings(target: Target) -> None:
    """Sixteen stop strings of 1,024 characters for 128 choices."""
    stop = [chr(ord("a") + i) * 1023 + "b" for i in range(16)]
    bodies = [{"prompt": "a", "max_tokens": most, "n": 128, "stop": stop} for most in (1, 16)]
    await target.flood(4, [target.post(COMPLETIONS, body) for body in bodies])


async def bad_words(target: Target) -> None:
    """256 bad words, different for each request: one as long as allowed, and all together as allowed."""
    numbers = itertools.count()

    async def attempt() -> None:
        number = next(numbers)
        length = (32, 1024, 32)[number % 3]
        words = [f"{number} {i} {'the a ' * 200}"[:length] for i in range(256)]
        body = {"prompt": "the", "max_tokens": 64, "n": 1 + 7 * (number % 2), "bad_words": words}
        await target.ask(target.post(COMPLETIONS, body))

    await target.repeat(8, attempt)


async def full_queue(target: Target) -> None:
    """Eight concurrent requests of 128 choices of maximum length, repeated."""
    body = {"prompt": "a", "max_tokens": 400, "n": 128, "ignore_eos": True}
    await target.flood(8, [target.post(COMPLETIONS, body)])


async def infinities(target: Target) -> None:
    """Parameters that make values in the sampler infinite."""
    extremes: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1e-38, "logit_bias": {"5": 100}},
        {"repetition_penalty": 1e-45, "logit_bias": {"5": -100}},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 100, "frequency_penalty": 2, "presence_penalty": 2},
        {"temperature": 1e-45},
        {"temperature": 5e-324, "logit_bias": {"5": 100}},
        {"temperature": 1e-45, "repetition_penalty": 1e-38, "logit_bias": {"5": 100}},
        {"top_p": 1e-45},
        {"top_p": 5e-324, "temperature": 100},
        {"min_p": 1, "temperature": 100, "top_k": 1 << 30},
        {"logit_bias": {str(i): 100 for i in range(2048)}, "temperature": 1e-38},
        {"logit_bias": {str(i): -100 for i in range(2048)}, "top_p": 1e-38},
    )
    bodies = [
        {"prompt": [5], "max_tokens": 8, "ignore_eos": True, "logprobs": 5, "seed": 1, **extreme}
        for extreme in extremes
    ]
    assert all(math.isfinite(value) for body in bodies for value in body.values() if type(value) is float)
    await target.flood(4, [target.post(COMPLETIONS, body) for body in bodies])


async def log_probabilities(target: Target) -> None:
    """Log-probabilities of a long prompt and of all its 128 choices, with the twenty most likely of each."""
    prompt = [1 + i % 2000 for i in range(400)]
    more = {"prompt": prompt, "max_tokens": 16, "n": 128, "logprobs": 20}
    bodies = [{**more, "echo": True}, {**more, "stream": True}, {**more, "max_tokens": 0, "echo": True}]
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 128, "logprobs": True, "top_logprobs": 20}
    requests = [target.post(COMPLETIONS, body) for body in bodies] + [target.post(CHAT, chat)]
    await target.flood(2, requests)


ATTACKS = (
    quadratic_grammars,
    costly_grammars,
    distinct_grammars,
    stop_strings,
    bad_words,
    full_queue,
    infinities,
    log_probabilities,
)
