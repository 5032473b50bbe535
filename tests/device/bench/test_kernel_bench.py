"""The kernel benchmark's parts that need no GPU: oracle, floors, clock, targets, the process watchdog."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernel import __main__ as command
from bench.kernel import child, clock, programs
from bench.kernel.aims import check_aims
from bench.kernel.clock import chain, time_calls
from bench.kernel.correctness import Form, Found, check, draw, forms
from bench.kernel.oracle import Batch, attend_float64, errors
from bench.kernel.peers import NoPeer, peer, splits
from bench.kernel.programs import calls_past_cache, lay_out, pooled, sampled_errors
from bench.kernel.results import Result, figures, line
from bench.kernel.run import all_tasks, timed
from bench.kernel.shapes import HEADS, SECTIONS, Case, Heads, Subject, Task, increments, initiation, mixed
from orca_jax.model.attention import attention_work, split_attention
from orca_jax.model.kv_cache import LayerCache
from orca_jax.pallas.kernel_shape import DTYPES, HEAD_SIZES
from orca_jax.planning.cost_model import Device
from tests.device.model.ragged import ragged
from tests.device.pallas.grouped import Scores, by_group, definition

SMALL = Heads("small", 4, 2, 64)
FORM = Form(64, "bfloat16", 16, 4, 2)
DEVICE = Device(bandwidth=4e12, matrix_rate=8e14)


def static(q, k_cache, v_cache, block_table, row_start, kv_length) -> jax.Array:
    work = attention_work(row_start, kv_length, len(q), follow_lengths=False)
    cache = LayerCache(k_cache, v_cache)
    return split_attention(q, cache, block_table, row_start, kv_length, work, follow_lengths=False)


def test_the_oracle_is_attention_by_its_definition() -> None:
    batch = ragged(3, ((1, 40), (9, 30), (20, 20)), n_padding=2, n_shared=1)
    batch = batch._replace(q=by_group(batch.q, 2))
    for scores in (Scores(), Scores(window=7, soft_cap=2.0)):
        actual = attend_float64(Batch(*batch), window=scores.window, soft_cap=scores.soft_cap)
        np.testing.assert_allclose(actual, definition(batch, scores), atol=1e-12)


def test_errors_are_relative_to_the_whole_and_never_pass_nan() -> None:
    true = np.array([3.0, 4.0])
    errors_found = errors(np.array([3.0, 4.5]), true)
    assert errors_found.relative == pytest.approx(0.1) and errors_found.largest == pytest.approx(0.5)
    assert errors(np.array([3.0, np.nan]), true).relative == float("inf")


def test_a_drawn_batch_has_numbers_where_a_row_has_keys_and_nowhere_else() -> None:
    batch = draw(FORM, 11)
    wanted = np.zeros(batch.k_cache.shape[0] * FORM.block_size, bool)
    for r, n in enumerate(batch.kv_length):
        position = np.arange(n)
        wanted[
            batch.block_table[r, position // FORM.block_size] * FORM.block_size + position % FORM.block_size
        ] = True
    written = np.isfinite(batch.k_cache.astype(np.float32)).any(axis=(1, 3)).ravel()
    np.testing.assert_array_equal(written, wanted)
    owned = sum(-(-int(n) // FORM.block_size) for n in batch.kv_length)
    blocks = wanted.reshape(-1, FORM.block_size).any(axis=1).sum()
    assert blocks < owned  # some blocks are two rows'
    assert draw(FORM, 12).kv_length.tolist() != batch.kv_length.tolist()


def test_a_sound_attention_is_found_sound() -> None:
    actual = check(FORM, jax.jit(static), 5)
    assert 0 < actual["relative"] < 1e-2
    assert actual["finite"] and actual["padding_zero"]
    assert actual["n_equal"] == actual["n_runs"] > 1


def test_an_unsound_attention_is_found_out() -> None:
    calls = iter(range(100))

    compiled = jax.jit(static)

    def unsound(*arrays: jax.Array) -> jax.Array:
        out = compiled(*arrays).at[-1].set(1)  # padding
        return out.at[0, 0].add(0.5 + next(calls) % 2)  # and one head of a token, differently each time

    actual = check(FORM, unsound, 5)
    assert actual["largest"] > 0.4
    assert not actual["padding_zero"] and actual["n_equal"] < actual["n_runs"]
    assert not check(FORM, lambda *arrays: compiled(*arrays).at[0].set(jnp.nan), 5)["finite"]


def test_every_form_is_checked_once() -> None:
    every = forms("all")
    assert len({form.name for form in every}) == len(every) == 60
    assert {form.n_heads // form.n_kv_heads for form in every} == {1, 3, 4, 16}
    for some in (every, forms("quick")):  # each size with a group of 1, and with a larger one
        groups: dict[tuple[int, str, int], list[bool]] = {}
        for form in some:
            size = form.head_size, form.dtype, form.block_size
            groups.setdefault(size, []).append(form.n_heads == form.n_kv_heads)
            assert form.window is form.soft_cap is None or form.n_heads > form.n_kv_heads
        assert all(sorted(alone) == [False, True] for alone in groups.values())
        assert {size[:2] for size in groups} == {(d, t) for d in HEAD_SIZES for t in DTYPES}


@pytest.mark.parametrize("rows", [((1, 9),), ((4, 4),), ((3, 7), (1, 2), (5, 5))])
def test_a_case_counts_the_keys_that_each_query_sees(rows: tuple[tuple[int, int], ...]) -> None:
    case = Case(SMALL, rows)
    n_seen = sum(end - n + i + 1 for n, end in rows for i in range(n))
    assert case.n_flops == n_seen * SMALL.n_heads * SMALL.head_size * 4
    n_tokens = sum(n for n, _ in rows)
    assert case.n_bytes - case.kv_bytes == 2 * n_tokens * SMALL.n_heads * SMALL.head_size * 2
    assert case.kv_bytes == sum(end for _, end in rows) * 2 * SMALL.n_kv_heads * SMALL.head_size * 2


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    few, many = increments(HEADS[0], 32, 1024), initiation(HEADS[0], 1, 8192)
    assert few.floor(DEVICE) == pytest.approx(few.n_bytes / 4e12)
    assert many.floor(DEVICE) == pytest.approx(many.n_flops / 8e14)
    case = mixed(HEADS[0])[0]
    assert sum(part.n_flops for part in case.parts()) == case.n_flops


def test_a_call_s_time_is_the_whole_over_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    took = iter([9.0] * 6 + [0.004] * 5 * 2 + [0.008] * 5)  # warm-up, then two repeats of 4 ms runs, one of 8

    def run() -> None:
        now[0] += next(took, 0.004)

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    timing = time_calls(run, 4, at_least=45.0, repeat=3)
    assert timing.median == pytest.approx(0.001)
    assert timing.least == pytest.approx(0.001) and timing.most == pytest.approx(0.002)
    assert timing.host == pytest.approx(9.0 / 4)


@pytest.mark.parametrize(
    ("subject", "case"),
    [
        ("static", increments(SMALL, 3, 300)),
        ("static", Case(SMALL, ((1, 77), (30, 40), (64, 64)))),
    ],
)
def test_our_own_is_timed_and_held_against_float64(
    monkeypatch: pytest.MonkeyPatch, subject: str, case: Case
) -> None:
    monkeypatch.setattr(programs, "_PAST_CACHE", 1 << 16)
    program = pooled(case, subject, n_cores=2)
    sets = list(program.shapes.sets) * program.n_calls
    run = jax.jit(chain(program.call)).lower(program.shapes.q, program.shapes.shared, sets).compile()
    actual = timed(case, program, run, 5)
    assert 0 < actual["error"] < 1e-2
    assert 0 < actual["least"] <= actual["seconds"] <= actual["most"]
    arrays = program.make(7)
    last, first = run(arrays.q, arrays.shared, arrays.sets)
    assert 0.5 < float(np.asarray(last, np.float32).std()) < 1  # a chain keeps a query's spread
    assert sampled_errors(case, program, arrays, first + 1, seed=1).relative > 0.5


def test_a_peer_s_arrays_are_those_it_was_compiled_for() -> None:
    case = initiation(SMALL, 2, 64)
    program = peer(case, "cudnn")

    def attend(q, shared, caches):
        return jax.nn.dot_product_attention(q, *caches, is_causal=True)

    program = replace(program, call=attend)
    arrays = program.make(2)
    for made, shape in ((arrays.q, program.shapes.q), (arrays.sets[0][0], program.shapes.sets[0][0])):
        assert (made.shape, made.dtype) == (shape.shape, shape.dtype)
    _, first = jax.jit(chain(program.call))(arrays.q, arrays.shared, arrays.sets)
    assert sampled_errors(case, program, arrays, first, seed=1).relative < 1e-2


def test_a_peer_names_the_batches_it_does_not_support() -> None:
    with pytest.raises(NoPeer, match="one query token"):
        peer(initiation(SMALL, 1, 64), "decode_attention")
    with pytest.raises(NoPeer, match="one length"):
        peer(mixed(SMALL)[0], "cudnn")


def test_splits_fill_the_chip_and_stop_at_the_least_keys() -> None:
    assert splits(increments(HEADS[1], 1, 8192), least_keys=128) == 64
    assert splits(increments(HEADS[0], 1, 1024), least_keys=128) == 8
    assert splits(increments(HEADS[0], 128, 1024), least_keys=128) == 1


def test_calls_in_a_row_read_past_the_cache() -> None:
    assert calls_past_cache(4 << 20, least=4, most=64) == 64
    assert calls_past_cache(40 << 20, least=2, most=64) * 40 >= 160
    assert calls_past_cache(1 << 30, least=4, most=64) == 4


def test_sets_have_blocks_of_their_own_as_far_as_there_are_any() -> None:
    case = Case(SMALL, ((1, 40), (5, 33)))
    pool = lay_out(case, 3, block_size=16, max_blocks=4, n_blocks=13, seed=0)
    assert pool.tables.shape == (3, 2, 4)
    first, second = (set(table[:, :3].ravel().tolist()) for table in pool.tables[:2])
    assert len(first) == len(second) == 6 and not first & second
    np.testing.assert_array_equal(pool.tables[2], pool.tables[0])
    np.testing.assert_array_equal(pool.index[pool.tables[1][1, :3]], [0, 1, 2])


def test_the_tasks_have_names_of_their_own_and_the_sections_order() -> None:
    tasks = all_tasks(SECTIONS, "all")
    assert len({task.name for task in tasks}) == len(tasks)
    places = [SECTIONS.index(task.section) for task in tasks]
    assert places == sorted(places)
    assert {task.section for task in tasks} == set(SECTIONS) - {"torch"}


def result(subject: Subject, case: Case, over_floor: float, **values: float) -> Result:
    seconds = case.floor(DEVICE) * over_floor
    spread = {"least": seconds, "most": seconds, "host": 1e-6, "error": 1e-3}
    return Result(
        Task("peers", f"peers: {subject}, {case.name}", subject, case),
        {"seconds": seconds, **spread, **values},
    )


def test_aims_are_hit_and_missed() -> None:
    large, small = increments(HEADS[0], 32, 1024), increments(HEADS[0], 1, 128)
    prompt = initiation(HEADS[0], 1, 2048)
    both = mixed(HEADS[0])[0]
    good = [
        result("kernel", large, 1.1), result("paged_attention", large, 1.2),
        result("kernel", small, 2.0), result("decode_attention", small, 3.0),
        result("kernel", prompt, 1.5), result("cudnn", prompt, 1.4),
        *(result("kernel", case, 1.15) for case in (both, *both.parts())),
    ]  # fmt: skip
    aims = {aim.name: aim for aim in check_aims(good, DEVICE)}
    assert len(aims) == 9
    assert [aim.name for aim in aims.values() if aim.hit is None] == ["the same input gives the same bits"]
    assert all(aim.hit for aim in aims.values() if aim.hit is not None)
    bad = [
        result("kernel", large, 1.3, error=0.1), result("paged_attention", large, 1.2),
        result("kernel", small, 9.0), result("decode_attention", small, 3.0),
        result("kernel", prompt, 1.9), result("cudnn", prompt, 1.4),
        result("kernel", both, 2.0), *(result("kernel", case, 1.2) for case in both.parts()),
    ]  # fmt: skip
    missed = {aim.name for aim in check_aims(bad, DEVICE) if aim.hit is False}
    assert missed == set(aims) - {"the same input gives the same bits"}


def test_a_form_that_could_not_run_misses_the_aim() -> None:
    failed = Result(Task("correctness", "D 64"), failed="no")
    aim, _ = check_aims([failed], None)
    assert aim.hit is False and "D 64" in aim.worst


def test_a_line_has_shares_of_the_ceilings() -> None:
    record = result("kernel", increments(HEADS[0], 32, 1024), 2.0)
    assert figures(record, DEVICE)["bandwidth_share"] == pytest.approx(0.5)
    assert figures(record, DEVICE)["over_floor"] == pytest.approx(2.0)
    assert "GPT-3 13B, 32 x (1 of 1024)" in line(record, DEVICE) and " 50" in line(record, DEVICE)
    assert "no result: why not" in line(replace(record, failed="why not"), DEVICE)


WORKER = """
import json, os, sys, threading
done = int(sys.argv[sys.argv.index("--done") + 1])
print(json.dumps({"hello": done}), flush=True)
for index in range(done, 5):
    print(json.dumps({"starting": index}), flush=True)
    if index == 1:
        os._exit(9)
    if index == 3:
        threading.Event().wait()
    print("noise", flush=True)
    print(json.dumps({"index": index, "values": {"x": index}}), flush=True)
"""


def test_a_task_that_kills_or_hangs_its_process_fails_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "the_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    messages = []
    child.work_through("the_worker", [], 5, messages.append, task=2.0)
    assert [words["hello"] for words in messages if "hello" in words] == [0, 2, 4]
    of_task = {words["index"]: words for words in messages if "index" in words}
    assert sorted(of_task) == [0, 1, 2, 3, 4]
    assert "status 9" in of_task[1]["failed"] and "hangs" in of_task[3]["failed"]
    assert all("values" in of_task[index] for index in (0, 2, 4))


def test_without_a_hopper_gpu_the_error_names_the_requirement() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernel", "--only", "correctness,torch", "--quick"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "needs a Hopper GPU" in done.stderr and "cpu" in done.stderr


def test_every_line_is_printed_and_the_last_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work_through(module: str, arguments: list[str], n_tasks: int, on_words: Any) -> None:
        if module == "bench.kernel.torch_attention":
            on_words({"unfit": "PyTorch is not installed here"})
            return
        on_words({"device": "a GPU", "capability": "9.0", "n_cores": 132, "jax": "1"})
        tasks = all_tasks(SECTIONS, "quick")
        assert len(tasks) == n_tasks
        for index, task in enumerate(tasks):
            on_words({"starting": index} if index % 2 else {"compiled": 1, "of": 2, "section": task.section})
            on_words({"index": index, **words_of(task)})

    monkeypatch.setattr(command, "work_through", work_through)
    written = tmp_path / "all.json"
    monkeypatch.setattr(sys, "argv", ["bench.kernel", "--quick", "--json", str(written), "--seed", "4"])
    command.main()
    printed = capsys.readouterr().out
    last = json.loads(printed.strip().splitlines()[-1])
    assert last["seed"] == 4 and last["device"] == "a GPU"
    hits = {aim["name"]: aim["hit"] for aim in last["aims"]}
    assert hits["ahead of JAX's decode_attention"] is None and hits["the same input gives the same bits"]
    assert "no result: no decode_attention" in printed and "split_attention_kernel: 1 x, 7.5 us" in printed
    assert "PyTorch is not installed here" in printed and "seed 4" in printed
    record = json.loads(written.read_text())
    assert len(record["results"]) == len(all_tasks(SECTIONS, "quick"))


def words_of(task: Task) -> dict[str, Any]:
    if task.section == "ceilings":
        return {"values": {"bandwidth": 4e12, "read_bandwidth": 4.2e12, "matrix_rate": 8e14}}
    if task.section == "correctness":
        actual = Found(1e-3, 1e-2, finite=True, padding_zero=True, n_runs=5, n_equal=5, poisoned=4)
        return {"values": asdict(actual)}
    if task.section == "launches":
        return {"values": {"split_attention_kernel": {"launches": 1.0, "us": 7.5}}}
    if task.subject == "decode_attention":
        return {"failed": "no decode_attention"}
    assert task.case is not None
    seconds = task.case.floor(DEVICE) * 1.1
    return {"values": {"seconds": seconds, "least": seconds, "most": seconds, "host": 1e-6, "error": 2e-3}}
