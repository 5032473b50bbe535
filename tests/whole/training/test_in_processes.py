"""New weights, sleep and a lost worker, with each stage in its own process."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from orca_jax import LLM
from orca_jax.errors import CheckpointError, ConfigError, TensorMismatch
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
