"""New weights, sleep and a lost worker, with each stage in its own process."""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import CheckpointError, TensorMismatch
from orca_jax.launch import remote_memory
from tests.device.checkpoint.test_trainers import DIRECTORY, golden_of
from tests.whole.training.test_trainers_layouts import trainers_adapters, trainers_arrays
from tests.whole.training.weights import (
    PROMPTS,
    SIZES,
    arrays,
    checkpoint,
    model_of,
    reference_of,
    reference_tokens,
    tokens,
)


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
        assert tokens(llm) == expected["old"] and llm.weights_version == 2

        # A worker that dies reads the same weights again.
        pid = next(int(e.split("(pid ")[1].split(")")[0]) for e in events if "was started" in e)
        os.kill(pid, signal.SIGKILL)
        llm.update_weights(arrays(new))
        results = llm.generate([[1, 2, 3]])
        assert results[0].weights_version == 3
        assert tokens(llm) == expected["new"]
        assert sum("was started" in event for event in events) >= 3


@pytest.mark.long
@pytest.mark.timeout(400)
def test_adapters_in_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each update's adapters are added to the weights without any, also in a restarted worker."""
    old, new = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    rng = np.random.default_rng(0)
    shapes = {"layers.0.qkv.weight": ((3, 16), (16,)), "layers.1.up.weight": ((32,), (16,))}

    def adapters(base: Path, names: list[str]) -> tuple[dict[str, np.ndarray], list[list[int]]]:
        """Some adapters, and the reference's tokens with them."""
        given, merged = dict[str, np.ndarray](), arrays(base)
        for name in names:
            out, into = shapes[name]
            a = rng.standard_normal((2, *into)).astype(np.float32)
            b = rng.standard_normal((*out, 2)).astype(np.float32)
            given |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
            merged[name] = merged[name] + np.float32(0.5) * np.tensordot(b, a, 1)
        return given, reference_of(model_of(base), merged, PROMPTS, 24)

    events = list[str]()
    with LLM(old, **SIZES, pipeline_parallel=2, worker_processes=True, on_event=events.append) as llm:
        for names in ([*shapes], ["layers.1.up.weight"], ["layers.0.qkv.weight"]):
            given, expected = adapters(old, names)
            llm.update_weights(given, lora_scale=0.5)
            assert tokens(llm) == expected
        assert llm.update_weights(arrays(new)) == 4
        assert tokens(llm) == reference_tokens(new)
        given, expected = adapters(new, [*shapes])
        assert llm.update_weights(jax.device_put(given), lora_scale=0.5) == 5
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == expected

        # A worker that dies adds them to the weights of the update before, whichever stage it has.
        for lost in (1, 2):
            pids = [int(e.split("(pid ")[1].split(")")[0]) for e in events if "was started" in e]
            os.kill(pids[-1] if lost == 2 else pids[0], signal.SIGKILL)
            assert tokens(llm) == expected
            assert llm.service.recovery.recoveries >= lost
        assert llm.weights_version == 5

        with pytest.raises(TensorMismatch, match=r"layers\.0\.qkv\.weight has no \.lora_a"):
            llm.update_weights({n: value for n, value in given.items() if n != "layers.0.qkv.weight.lora_a"})
        write = remote_memory.write_adapters

        def cut_short(directory: Path, *others: Any) -> None:
            write(directory, *others)
            file = directory / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-4])

        monkeypatch.setattr(remote_memory, "write_adapters", cut_short)
        with pytest.raises(CheckpointError, match="a worker could not add the adapters, and all continue"):
            llm.update_weights(adapters(new, [*shapes])[0])
        assert tokens(llm) == expected and llm.weights_version == 5


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_trainer_s_adapters_in_worker_processes():
    """Adapters of some of the arrays that form one weight give the same tokens as in one process."""
    directory = DIRECTORY / "tunix-llama3"
    every, _ = trainers_adapters(directory.name)
    query, value = (
        {name: array for name, array in every.items() if path in name}
        for path in ("layers.0.attn.q_proj", "layers.1.attn.v_proj")
    )
    assert len(query) == len(value) == 2
    sizes: dict[str, Any] = {"max_batch_size": 4, "n_slots": 128, "max_batch_tokens": 16}
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = list[list[list[int]]]()
    for split in ({}, {"pipeline_parallel": 2, "worker_processes": True}):
        with LLM(directory, **sizes, **split) as llm:
            for adapters in ({}, query | value, query):
                if adapters:
                    llm.update_weights(adapters, layout="tunix", lora_scale=0.5)
                found.append([result.token_ids for result in llm.generate([[1, 2, 3], [9] * 9], sampling)])
    assert found[:3] == found[3:]
    assert found[0] != found[1] != found[2] != found[0]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_scores_and_a_trainer_s_arrays_in_worker_processes():
    """Two stages give the trainer's logits and tokens, also after other weights in between."""
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
