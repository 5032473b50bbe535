"""`orca serve` with the model cut into stages and parts: the same text as one device gives."""

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from bench.server.server_process import ServerProcess
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.model import reference
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.generation import GenerationResult
from tests.xla_flags import xla_flags

SOON = 120.0
N_OUTPUT = 40
MARGIN = 1e-3  # logits: where the two best are closer, another order of sums may choose the other
PROMPTS = [
    "In the beginning",
    "And he said unto them, Go ye into all the world, and",
    "A",
    "The king answered and said to the wise men of the city, who stood before him in the morning: " * 3,
    "Now it came to pass",
    "Blessed are the",
]


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], GenerationResult]]:
    """The prompts' token ids, and one device's continuations."""
    tokenizer = Tokenizer.from_file(DEMO_MODEL / "tokenizer.json")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 4
    with LLM(dtype="float32", max_batch_size=4) as llm:
        params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
        return list(zip(prompts, llm.generate(prompts, params), strict=True))


def n_sure(prompt: list[int], output: list[int]) -> int:
    """Output tokens before the first for which the reference's two best logits are close."""
    checkpoint = load_checkpoint(DEMO_MODEL, dtype=jnp.float32)
    config, parameters = checkpoint.config, checkpoint.parameters
    logits = np.asarray(reference.forward(config, parameters, jnp.array(prompt + output)))
    best = np.sort(logits[len(prompt) - 1 : -1], axis=-1)[:, -2:]
    close = np.flatnonzero(best[:, 1] - best[:, 0] < MARGIN)
    return int(close[0]) if len(close) else len(output)


@pytest.mark.long
def test_four_devices_over_http_give_one_device_s_output(
    alone: list[tuple[list[int], GenerationResult]],
) -> None:
    flags = ("--pipeline-parallel", "2", "--tensor-parallel", "2", "--dtype", "float32")
    sizes = ("--max-batch-size", "4", "--served-model-name", "demo", "--access-log", "off")
    devices = {"XLA_FLAGS": xla_flags(4), "JAX_PLATFORMS": "cpu"}
    with (
        ServerProcess((*flags, *sizes), variables=devices) as server,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        server.wait_until_ready()
        assert "2 stages of 2 layers, 2 devices each" in server.stderr()

        def continued(prompt: list[int]) -> str:
            with openai.OpenAI(
                base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=SOON
            ) as client:
                chunks = client.completions.create(
                    model="demo",
                    prompt=prompt,
                    max_tokens=N_OUTPUT,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join(chunk.choices[0].text for chunk in chunks)

        texts = list(pool.map(continued, [prompt for prompt, _ in alone], timeout=SOON))
        assert server.stop() == 0

    tokenizer = Tokenizer.from_file(DEMO_MODEL / "tokenizer.json")
    n_all_sure = 0
    for text, (prompt, result) in zip(texts, alone, strict=True):
        tokens = result.token_ids
        assert len(tokens) == N_OUTPUT
        if text == result.text:
            n_all_sure += 1
            continue
        # All that came before a choice that is not sure is the same.
        sure = n_sure(prompt, tokens)
        assert sure < N_OUTPUT, (text, result.text)
        assert text.startswith(tokenizer.decode(tokens[:sure]).rstrip("\N{REPLACEMENT CHARACTER}"))
    assert n_all_sure >= len(PROMPTS) - 1


def test_the_devices_must_be_there() -> None:
    devices = {"XLA_FLAGS": xla_flags(2), "JAX_PLATFORMS": "cpu"}
    flags = ("--pipeline-parallel", "2", "--tensor-parallel", "2")
    server = ServerProcess(flags, variables=devices)
    try:
        assert server.wait(SOON) == 2
        stderr = server.stderr()
        assert "needs 4 devices; JAX has 2" in stderr and "Traceback" not in stderr
    finally:
        server.kill()
