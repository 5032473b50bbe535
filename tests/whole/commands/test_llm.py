"""The LLM: from prompts to results through the whole engine, and every way to get it wrong."""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import orca_jax
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.huggingface import find_tensors
from orca_jax.config import ParallelConfig, Sizes
from orca_jax.errors import (
    ConfigError,
    CorruptFile,
    EmptyPrompt,
    EngineError,
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParameter,
    InvalidSchedulingParameter,
    NotACheckpoint,
    NotSupported,
    PromptTooLong,
    RequestTooLarge,
    ServiceClosed,
    TokenOutOfRange,
)
from orca_jax.execution import capacity
from orca_jax.model.reference import forward
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.planning.sizes import serving_config
from orca_jax.service.generation import GenerationResult
from orca_jax.sharding.partition import split_model
from tests.gpt_config import gpt_config

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SOON = 60.0


def at_rest(model: LLM) -> bool:
    scheduler = model.service.scheduler
    kv = scheduler.kv
    return kv.n_free_blocks == kv.n_blocks and kv.n_free_rows == kv.n_rows and scheduler.n_rsrv == 0


def wait_until_at_rest(model: LLM) -> None:
    """Run one more request, which returns only after an iteration in which the remaining ones have ended."""
    model.generate([1], SamplingParams(max_tokens=2))
    assert at_rest(model)


def check_against_reference(directory: Path, results: list[tuple[list[int], GenerationResult]]) -> None:
    """Check that tokens are the reference's best wherever its two best logits are at least 1e-4 apart."""
    loaded = load_checkpoint(directory, dtype="float32")
    run = jax.jit(forward, static_argnums=0)
    longest = max(len(ids) + len(result.token_ids) for ids, result in results)
    for prompt_ids, result in results:
        ids = prompt_ids + result.token_ids
        padded = jnp.array(ids + [0] * (longest - len(ids)))  # behind what counts: nothing looks there
        logits = np.asarray(run(loaded.config, loaded.parameters, padded))[len(prompt_ids) - 1 : len(ids) - 1]
        second, best = np.sort(logits, axis=1)[:, -2:].T
        clear = best - second >= 1e-4
        assert clear.any()
        assert (logits.argmax(axis=1) == result.token_ids)[clear].all()


# Results


def test_the_demo_model_gives_the_references_tokens() -> None:
    texts = ["In the beginning", "And it came to pass", "Blessed are the"]
    with LLM(max_batch_size=3, max_batch_tokens=512) as demo:
        assert demo.tokenizer is not None
        encoded = [demo.tokenizer.encode(text) for text in texts]
        prompts = [texts[0], encoded[1], np.array(encoded[2])]
        results = demo.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        assert [result.n_input for result in results] == [len(ids) for ids in encoded]
        assert [result.text for result in results] == [demo.tokenizer.decode(r.token_ids) for r in results]
        check_against_reference(DEMO_MODEL, list(zip(encoded, results, strict=True)))


def test_results_say_how_much_of_the_prompt_was_cached(tiny_directory: Path) -> None:
    prompt = "all of this was said before, all of it!"  # two full blocks of 16
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(tiny_directory, max_batch_size=2, scheduling_policy="priority", prefix_caching=True) as model:
        results = [model.generate(prompt, params, priority=priority)[0] for priority in (0, -1, 1)]
        results += [model.generate(prompt, params, cache_salt="s")[0] for _ in range(2)]
        results += [model.stream(prompt, params, cache_salt="s", priority=2).result(SOON)]
        assert [result.n_cached for result in results] == [0, 32, 32, 0, 32, 32]
        check_against_reference(tiny_directory, [(list(prompt.encode()), result) for result in results])
    with LLM(tiny_directory, max_batch_size=2) as model:
        for use in (model.generate, model.stream):
            with pytest.raises(InvalidSchedulingParameter, match="the engine's scheduling policy is 'fcfs'"):
                use(prompt, params, priority=1)
            with pytest.raises(InvalidSchedulingParameter, match="cache_salt has 0 characters"):
                use(prompt, params, cache_salt="")
        assert at_rest(model)


def test_results_come_in_the_order_of_the_prompts(tiny: LLM, tiny_directory: Path) -> None:
    prompts: list[Any] = ["a", [98, 99], "dé", (100,), "a much longer prompt than all of the others"] * 2
    params = [SamplingParams(max_tokens=1 + i, temperature=0.0, ignore_eos=True) for i in range(10)]
    results_seen: list[tuple[int, GenerationResult]] = []
    results = tiny.generate(prompts, params, on_result=lambda i, result: results_seen.append((i, result)))
    assert results_seen == list(enumerate(results))
    assert [len(result.token_ids) for result in results] == list(range(1, 11))
    assert {result.finish_reason for result in results} == {"length"}
    ids = [list(prompt.encode()) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    assert [result.n_input for result in results] == [len(one) for one in ids]
    check_against_reference(tiny_directory, list(zip(ids, results, strict=True)))
    assert at_rest(tiny)


def test_one_prompt_or_many_or_none(tiny: LLM) -> None:
    (text,) = tiny.generate("ab", GREEDY)
    (ids,) = tiny.generate([97, 98], GREEDY)
    (array,) = tiny.generate(np.array([97, 98]), GREEDY)
    (listed,) = tiny.generate(["ab"], [GREEDY])
    assert text.token_ids == ids.token_ids == array.token_ids == listed.token_ids
    assert text.text == tiny.tokenizer.decode(text.token_ids) if tiny.tokenizer else False
    assert tiny.generate([], GREEDY) == []
    assert len(tiny.generate("a")[0].token_ids) <= SamplingParams().max_tokens


def test_a_seed_gives_the_same_tokens_alone_and_among_others(tiny: LLM) -> None:
    def draw(seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=12, seed=seed, ignore_eos=True)

    together = tiny.generate(["ab"] * 5, [draw(1), draw(2), draw(None), draw(None), draw(1)])
    assert together[0].token_ids == together[4].token_ids != together[1].token_ids
    assert together[2].token_ids != together[3].token_ids
    for result in together[:4]:
        (again,) = tiny.generate("ab", draw(result.seed))
        assert again.token_ids == result.token_ids
        assert again.seed == result.seed


def test_a_stop_string_ends_the_text(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=5.0, seed=4, ignore_eos=True)
    (whole,) = tiny.generate("ab", params)
    stop = whole.text[6:8]
    first = whole.text.index(stop)
    (cut,) = tiny.generate(
        "ab", SamplingParams(max_tokens=30, temperature=5.0, seed=4, ignore_eos=True, stop=(stop,))
    )
    assert (cut.text, cut.finish_reason) == (whole.text[:first], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_loading_reports_its_progress(tiny_directory: Path) -> None:
    calls: list[tuple[int, int]] = []
    with LLM(tiny_directory, max_batch_size=1, on_load=lambda *progress: calls.append(progress)):
        pass
    totals = {total for _, total in calls}
    assert totals == {calls[-1][0]}
    assert calls == sorted(calls)
    stored = find_tensors(tiny_directory).values()
    assert totals == {sum(tensor.n_bytes for tensor in stored)}


# Streams


def test_a_stream_is_the_same_in_pieces(tiny: LLM) -> None:
    (whole,) = tiny.generate("ab", GREEDY)
    stream = tiny.stream("ab", GREEDY, request_id="mine")
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.result(SOON).text
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces][-1] == "length"
    assert stream.request_id == "mine"


def test_leaving_a_stream_early_frees_its_slots(tiny: LLM) -> None:
    longest = SamplingParams(max_tokens=63, ignore_eos=True)
    closed = tiny.stream("a", longest)
    next(closed)
    closed.close()
    assert closed.result(SOON).finish_reason in ("cancelled", "length")
    with tiny.stream("a", longest) as left:
        next(left)
    for _ in tiny.stream("a", longest):
        break
    waiting = [tiny.stream("a", longest) for _ in range(9)]
    for stream in waiting:
        stream.close()
    gc.collect()
    wait_until_at_rest(tiny)


def test_streams_run_concurrently(tiny: LLM) -> None:
    streams = [tiny.stream("ab", SamplingParams(max_tokens=20, seed=i, ignore_eos=True)) for i in range(3)]
    texts = ["".join(piece.text for piece in stream) for stream in reversed(streams)]
    for seed, text in zip((2, 1, 0), texts, strict=True):
        (alone,) = tiny.generate("ab", SamplingParams(max_tokens=20, seed=seed, ignore_eos=True))
        assert alone.text == text


# What is refused, with nothing disturbed


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, EmptyPrompt, "no token"),
        ([[]], None, EmptyPrompt, "no token"),
        ("x" * 64, None, PromptTooLong, "64 tokens.*at most 63"),
        ([260], None, TokenOutOfRange, "token id 260"),
        ([-1], None, TokenOutOfRange, "token id -1"),
        ([1 << 40], None, TokenOutOfRange, "not in the vocabulary"),
        ("a\ud800", None, InvalidPrompt, "lone surrogate"),
        (None, None, InvalidPrompt, "not NoneType"),
        (7, None, InvalidPrompt, "not int"),
        (b"ab", None, InvalidPrompt, "not bytes"),
        ([1, 2.5], None, InvalidPrompt, "element 1 of the prompt is 2.5"),
        ([True], None, InvalidPrompt, "element 0 of the prompt is True"),
        ({"prompt": "a"}, None, InvalidPrompt, "not dict"),
        ("a", SamplingParams(max_tokens=64), RequestTooLarge, "ask for at most 63"),
        ("a", {"max_tokens": 3}, InvalidSamplingParameter, "must be a SamplingParams"),
        ("a", [SamplingParams()] * 2, InvalidSamplingParameter, "2 sampling_params for 1 prompts"),
    ],
)
def test_a_bad_prompt_is_refused(
    tiny: LLM, prompt: Any, params: Any, error: type[InvalidRequest], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny.generate(prompt, params)
    if prompt != [[]]:
        with pytest.raises(error, match=message):
            tiny.stream(prompt, params)
    assert at_rest(tiny)


@pytest.mark.parametrize("bad", ["", [260], ["a"], 5, None])
def test_one_bad_prompt_of_a_list_is_named_before_any_runs(tiny: LLM, bad: Any) -> None:
    n_iterations = len(tiny.service.timeline.iterations)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: "):
        tiny.generate(["a", bad, "b"], GREEDY)
    assert len(tiny.service.timeline.iterations) == n_iterations


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", float("nan")), ("temperature", -1), ("top_p", 0), ("stop", ("",))],
)
def test_a_bad_sampling_parameter_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParameter, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_more_than_n_slots_is_refused(tiny_directory: Path) -> None:
    with (
        LLM(tiny_directory, n_slots=32) as small,
        pytest.raises(
            RequestTooLarge, match=r"n_slots in whole blocks allow 32 together; ask for at most 31"
        ),
    ):
        small.generate("a", SamplingParams(max_tokens=32))


def test_whatever_is_raised_nothing_is_left_running(tiny: LLM) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.generate(["a"] * 9, SamplingParams(max_tokens=60, ignore_eos=True), on_result=interrupt)
    wait_until_at_rest(tiny)


# Making and closing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel is 3, but the model's n_heads 2 is not a multiple"),
        ({"pipeline_parallel": 5}, "pipeline_parallel is 5, but the model's n_layers is 1"),
        ({"pipeline_parallel": 0}, "pipeline_parallel is 0"),
        ({"overlap": None}, "overlap is None; it must be True or False"),
        ({"load_format": "pickle"}, "load_format is 'pickle'; it must be one of auto, dummy"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32, bfloat16, float16"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": 65, "max_batch_tokens": 64}, "max_batch_size 65 is above max_batch_tokens 64"),
        (
            {"max_batch_tokens": 63, "chunked_prefill": False},
            "max_batch_tokens is 63; without chunked_prefill it must be at least the model's 64 positions",
        ),
        ({"n_slots": 15}, "n_slots is 15"),
        ({"n_slots": "many"}, "n_slots is 'many'"),
        ({"n_slots": 1 << 31, "model": "demo", "load_format": "dummy"}, "n_slots = 2147483648 take 1759.*GB"),
        ({"block_size": 0}, "block_size is 0"),
        ({"model": 5}, "model is 5"),
        ({"workers": "127.0.0.1:1"}, "workers is '127.0.0.1:1'; it must be a list of addresses"),
        ({"workers": []}, "workers is .*; it must be a list of addresses, one for each stage"),
        ({"workers": ["a:1"], "worker_processes": True}, "workers and worker_processes exclude each other"),
        (
            {"workers": ["a:1", "b:1"], "pipeline_parallel": 3},
            "pipeline_parallel is 3, but there are 2 workers",
        ),
        ({"workers": ["a:1"], "attention": "static"}, "attention is set per worker"),
        ({"workers": ["a:1"], "memory_fraction": 0.5}, "memory_fraction is set per worker"),
        ({"memory_fraction": 0}, "memory_fraction is 0; it must be a number above 0, and at most 1"),
        ({"workers": ["nowhere"]}, "a worker's address is 'nowhere'; it must be host:port"),
        ({"worker_processes": True, "pipeline_parallel": 2}, "the model's n_layers is 1; each stage needs"),
        ({"model": "gpt3-341b", "load_format": "dummy"}, "the weights take 136.*GB"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    tiny_directory: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "_usable", lambda *_: 10**10)
    options.setdefault("model", tiny_directory)
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_sizes_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        LLM("no/such/place", max_batch_size=0)


def test_a_directory_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"has no config\.json"):
        LLM(tmp_path)
    with pytest.raises(NotACheckpoint, match="there is no directory"):
        LLM(tmp_path / "nowhere")


def test_a_presets_name_without_dummy_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(NotACheckpoint, match='gpt3-13b is also a preset: load_format="dummy"'):
        LLM("gpt3-13b")


def test_a_corrupt_tokenizer_is_named(tiny_directory: Path, tmp_path: Path) -> None:
    for path in tiny_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
        LLM(tmp_path)


def test_a_dummy_model_has_no_tokenizer() -> None:
    with LLM("demo", load_format="dummy", max_batch_size=1) as dummy:
        with pytest.raises(
            InvalidPrompt, match="demo has no tokenizer, so a prompt must be a list of token ids"
        ):
            dummy.generate("In the beginning")
        with pytest.raises(NotSupported, match="stop needs a tokenizer") as caught:
            dummy.generate([1], SamplingParams(stop=("x",)))
        assert caught.value.param == "stop"
        (result,) = dummy.generate([1], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        assert (len(result.token_ids), result.text) == (2, "")


def test_errors_of_a_closed_llm(tiny_directory: Path) -> None:
    with LLM(tiny_directory) as model:
        stream = model.stream("a")
    assert stream.result(SOON).finish_reason in ("cancelled", "length", "stop")
    for use in (partial(model.generate, "a"), partial(model.stream, "a"), lambda: model.service):
        with pytest.raises(ServiceClosed, match="this LLM is closed"):
            use()
    model.close()


def test_an_engine_failure_is_reported_and_permanent(tiny_directory: Path) -> None:
    with LLM(tiny_directory) as model:

        def lost(*_: object) -> None:
            raise MemoryError("out of device memory")

        model.service.scheduler.engine._workers.issue = lost  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(EngineError, match="iteration 0 failed: MemoryError: out of device memory"):
            model.generate(["a", "b"])
        with pytest.raises(EngineError, match="accepts no more requests"):
            model.stream("a")


def test_the_sizes_that_follow_from_the_model(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices("cpu")
    model = gpt_config(
        vocab_size=10, n_positions=100, hidden_size=8, n_layers=3, n_heads=2, ffn_size=8
    )  # 2 * 3 * 8 * 4 = 192 bytes a slot

    def sizes(n_bytes: int, stages: int = 1, tensor: int = 1) -> tuple[int, int]:
        monkeypatch.setattr(capacity, "MODEST_KV_BYTES", n_bytes)
        parts = split_model(model, devices, ParallelConfig(pipeline_parallel=stages, tensor_parallel=tensor))
        n_devices = stages * tensor
        rooms = [
            capacity.stage_room(model, jnp.dtype("float32"), part, n_devices=n_devices) for part in parts
        ]
        serving = serving_config(model, Sizes(), rooms)
        return serving.n_slots, serving.max_batch_tokens

    assert sizes(2 << 30) == (32 * 112, 2048), "a full batch of the longest requests, in whole blocks"
    assert sizes(192 * 1000) == (1000, 2048), "what the bytes hold"
    assert sizes(1) == (112, 2048), "one request at least"
    # 96,000 bytes for each of two stages, and 128 bytes a slot on the one with two of the three layers.
    assert sizes(192 * 1000, stages=2) == (750, 2048)
    # 48,000 for each of four devices, which hold half the heads: 64 bytes a slot.
    assert sizes(192 * 1000, stages=2, tensor=2) == (750, 2048)
    longer = replace(model, n_positions=4096)
    room = capacity.stage_room(longer, jnp.dtype("float32"), split_model(longer, devices)[0], n_devices=1)
    assert serving_config(longer, Sizes(), [room]).max_batch_tokens == 4096
    assert tiny.dtype == ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def test_the_package_has_no_other_lazy_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = orca_jax.nothing
