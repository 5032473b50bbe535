"""A model with an encoder over HTTP and in worker processes gives transformers' tokens."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError, NotSupported, PromptTooLong
from tests.device.model.golden_beams import load_beams
from tests.device.model.golden_encoders import GoldenEncoder, load_golden_encoder
from tests.endpoint.harness import serving_model
from tests.endpoint.http_client import connected

GOLDEN = load_golden_encoder("t5-gated")
SIZES: dict[str, Any] = {"max_batch_size": 8, "max_batch_tokens": 64, "n_slots": 4096}


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


def some(golden: GoldenEncoder, n: int) -> list[int]:
    """The inputs with the surest outputs of the reference."""
    return sorted(range(len(golden.inputs)), key=lambda i: -len(golden.sure(i)))[:n]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(GOLDEN.directory, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[httpx2.Client]:
    with serving_model(llm.service, llm.config, llm.serving) as server, connected(server) as client:
        yield client


def test_completions_are_transformers_tokens(llm: LLM, client: httpx2.Client) -> None:
    chosen = some(GOLDEN, 3)
    body = {"prompt": [list(GOLDEN.inputs[i]) for i in chosen], "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == sum(len(GOLDEN.inputs[i]) for i in chosen)
    for i, choice in zip(chosen, answer["choices"], strict=True):
        tokens = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
        assert tuple(tokens) == GOLDEN.outputs[i][:8]


def test_a_decoder_s_prompt_is_continued(llm: LLM, client: httpx2.Client) -> None:
    (i,) = some(GOLDEN, 1)
    prompt, begun = list(GOLDEN.inputs[i]), list(GOLDEN.outputs[i][:3])
    (result,) = llm.generate(prompt, greedy(5), decoder_prompts=begun)
    assert tuple(result.token_ids) == GOLDEN.outputs[i][3:8]
    assert llm.stream(prompt, greedy(5), decoder_prompt=begun).result().token_ids == result.token_ids
    body = {"prompt": prompt, "decoder_prompt": begun, "max_tokens": 5, "temperature": 0, "logprobs": 0}
    (choice,) = client.post("/v1/completions", json=body | {"ignore_eos": True}).json()["choices"]
    tokens = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    assert tokens == list(result.token_ids)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "knows no conversations"),
        ("completions", {"prompt": [5], "echo": True}, "echo is not supported"),
        ("completions", {"prompt": [5], "prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"prompt": [5], "decoder_prompt": "a"}, "decoder_prompt must be token ids"),
        ("completions", {"prompt": [5], "decoder_prompt": [103]}, "token id 103 is not in the vocabulary"),
        ("completions", {"prompt": [5] * 64}, "the encoder can read at most 63"),
    ],
)
def test_what_such_a_model_cannot_do_is_refused(
    client: httpx2.Client, path: str, body: dict[str, object], message: str
) -> None:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_python_refuses_it_too(llm: LLM) -> None:
    with pytest.raises(NotSupported, match="scores are not supported for a model with an encoder"):
        llm.score([[5, 6]])
    with pytest.raises(PromptTooLong):
        llm.generate([5] * 64)
    with pytest.raises(ConfigError, match="prefix_caching is on, and the model has an encoder"):
        LLM(GOLDEN.directory, **SIZES, prefix_caching=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5-gated", "bart-gelu"])
def test_two_worker_processes(name: str) -> None:
    golden, beams = load_golden_encoder(name), load_beams(name)
    searches = [
        own
        for own in beams.searches
        if (own.n_beams, own.length_penalty, own.early_stopping) == (4, 1.0, False)
    ]
    assert searches
    with LLM(golden.directory, **SIZES, pipeline_parallel=2, worker_processes=True) as llm:
        results = llm.generate([list(ids) for ids in golden.inputs], greedy(16))
        found = llm.beam_search(
            [list(own.encoder_ids) for own in searches],
            decoder_prompts=[list(own.prompt) for own in searches],
            beam_width=4,
            n=4,
            max_tokens=beams.max_output,
            stop_token_ids=beams.eos_token_ids,
            ignore_eos=True,
        )
    for i, result in enumerate(results):
        sure = golden.sure(i)
        assert tuple(result.token_ids[: len(sure)]) == sure, i
    # Blocks are copied in both processes.
    assert [tuple(one.token_ids) for one in found] == [ids for own in searches for ids in own.tokens]
    scores = [score for own in searches for score in own.scores]
    assert [one.score for one in found] == pytest.approx(scores, abs=1e-4)
