"""Packed weights in worker processes, with and without drafts, have the tokens of one process without."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from server import cli
from tests.device.checkpoint.test_quantized_models import written
from tests.device.model.formed_models import device_bytes
from tests.gguf_bytes import (
    BLOCK_TYPES,
    SMALL_SHAPES,
    Tensor,
    float_tensor,
    gguf_bytes,
    random_tensor,
    small_model,
    small_tensors,
)
from tests.quantized_checkpoints import FORMATS

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 16, "n_slots": 256, "dtype": "float32"}
ASK = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[5], [*range(1, 31)], [7, 8, 9]]
TYPES = ("Q4_K", "Q8_0", "Q4_1")


def gguf(folder: Path) -> Path:
    """A file of two layers whose matrices have three types in turn; each type is a program to build in C."""
    dice, tensors = np.random.default_rng(2), small_tensors()
    layer = {name: one for name, one in tensors.items() if name.startswith("blk.0.")}
    tensors |= {name.replace("blk.0.", "blk.1."): one for name, one in layer.items()}
    matrices = [name for name, one in tensors.items() if len(one.shape) == 2]
    for i, name in enumerate(matrices):
        tensors[name] = random_tensor(dice, TYPES[i % len(TYPES)], tensors[name].shape)
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(small_model(llama__block_count=2), tensors))
    return path


def checkpoint(name: str) -> Callable[[Path], Path]:
    return lambda folder: written(folder, FORMATS[name])[0]


MODELS = {"gguf": gguf} | {name: checkpoint(name) for name in ("w4a16", "awq", "gptq-8", "w8a8", "fp8-block")}


class Known:
    """A drafter that knows the outputs, and is wrong in every fourth token."""

    outputs: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._right = self.outputs[tuple(prompt_ids)]

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        first = len(output_ids)
        return [self._right[i] + (i % 4 == 3) for i in range(first, min(first + n, len(self._right)))]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name == "gguf" else pytest.mark.long)
        for name, make in MODELS.items()
    ],
)
def test_two_processes_have_the_tokens_of_one(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """To the token, since stages compute what one process computes, with activations rounded in C."""
    model = make(tmp_path)
    with LLM(model, **SIZES) as llm:
        expected = [each.token_ids for each in llm.generate(PROMPTS, ASK)]
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    Known.outputs = dict(zip(map(tuple, PROMPTS), expected, strict=True))
    drafts = {"speculative": f"{__name__}:Known"}
    with LLM(model, worker_processes=True, pipeline_parallel=2, **drafts, **SIZES) as llm:
        assert [each.token_ids for each in llm.generate(PROMPTS, ASK)] == expected
        assert llm.service.speculation is not None and llm.service.speculation.n_accepted > 5


def every_gguf_type(folder: Path) -> Path:
    """Two layers whose matrices have all packed types in turn, with enough inputs for two devices."""
    dice = np.random.default_rng(3)
    shapes = {name: tuple(n if n == 96 else 2 * n for n in shape) for name, shape in SMALL_SHAPES.items()}
    shapes |= {
        name.replace("blk.0.", "blk.1."): one for name, one in shapes.items() if name.startswith("blk.0.")
    }
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    tensors: dict[str, Tensor] = {
        name: random_tensor(dice, BLOCK_TYPES[matrices.index(name) % len(BLOCK_TYPES)], shape)
        if name in matrices
        else float_tensor(np.ones(shape))
        for name, shape in shapes.items()
    }
    sizes = {"llama__embedding_length": 512, "llama__feed_forward_length": 512, "llama__block_count": 2}
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(small_model(**sizes), tensors))
    return path


EVERY = {"gguf": every_gguf_type} | {name: checkpoint(name) for name in FORMATS}
# An order of inputs, and groups of more inputs than a device would have, are not split over devices.
ONE_DEVICE = {"w4a16-order", "gptq-order", "gptq-8-order-zeros", "gptq-zeros"}


@pytest.mark.timeout(400)
@pytest.mark.matrix
@pytest.mark.parametrize("name", EVERY)
def test_two_devices_in_each_of_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Tokens are those of the same devices in one process; `orca plan` gives the bytes that they hold.

    One device scores these tokens alike. It rounds activations of W8A8 with another scale.
    """
    model, tensor = EVERY[name](tmp_path), 1 if name in ONE_DEVICE else 2
    split = {"tensor_parallel": tensor, "pipeline_parallel": 2, **SIZES}
    with LLM(model, **split) as llm:
        expected = [each.token_ids for each in llm.generate(PROMPTS, ASK)]
        texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, expected, strict=True)]
        scores = np.concatenate(llm.score(texts))
        engine: Any = llm.service.scheduler.engine
        held = [device_bytes(worker.stage.weights) for worker in engine._workers.workers]
    with LLM(model, worker_processes=True, **split) as llm:
        assert [each.token_ids for each in llm.generate(PROMPTS, ASK)] == expected
    with LLM(model, **SIZES) as llm:
        error = np.abs(np.concatenate(llm.score(texts)) - scores)
    assert error.max() < (0.3 if name == "w8a8" else 0.05), error.max()
    capsys.readouterr()
    flags = ["--tensor-parallel", str(tensor), "--pipeline-parallel", "2", "--dtype", "float32"]
    assert cli.main(["plan", str(model), "--device", "cpu", "--no-compile", "--json", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["weights"] for stage in plan["stages"]] == held
