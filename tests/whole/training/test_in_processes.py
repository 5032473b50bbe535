"""New weights, sleep and a lost worker, with each stage in its own process."""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import CheckpointError, ConfigError, TensorMismatch
from tests.device.checkpoint.test_trainers import golden_of
from tests.whole.training.test_trainers_layouts import trainers_arrays
from tests.whole.training.weights import SIZES, arrays, checkpoint, reference_tokens, tokens


@pytest.mark.long
@pytest.mark.timeout(400)
def test_weights_of_worker_processes(tmp_path: Path):
    old, new = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    expected = {"old": reference_tokens(old), "new": reference_tokens(new)}
    events = list[str]()
    with LLM(old, **SIZES, pipeline_parallel=2, worker_processes=True, on_event=events.append) as llm:
        assert tokens(llm) == expected["old"]
        assert llm.update_weights(new) == 1
        assert tokens(llm) == expected["new"]
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == expected["new"]
        assert llm.update_weights(arrays(old)) == 2
        assert tokens(llm) == expected["old"]
        with pytest.raises(TensorMismatch, match=r"layers\.1\.up\.bias is missing"):
            llm.update_weights({n: value for n, value in arrays(new).items() if n != "layers.1.up.bias"})
        with pytest.raises(CheckpointError):
            llm.update_weights(tmp_path)
        pair = {".lora_a": np.ones((1, 16), np.float32), ".lora_b": np.ones((32, 1), np.float32)}
        adapter = {f"layers.0.up.weight{end}": value for end, value in pair.items()}
        with pytest.raises(ConfigError, match="take no adapters"):
            llm.update_weights(adapter)
        assert tokens(llm) == expected["old"] and llm.weights_version == 2

        # A worker that dies reads the same weights again.
        pid = next(int(e.split("(pid ")[1].split(")")[0]) for e in events if "was started" in e)
        os.kill(pid, signal.SIGKILL)
        llm.update_weights(arrays(new))
        results = llm.generate([[1, 2, 3]])
        assert results[0].weights_version == 3
        assert tokens(llm) == expected["new"]
        assert llm.service.recovery.recoveries >= 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_scores_and_a_trainer_s_arrays_in_worker_processes():
    """With two stages: the trainer's own logits and tokens, also after other weights in between."""
    name = "maxtext-llama2-scanned"
    golden, given = golden_of(name), trainers_arrays(name)
    exact = np.asarray(jax.nn.log_softmax(golden.logits))
    lengths = (13, 2, 9)
    texts = [prompt[:n] for prompt, n in zip(golden.prompts.tolist(), lengths, strict=True)]
    expected = [exact[i, range(n - 1), texts[i][1:]] for i, n in enumerate(lengths)]
    sampling = SamplingParams(max_tokens=golden.tokens.shape[1], temperature=0, ignore_eos=True)
    sizes: dict[str, Any] = {"max_batch_size": 4, "n_slots": 128, "max_batch_tokens": 16}
    with LLM(golden.directory, **sizes, pipeline_parallel=2, worker_processes=True) as llm:
        for factor in (None, 0.5, 1.0):
            if factor is not None:
                changed = {path: (factor * values).astype("f4") for path, values in given.items()}
                llm.update_weights(changed, layout="maxtext-scanned")
            found = llm.score(texts)
            if factor == 0.5:
                assert np.abs(np.array(found[0]) - expected[0]).max() > 0.1
                continue
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
            results = llm.generate(golden.prompts.tolist(), sampling)
            assert [result.token_ids for result in results] == golden.tokens.tolist()
