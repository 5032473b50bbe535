"""LLM.embed: Hugging Face's hidden states on every kind of engine, and its refusals."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM
from orca_jax.errors import (
    EmptyPrompt,
    InvalidRequest,
    InvalidSchedulingParameter,
    NotSupported,
    PromptTooLong,
    ServiceClosed,
    TokenOutOfRange,
)
from orca_jax.request.request import Row
from orca_jax.scheduling.engine_protocol import Iteration
from tests.device.model.golden import DIRECTORY
from tests.device.model.golden_hidden import load_hidden
from tests.whole.commands.test_llm import at_rest
from tests.whole.workers.test_lost_caches import STARTED

NAME = "gpt2-sharded-relu"
SIZES: dict[str, Any] = {"max_batch_size": 4, "n_slots": 1024, "max_batch_tokens": 64, "dtype": "float32"}


def assert_those_of_hugging_face(llm: LLM) -> None:
    golden = load_hidden(NAME)
    for pooling in ("last", "mean"):
        expected = golden.last if pooling == "last" else golden.mean
        ours = llm.embed(golden.prompts, pooling=pooling, normalize=False)
        np.testing.assert_allclose(np.stack(ours), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compile_ahead": True, "on_compile": "error"}, id="no compile after ready"),
        pytest.param({"tensor_parallel": 2}, id="two devices", marks=pytest.mark.long),
    ],
)
def test_they_are_those_of_hugging_face(options: dict[str, Any]) -> None:
    with LLM(DIRECTORY / NAME, **SIZES, **options) as llm:
        assert_those_of_hugging_face(llm)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2])
def test_in_worker_processes_and_after_the_loss_of_one(stage: int) -> None:
    pids: dict[int, int] = {}
    killed: list[int] = []

    def hear(event: str) -> None:
        if started := STARTED.match(event):
            pids[int(started[1])] = int(started[2])

    with LLM(DIRECTORY / NAME, **SIZES, worker_processes=True, pipeline_parallel=2, on_event=hear) as llm:
        assert_those_of_hugging_face(llm)
        service = llm.service
        issue = service.scheduler.engine.issue

        def deadly(rows: Sequence[Row]) -> Iteration:
            """Kill the worker when a part of a prompt has been pooled."""
            iteration = issue(rows)
            if not killed and any(req.pooling and req.pooled is not None for req, _ in rows):
                os.kill(pids[stage], signal.SIGKILL)
                killed.append(stage)
            return iteration

        service.scheduler.engine.issue = deadly
        assert_those_of_hugging_face(llm)
        assert (killed, service.recovery.losses) == ([stage], 1)


def test_texts_are_cut_and_normalized(tiny: LLM) -> None:
    (raw,) = tiny.embed("a text", normalize=False)
    (whole,) = tiny.embed("a text")
    (short,) = tiny.embed("a text", dimensions=5)
    assert raw.dtype == whole.dtype == np.float32
    assert (raw.shape, short.shape) == ((16,), (5,))
    np.testing.assert_allclose(whole, raw / np.linalg.norm(raw), atol=1e-6)
    np.testing.assert_allclose(short, raw[:5] / np.linalg.norm(raw[:5]), atol=1e-6)
    np.testing.assert_array_equal(whole, tiny.embed([list(b"a text")])[0])
    assert tiny.embed([]) == []
    assert at_rest(tiny)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([[1], []], {}, EmptyPrompt, "prompt 1: the prompt has no tokens"),
        ([[1, 260]], {}, TokenOutOfRange, "prompt 0: token id 260 is not in the vocabulary"),
        ([[3] * 64], {}, PromptTooLong, "prompt 0: the prompt has 64 tokens"),
        (
            [[1]],
            {"pooling": "max"},
            InvalidRequest,
            "prompt 0: pooling is 'max'; it must be last, mean or cls",
        ),
        ([[1]], {"dimensions": 17}, InvalidRequest, "dimensions is 17; it must be from 1 to 16"),
        ([[1]], {"dimensions": 0}, InvalidRequest, "dimensions is 0"),
        ([[1]], {"priority": 1}, InvalidSchedulingParameter, "'fcfs'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    tiny: LLM, prompts: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    n_before = len(tiny.service.timeline.iterations)
    with pytest.raises(error, match=message):
        tiny.embed(prompts, **options)
    assert len(tiny.service.timeline.iterations) == n_before


def test_a_model_with_an_encoder_and_a_closed_one_have_none() -> None:
    message = "embeddings are not supported for a model with an encoder"
    sizes: dict[str, Any] = {"max_batch_size": 2, "n_slots": 256, "max_batch_tokens": 64}
    with LLM(DIRECTORY / "t5-relu", **sizes) as llm, pytest.raises(NotSupported, match=message):
        llm.embed([[5, 6]])
    with pytest.raises(ServiceClosed):
        llm.embed([[5, 6]])
