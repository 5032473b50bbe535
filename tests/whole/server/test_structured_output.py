"""Structured output with the demo model at temperature 1: every complete output parses and validates."""

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import InvalidSamplingParameter, OutputFailed
from orca_jax.request.request import FinishReason
from orca_jax.service.generation import Generation, GenerationResult
from tests.host.grammar.any_schema import any_schema
from tests.host.grammar.test_any_schema import finite
from tests.whole.server.random_schemas import top_schema

N_SCHEMAS = 240
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
REGEXES = (
    r"[a-f0-9]{8}-[a-f0-9]{4}",
    r"(yes|no|perhaps)( indeed){0,2}",
    r"\d{4}-\d{2}-\d{2}",
    r"[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){0,2}\.",
    r"ä+ö*ü?€{1,2}",
)
CHOICES = ("red", "green", "blue", "greenish", "größer", "日本", "a\nb")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_batch_size=32) as llm:
        yield llm


def asked(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": seed, **fields})


def is_arithmetic(text: str) -> bool:
    """Checked with Python's parser: only numbers and operators, and it can be evaluated."""
    if not re.fullmatch(r"[0-9+\-*()]+", text):
        return False
    ast.parse(text, mode="eval")
    return True


def complete(results: list[GenerationResult]) -> list[GenerationResult]:
    assert {result.finish_reason for result in results} <= {FinishReason.STOP, FinishReason.LENGTH}
    return [result for result in results if result.finish_reason is FinishReason.STOP]


@pytest.mark.long
def test_random_schemas_are_kept(llm: LLM) -> None:
    schemas = [top_schema(random.Random(i)) for i in range(N_SCHEMAS)]
    results = llm.generate(
        ["In the beginning"] * N_SCHEMAS,
        [asked(i, guided_json=schema) for i, schema in enumerate(schemas)],
    )
    n_complete = 0
    for schema, result in zip(schemas, results, strict=True):
        if result.finish_reason is FinishReason.STOP:
            n_complete += 1
            value = json.loads(result.text)
            jsonschema_rs.validate(schema, value)
        else:
            assert result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == 120
    assert n_complete >= 0.9 * N_SCHEMAS


def outcomes(llm: LLM, seeds: range) -> Counter[str]:
    """Generate by one random schema for each seed, and count what became of them."""
    assert llm.tokenizer is not None
    counts, running = Counter[str](), list[tuple[dict[str, Any], Generation]]()
    prompt = llm.tokenizer.encode("In the beginning")
    # Else the model writes on and on, of which a schema knows nothing.
    ends = [*llm.config.eos_token_ids, *(token for mark in '"}],' for token in llm.tokenizer.encode(mark))]
    closing = dict.fromkeys(ends, 8.0)
    for seed in seeds:
        schema = any_schema(random.Random(seed))
        try:
            rules = llm.service.rules(asked(seed, guided_json=schema, logit_bias=closing))
        except InvalidSamplingParameter:
            counts["refused"] += 1
        else:
            running.append((schema, llm.service.submit(prompt, rules)))
    for schema, generation in running:
        result = generation.result(timeout=600)
        counts[str(result.finish_reason)] += 1
        if result.finish_reason is FinishReason.STOP:
            value = json.loads(result.text, parse_float=finite)
            assert jsonschema_rs.Draft202012Validator(schema).is_valid(value), (schema, result.text)
    return counts


def test_an_output_of_any_schema_is_valid_and_none_fails(llm: LLM) -> None:
    counts = outcomes(llm, range(150))
    assert counts.keys() <= {"stop", "length", "refused"}
    assert counts["stop"] > 75


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_that_holds_for_five_thousand_schemas(llm: LLM) -> None:
    counts = sum((outcomes(llm, range(i, i + 100)) for i in range(0, 5000, 100)), Counter[str]())
    print(dict(counts))
    assert counts.keys() <= {"stop", "length", "refused"} and counts.total() == 5000
    assert counts["stop"] > 2500


def test_a_json_object_is_an_object(llm: LLM) -> None:
    results = llm.generate(
        ["King David"] * 40, [asked(i, guided_json_object=True, max_tokens=200) for i in range(40)]
    )
    for result in complete(results):
        assert isinstance(json.loads(result.text), dict)
    for result in results:
        assert result.text.startswith("{")
    assert complete(results), "it rambles, but not always"


def test_regexes_choices_and_a_grammar_are_kept(llm: LLM) -> None:
    params = [asked(i, guided_regex=REGEXES[i % len(REGEXES)]) for i in range(60)]
    results = llm.generate(["Yes"] * 60, params)
    for param, result in zip(params, results, strict=True):
        if result.finish_reason is FinishReason.STOP:
            assert param.guided_regex is not None and re.fullmatch(param.guided_regex, result.text), (
                result.text
            )
    assert len(complete(results)) >= 50
    results = llm.generate(["A colour: "] * 40, [asked(i, guided_choice=CHOICES) for i in range(40)])
    assert {result.text for result in complete(results)} <= set(CHOICES)
    assert len(complete(results)) == 40 and len({result.text for result in results}) >= 4
    results = llm.generate(["1 + 1 = "] * 40, [asked(i, guided_grammar=ARITHMETIC) for i in range(40)])
    assert all(is_arithmetic(result.text) for result in complete(results))
    assert len(complete(results)) >= 20


def test_streamed_pieces_are_the_same_text(llm: LLM) -> None:
    schema = top_schema(random.Random(3))
    for seed in range(6):
        params = asked(seed, guided_json=schema)
        (whole,) = llm.generate("In the beginning", params)
        assert "".join(piece.text for piece in llm.stream("In the beginning", params)) == whole.text


def test_a_stop_string_and_max_tokens_cut_in(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 4, "maxItems": 6}
    plain = llm.generate("Colours:", asked(1, guided_json=schema))[0]
    assert json.loads(plain.text)
    (cut,) = llm.generate("Colours:", asked(1, guided_json=schema, stop=(",",)))
    assert cut.text == plain.text.split(",")[0] and cut.finish_reason is FinishReason.STOP
    (short,) = llm.generate("Colours:", asked(1, guided_json=schema, max_tokens=5))
    assert short.finish_reason is FinishReason.LENGTH
    assert short.token_ids == plain.token_ids[:5] and plain.text.startswith(short.text)


def test_a_grammar_goes_before_min_tokens_and_bad_words(llm: LLM) -> None:
    for fields in ({"min_tokens": 100}, {"bad_words": ["red", "re", "r"]}):
        (result,) = llm.generate("A colour: ", asked(1, guided_choice=("red",), **fields))
        assert (result.text, result.finish_reason) == ("red", FinishReason.STOP)


def test_a_grammar_changes_nothing_for_its_neighbours() -> None:
    """Without `deterministic` the number of requests changes the order of sums, and so draws."""
    plain = [SamplingParams(max_tokens=30, temperature=0.8, seed=i) for i in range(8)]
    mixed = [
        params for i in range(8) for params in (plain[i], asked(i, guided_json_object=True, max_tokens=30))
    ]
    with LLM(max_batch_size=16, deterministic=True) as llm:
        alone = llm.generate(["In the beginning"] * 8, plain)
        together = llm.generate(["In the beginning"] * 16, mixed)
    assert [result.text for result in together[::2]] == [result.text for result in alone]
    assert all(result.text.startswith("{") for result in together[1::2])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"guided_json": nested(300)},
    "alternatives of alternatives": {
        "guided_json": {"anyOf": [{"anyOf": [{"const": f"{i}-{j}"} for j in range(40)]} for i in range(40)]}
    },
    "a reference to itself": {"guided_json": {"$ref": "#"}},
    "many properties": {
        "guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
    },
    "a pattern": {"guided_json": {"type": "string", "pattern": "(a{1,500}){1,500}"}},
    "a regex of repetitions": {"guided_regex": "(a{1,1000}){1,1000}"},
    "a regex that doubles": {"guided_regex": "(a|b)*a(a|b){200}"},
    "an ambiguous grammar": {"guided_grammar": "start: e\ne: e e | e e e | /[a-z]?/"},
    "a grammar that never ends": {"guided_grammar": 'start: "a" start'},
    "long choices": {"guided_choice": [f"{i:06}" * 100 for i in range(100)]},
}


@pytest.mark.long
def test_a_hostile_grammar_is_refused_or_ends_only_its_own_request(llm: LLM) -> None:
    """Each ends within a bounded time, while streams get every token that they would get alone."""
    plain = [SamplingParams(max_tokens=400, temperature=0.9, seed=i, ignore_eos=True) for i in range(4)]
    alone = llm.generate(["And he said"] * 4, plain)
    ends: dict[str, str] = {}
    with ThreadPoolExecutor(4) as threads:
        for name, fields in HOSTILE.items():
            running = threads.map(lambda params: llm.generate("And he said", params)[0], plain)
            try:
                result = llm.stream("x", asked(1, max_tokens=40, **fields)).result(timeout=20)
                ends[name] = str(result.finish_reason)
            except (InvalidSamplingParameter, OutputFailed) as error:
                ends[name] = type(error).__name__
            assert [result.token_ids for result in running] == [result.token_ids for result in alone], name
    refused = {name for name, end in ends.items() if end == "InvalidSamplingParameter"}
    assert refused >= {"deep", "a reference to itself", "many properties"}, ends
    assert llm.service.failure is None
    assert llm.service.scheduler.n_rsrv == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        ({"guided_regex": "(a|b"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_choice": ()}, "guided_choice"),
        ({"guided_choice": ("a",), "guided_regex": "a"}, "guided_choice"),
        ({"guided_regex": "a", "allowed_token_ids": (5,)}, "allowed_token_ids"),
    ],
)
def test_an_invalid_grammar_is_refused_by_name(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidSamplingParameter) as caught:
        llm.generate("x", asked(1, **fields))
    assert caught.value.param == param
