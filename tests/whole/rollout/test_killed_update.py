"""A worker process is killed at every tenth of an update: old or new weights, and the rollout resumes."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import RestartBound
from orca_jax.errors import CheckpointError
from orca_jax.model import reference
from orca_jax.rollout import Rollout, Sample
from tests.whole.training.weights import PROMPTS, SIZES, arrays, checkpoint, model_of

N = 40  # output tokens
_STARTED = re.compile(r"stage (\d): its process \(pid (\d+)\) was started")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_at_every_tenth(tmp_path: Path) -> None:
    """Each token is one that the weights of its version give; samples are those of a run without kills."""
    saved = [checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)]
    params = SamplingParams(n=2, max_tokens=N, temperature=1.0, ignore_eos=True, logprobs=0, seed=5)
    model, weights = model_of(saved[0]), [arrays(each) for each in saved]
    forward = jax.jit(lambda weights, text: jax.nn.log_softmax(reference.forward(model, weights, text)))
    undisturbed = [undisturbed_tokens(each, params) for each in saved]
    assert undisturbed[0] != undisturbed[1]

    def check(sample: Sample, held: dict[int, int]) -> None:
        text = np.zeros(64, np.int32)
        whole = [*sample.prompt_ids, *sample.token_ids]
        text[: len(whole)] = whole
        assert sample.logprobs is not None
        for version in {*sample.versions.tolist()}:
            these = sample.versions == version
            exact = np.asarray(forward(weights[held[version]], jnp.asarray(text)))
            exact = exact[len(sample.prompt_ids) - 1 :][range(N), sample.token_ids]
            # One place of this random model is ill-conditioned; other weights differ by more than 1.
            np.testing.assert_allclose(sample.logprobs[these], exact[these], atol=0.01)
        first = int((sample.versions == sample.versions[0]).sum())
        same = undisturbed[held[int(sample.versions[0])]][sample.key, sample.seed]
        assert sample.token_ids[:first].tolist() == same[:first]

    events, held = list[str](), {0: 0}
    options = {
        **SIZES,
        "pipeline_parallel": 2,
        "worker_processes": True,
        "restarts": RestartBound(restarts=100),
    }
    with LLM(saved[0], **options, on_event=events.append) as llm, Rollout(llm) as rollout:
        begin = time.perf_counter()
        held[rollout.update(saved[1])] = 1
        seconds = time.perf_counter() - begin
        for tenth in range(11):
            for i, prompt in enumerate(PROMPTS):
                rollout.submit(prompt, params, key=f"{i}")
            pids = {match[1]: int(match[2]) for event in events if (match := _STARTED.match(event))}
            victim = pids[f"{1 + tenth % 2}"]
            killer = threading.Timer(seconds * tenth / 10, os.kill, (victim, signal.SIGKILL))
            killer.start()
            target = 1 - held[llm.weights_version]
            try:
                held[rollout.update(saved[target])] = target
            except CheckpointError:
                pass  # all workers have the old weights
            killer.join()
            for group in rollout.take(len(PROMPTS)):
                for sample in group.samples:
                    check(sample, held)
            assert llm.weights_version == max(held)
    n_started = sum(_STARTED.match(event) is not None for event in events)
    assert n_started >= 2 + 10, "a worker was lost each time, if not perhaps the last time"


def undisturbed_tokens(directory: Path, params: SamplingParams) -> dict[tuple[str | int, int], list[int]]:
    """The tokens of each sample, by its group's key and its seed, in one process."""
    with LLM(directory, **SIZES) as llm, Rollout(llm) as rollout:
        for i, prompt in enumerate(PROMPTS):
            rollout.submit(prompt, params, key=f"{i}")
        samples = [sample for group in rollout.take(len(PROMPTS)) for sample in group.samples]
    return {(sample.key, sample.seed): sample.token_ids.tolist() for sample in samples}
