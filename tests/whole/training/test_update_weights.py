"""LLM.update_weights replaces the weights, as the tokens before and after show."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax import LLM, SamplingParams
from orca_jax.errors import CheckpointError, ConfigError, RequestsStillRunning, TensorMismatch
from orca_jax.launch.new_weights import state_names
from orca_jax.model.transformer import Transformer
from orca_jax.request.request import FinishReason
from tests.device.checkpoint.tiny_checkpoint import gpt2_tensors, write_checkpoint
from tests.device.model.golden import DIRECTORY as GOLDEN
from tests.whole.pauses import pause_after
from tests.whole.training.weights import (
    CONFIG,
    GREEDY,
    LONG,
    PROMPTS,
    SIZES,
    arrays,
    model_of,
    reference_of,
    reference_tokens,
    tokens,
    tokens_of,
)

SOON = 60.0


@pytest.fixture(scope="module")
def expected(old: Path, new: Path) -> dict[str, list[list[int]]]:
    """The tokens that follow from the old and from the new weights."""
    tokens = {"old": reference_tokens(old), "new": reference_tokens(new)}
    assert all(a != b for a, b in zip(tokens["old"], tokens["new"], strict=True))
    return tokens


@pytest.fixture(scope="module")
def llm(old: Path):
    with LLM(old, **SIZES) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _old_weights_again(llm: LLM, old: Path):
    yield
    llm.update_weights(old)


def test_weights_from_everything_that_holds_them(llm: LLM, old: Path, new: Path, expected: Any):
    """Each prompt is in the prefix cache, so stale keys and values of the old weights would show."""
    given = arrays(new)
    module = Transformer(model_of(new), {name: jnp.asarray(value) for name, value in given.items()})
    for weights in (given, new, str(new), nnx.state(module), module, jax.device_put(given)):
        assert tokens(llm) == expected["old"]
        before = llm.weights_version
        assert llm.update_weights(weights) == before + 1 == llm.weights_version
        results = llm.generate(PROMPTS, GREEDY)
        assert [result.token_ids for result in results] == expected["new"]
        assert {result.weights_version for result in results} == {before + 1}
        assert results[0].token_versions == [before + 1] * 24
        llm.update_weights(old)


def test_the_engine_keeps_copies(llm: LLM, new: Path, expected: Any):
    """A trainer may afterwards donate its arrays or write into them."""
    ours = arrays(new)
    on_device = jax.device_put(arrays(new))
    llm.update_weights(on_device)
    for array in on_device.values():
        array.delete()
    assert tokens(llm) == expected["new"]
    llm.update_weights(ours)
    for array in ours.values():
        array[:] = 0
    assert tokens(llm) == expected["new"]


def test_devices_that_split_layers_keep_copies(old: Path, new: Path, expected: Any) -> None:
    """Norms are whole on each device: JAX would take the trainer's buffer as one of their copies."""
    on_device = jax.device_put(arrays(new))
    with LLM(old, **SIZES, tensor_parallel=2) as llm:
        llm.update_weights(on_device)
        held = {
            shard.data.unsafe_buffer_pointer()
            for worker in engine_workers(llm)
            for weight in worker.stage.weights
            for shard in weight.addressable_shards
        }
        assert not held & {array.unsafe_buffer_pointer() for array in on_device.values()}
        assert tokens(llm) == expected["new"]


def engine_workers(llm: LLM) -> Sequence[Any]:
    engine: Any = llm.service.scheduler.engine
    return engine._workers.workers


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: _without(given, "layers.1.up.bias"), "layers.1.up.bias is missing"),
        (lambda given: given | {"layers.2.up.bias": np.zeros(3)}, "layers.2.up.bias is not a weight"),
        (
            lambda given: given | {"final_norm.scale": np.ones(15, np.float32)},
            r"final_norm.scale has the shape \[15\], expected \[16\]",
        ),
        (
            lambda given: given | {"final_norm.scale": np.ones(16, np.float16)},
            "final_norm.scale has the dtype float16, expected float32; cast=True",
        ),
        (lambda given: given | {"final_norm.scale": np.ones(16, np.int32)}, "dtype int32, expected float32"),
        (lambda given: given | {"final_norm.scale": [1.0] * 16}, "final_norm.scale is a list, not an array"),
        (lambda given: [*given.values()], "the new weights are a list"),
        (lambda given: {}, "token_embedding is missing; position_embedding is missing.*; and .* more"),
        (lambda given: given | {"final_norm.scale.lora_a": np.ones(1)}, "give either whole weights or"),
        (lambda given: {"head.x.lora_a": np.ones((1, 1))}, "head.x has no .lora_b|head.x is not a weight"),
        (
            lambda given: {
                "layers.0.up.weight.lora_a": np.ones((2, 16), np.float32),
                "layers.0.up.weight.lora_b": np.ones((31, 2), np.float32),
            },
            r"layers.0.up.weight.lora_b \[31, 2\] times .* is not the weight's shape \[32, 16\]",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    llm: LLM, old: Path, new: Path, expected: Any, change: Any, said: str
):
    before = llm.weights_version
    with pytest.raises(TensorMismatch, match=said):
        llm.update_weights(change(arrays(new)))
    assert llm.weights_version == before
    assert tokens(llm, PROMPTS[:2]) == expected["old"][:2]


def test_deleted_arrays_and_other_models(llm: LLM, new: Path, tmp_path: Path, expected: Any):
    given = jax.device_put(arrays(new))
    given["final_norm.scale"].delete()
    with pytest.raises(TensorMismatch, match=r"final_norm.scale has been deleted"):
        llm.update_weights(given)
    with pytest.raises(CheckpointError):
        llm.update_weights(tmp_path)
    other = CONFIG | {"n_layer": 1}
    with pytest.raises(TensorMismatch, match="another model than the one that is served: they differ in"):
        llm.update_weights(write_checkpoint(tmp_path / "other", other, gpt2_tensors(other)))
    for version in (0, -1, 2**60, "3", llm.weights_version):
        with pytest.raises(ConfigError, match="version is"):
            llm.update_weights(new, version=version)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="running is 'later'"):
        llm.update_weights(new, running="later")  # pyright: ignore[reportArgumentType]
    assert tokens(llm) == expected["old"]


def test_cast_converts_floats(llm: LLM, new: Path, tmp_path: Path):
    halves = {name: value.astype(np.float16) for name, value in arrays(new).items()}
    llm.update_weights({name: value.astype(np.float32) for name, value in halves.items()})
    wanted = tokens(llm)
    for given in (halves, jax.device_put(halves)):
        llm.update_weights(arrays(new))
        llm.update_weights(given, cast=True)
        assert tokens(llm) == wanted


def test_an_own_version(llm: LLM, new: Path):
    version = llm.weights_version + 100
    assert llm.update_weights(new, version=version) == version
    assert llm.update_weights(new) == version + 1


def test_adapters_are_added_to_the_weights_without_any(llm: LLM, old: Path, expected: Any):
    """Each update has its own adapter; the previous one leaves no trace."""
    rng = np.random.default_rng(0)
    shapes = {"layers.0.qkv.weight": ((3, 16), (16,)), "layers.1.up.weight": ((32,), (16,))}

    def adapter(names: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        given, merged = dict[str, np.ndarray](), arrays(old)
        for name in names:
            out, into = shapes[name]
            a = rng.standard_normal((2, *into)).astype(np.float32)
            b = rng.standard_normal((*out, 2)).astype(np.float32)
            given |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
            merged[name] = merged[name] + np.float32(0.5) * np.einsum("...r,ri->...i", b, a)
        return given, merged

    for names in ([*shapes], ["layers.1.up.weight"], ["layers.0.qkv.weight"]):
        given, merged = adapter(names)
        llm.update_weights(given, lora_scale=0.5)
        found = tokens(llm)
        llm.update_weights(merged)
        assert found == tokens(llm) != expected["old"]
        llm.update_weights(old)
    given, _ = adapter([*shapes])
    llm.update_weights(given)
    llm.update_weights({name: np.zeros_like(value) for name, value in given.items()})
    assert tokens(llm) == expected["old"]


def test_running_requests_finish_first_and_others_wait(llm: LLM, old: Path, new: Path):
    with llm.stream([5, 6], LONG) as running:
        first = next(running)
        version = llm.update_weights(new)
        assert running.finish_reason is FinishReason.LENGTH
        assert running.result().weights_version == version - 1
        assert set(running.result().token_versions) == {version - 1}
        assert list(first.token_ids) == running.result().token_ids[: len(first.token_ids)]
    llm.update_weights(old)
    assert llm.generate([[5, 6]], LONG)[0].token_ids == running.result().token_ids


def test_running_requests_are_aborted(llm: LLM, new: Path, expected: Any):
    paused = pause_after(llm, 10)
    with llm.stream([5, 6], LONG) as running:
        assert paused.wait(SOON)
        llm.update_weights(new, running="abort")
        llm.resume()
        result = running.result(60)
        assert result.finish_reason is FinishReason.CANCELLED
        assert len(result.token_ids) <= 11 and result.weights_version == llm.weights_version - 1
    assert tokens(llm) == expected["new"]


def check_continued(llm: LLM, old: Path, new: Path) -> None:
    """Check that tokens before the update are the old weights', and those after it depend only on the new."""
    before = llm.weights_version
    paused = pause_after(llm, 10)
    with llm.stream([*range(20)], LONG) as running:
        assert paused.wait(SOON)
        version = llm.update_weights(new, running="continue")
        llm.resume()
        result = running.result(60)
    n_before = len(result.token_ids) - result.token_versions.count(version)
    assert 10 <= n_before <= 11  # one more may have been in flight
    assert result.weights_versions == ((0, before), (n_before, version)) and result.weights_version == version
    assert result.token_versions == [before] * n_before + [version] * (40 - n_before)
    assert result.token_ids[:n_before] == reference_tokens(old, [[*range(20)]], n_before)[0]
    prompt = [*range(20), *result.token_ids[:n_before]]
    assert result.token_ids[n_before:] == reference_tokens(new, [prompt], 40 - n_before)[0]


def test_running_requests_continue_with_the_new_weights(llm: LLM, old: Path, new: Path, expected: Any):
    check_continued(llm, old, new)
    assert tokens(llm) == expected["new"]


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [{"policy": "orca", "max_batch_tokens": 64}, {"overlap": False, "reservation": "full"}]
)
def test_running_requests_continue_under_every_policy(old: Path, new: Path, expected: Any, arguments: Any):
    with LLM(old, **SIZES | arguments) as llm:
        check_continued(llm, old, new)
        assert tokens(llm) == expected["new"] == tokens_of(new, **arguments)


def test_what_cannot_finish_in_time_changes_nothing(llm: LLM, new: Path, expected: Any):
    paused = pause_after(llm, 10)
    with llm.stream([5, 6], LONG) as running:
        assert paused.wait(SOON)
        with pytest.raises(RequestsStillRunning, match="paused in the middle of 1 request"):
            llm.update_weights(new)
        llm.resume()
        assert running.result(60).finish_reason is FinishReason.LENGTH
    assert tokens(llm) == expected["old"]


def test_under_load_each_output_has_one_version(llm: LLM, old: Path, new: Path, expected: Any):
    """Requests come from three threads while weights change; each output has the tokens of one version."""
    stop = threading.Event()
    outputs = list[tuple[int, list[int], int]]()
    failures = list[BaseException]()

    def ask(first: int) -> None:
        try:
            while not stop.is_set():
                for i in (first, (first + 1) % len(PROMPTS)):
                    (result,) = llm.generate([PROMPTS[i]], GREEDY)
                    assert set(result.token_versions) == {result.weights_version}
                    outputs.append((i, result.token_ids, result.weights_version))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(3)]
    start = llm.weights_version
    assert start % 2 == 0 or llm.update_weights(old) % 2 == 0
    versions = {llm.weights_version: "old"}
    for thread in threads:
        thread.start()
    given = {"old": arrays(old), "new": arrays(new)}
    for i in range(12):
        name = ("new", "old")[i % 2]
        versions[llm.update_weights(given[name])] = name
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures
    for i, found, version in outputs:
        assert found == expected[versions[version]][i], (i, version)
    assert len({version for _, _, version in outputs}) > 3


@pytest.mark.long
def test_a_thousand_updates_leave_memory_level_and_compile_nothing(old: Path, new: Path, expected: Any):
    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    with LLM(old, **SIZES, compile_ahead=True, on_compile="error") as llm:
        on_device = jax.device_put(arrays(new))
        given = [arrays(old), on_device]
        for weights in given:
            llm.update_weights(weights)
            tokens(llm)
        before, compiled = live(), llm.compiles
        for i in range(1000):
            llm.update_weights(given[i % 2])
            if i % 100 < 2:
                assert tokens(llm) == expected[("old", "new")[i % 2]]
                assert live() < before + 1000  # an iteration in flight has a few tokens
        assert llm.compiles == compiled
        assert llm.weights_version == 1002


def test_the_names_of_our_own_state_are_those_of_its_paths(old: Path):
    config = model_of(old)
    names = state_names(config)
    assert names["layers.0.attention.qkv.weight"] == "layers.0.qkv.weight"
    assert sorted(names.values()) == sorted(arrays(old))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("llama-grouped", {"tensor_parallel": 2}),
        ("llama-grouped", {"pipeline_parallel": 2}),
        ("llama3-rope-tied", {"tensor_parallel": 2}),
    ],
)
def test_weights_on_several_devices(name: str, arguments: Any):
    """The vocabulary is padded, and one K/V head is held by two devices; adapters follow both."""
    directory = GOLDEN / name
    model = model_of(directory)
    rng = np.random.default_rng(1)
    base = {
        name: value + 0.3 * rng.standard_normal(value.shape, np.float32)
        for name, value in arrays(directory).items()
    }
    prompts = [[1, 2, 3], [*range(4, 14)]]
    wanted = reference_of(model, base, prompts, 12)
    with LLM(directory, max_batch_size=2, max_batch_tokens=64, **arguments) as llm:
        assert wanted != reference_tokens(directory, prompts, 12)
        for weights in (base, jax.device_put(base)):
            llm.update_weights(weights)
            greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            assert [result.token_ids for result in llm.generate(prompts, greedy)] == wanted
        given, merged = dict[str, np.ndarray](), dict(base)
        for name in ("layers.0.qkv.weight", "layers.0.out.weight", "layers.1.up.weight", "head.weight"):
            if name not in base:
                continue
            n_out = {"layers.0.qkv.weight": 2, "layers.1.up.weight": 2}.get(name, 1)
            out, into = base[name].shape[:n_out], base[name].shape[n_out:]
            a, b = rng.standard_normal((2, *into), np.float32), rng.standard_normal((*out, 2), np.float32)
            given |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
            merged[name] = base[name] + np.float32(0.1) * np.tensordot(b, a, 1)
        llm.update_weights(given, lora_scale=0.1)
        found = [result.token_ids for result in llm.generate(prompts, greedy)]
        assert found == reference_of(model, merged, prompts, 12) != wanted
