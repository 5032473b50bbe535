"""A model of one's own in worker processes, which make it by its name: the tokens of one process."""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import save_file

from examples.own_model import GatedModel
from orca_jax import LLM, FunctionModel, SamplingParams
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, TensorMismatch
from orca_jax.user_model.find import find_any_model
from server import cli

SIZES: dict[str, Any] = {"max_batch_size": 4, "n_slots": 512, "max_batch_tokens": 32, "dtype": "float32"}
STAGES: dict[str, Any] = {"pipeline_parallel": 2, "worker_processes": True}
PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[1, 2, 3], [*range(25, 60)], [7]]
HERE = "tests.whole.training.test_own_in_processes"


def small_model() -> GatedModel:
    return GatedModel(vocab_size=64)


def measured_model() -> GatedModel:
    """The same with a head that depends on a number of its weights, so that it cannot be traced."""
    model = small_model()
    model.head.kernel[...] *= 1 + float(jnp.abs(model.head.kernel[...]).max())
    return model


def function_model() -> FunctionModel:
    """The gated model as functions of pytrees of its weights."""
    model = small_model()
    graph, _ = nnx.split(model.layers[0])
    return FunctionModel(
        embed=lambda outside, ids, positions: outside["tokens"][ids],
        layer=lambda weights, x, positions, attend: nnx.merge(graph, weights)(x, positions, attend),
        unembed=lambda outside, x: x @ outside["head"],
        outside={"tokens": model.tokens.embedding[...], "head": model.head.kernel[...]},
        layers=[nnx.to_pure_dict(nnx.split(layer)[1]) for layer in model.layers],
        **{name: getattr(model, name) for name in ("vocab_size", "n_positions", "hidden_size", "n_heads")},
        n_kv_heads=model.n_kv_heads,
        head_size=model.head_size,
    )


def other_weights(seed: int) -> nnx.State:
    rng = np.random.default_rng(seed)
    state = nnx.state(small_model(), nnx.Param)
    return jax.tree.map(lambda w: w + jnp.asarray(rng.normal(0, 0.1, w.shape), w.dtype), state)


def outputs(llm: LLM) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def expected(model: nnx.Module, weights: nnx.State | None = None) -> list[list[int]]:
    """The greedy tokens of one process."""
    with LLM(model, **SIZES) as llm:
        if weights is not None:
            llm.update_weights(weights)
        return outputs(llm)


@pytest.mark.timeout(240)
def test_new_weights_sleep_and_a_lost_worker(tmp_path: Path) -> None:
    first, second, third = None, other_weights(1), other_weights(2)
    tokens = [expected(small_model(), weights) for weights in (first, second, third)]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]
    events = list[str]()
    with LLM(f"{HERE}:small_model", **SIZES, **STAGES, on_event=events.append) as llm:
        assert outputs(llm) == tokens[0]
        assert llm.update_weights(second) == 1
        assert outputs(llm) == tokens[1]
        llm.sleep(2)
        llm.wake_up()
        assert outputs(llm) == tokens[1]

        # A worker that dies has them again, whichever stage it has.
        pids = [int(event.split("(pid ")[1].split(")")[0]) for event in events if "was started" in event]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert outputs(llm) == tokens[1]

        wrong = {name: w for name, w in flat(third).items() if name != "layers.2.gate.kernel"}
        with pytest.raises(TensorMismatch, match=r"layers\.2\.gate\.kernel is missing"):
            llm.update_weights(wrong)
        with pytest.raises(ConfigError, match="a model of your own"):
            llm.update_weights(third, layout="tunix")
        assert outputs(llm) == tokens[1] and llm.weights_version == 1

        # Directories, of which each worker reads its part.
        save_file({f"model.{name}": w for name, w in flat(third).items()}, tmp_path / "model.safetensors")
        assert llm.update_weights(tmp_path, version=7) == 7
        assert outputs(llm) == tokens[2]
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "orbax", second)
        llm.update_weights(tmp_path / "orbax")
        results = llm.generate(PROMPTS, PARAMS)
        assert [result.token_ids for result in results] == tokens[1]
        assert {result.weights_version for result in results} == {8}
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(TensorMismatch, match="missing"):
            llm.update_weights(tmp_path)
        assert outputs(llm) == tokens[1]


def flat(weights: nnx.State) -> dict[str, np.ndarray]:
    leaves = nnx.to_flat_state(weights)
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in leaves}


@pytest.mark.matrix(but=["function_model"])
@pytest.mark.parametrize("name", ["function_model", "measured_model"])
def test_other_functions(name: str) -> None:
    with LLM(f"{HERE}:{name}", **SIZES, **STAGES) as llm:
        assert outputs(llm) == expected(globals()[name]())


def test_the_engine_master_holds_no_weights() -> None:
    """A function that can be traced is; the other is run."""
    for name, kind in (("function_model", jax.ShapeDtypeStruct), ("measured_model", jax.Array)):
        found = find_any_model(EngineConfig(model=f"{HERE}:{name}"), shapes_only=True)
        assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(nnx.state(found.user_model, nnx.Param)))


def test_mistakes(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"name the function that makes it"):
        LLM(small_model(), **SIZES, **STAGES)
    for place in (f"{HERE}:nothing", "no.such.file:make"):
        with pytest.raises(ConfigError, match=f"'{place}', which cannot be imported"):
            LLM(place, **SIZES, **STAGES)
        # A worker that is started by hand.
        command = ["worker", place, "--stage", "1", "--of", "2", "--listen", "127.0.0.1:0"]
        assert cli.main(command) == 2
        assert f"'{place}', which cannot be imported" in capfd.readouterr().err
