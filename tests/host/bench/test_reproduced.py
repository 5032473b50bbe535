"""Figures of other papers, reproduced: each direction follows from a cost set by hand, each command runs."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.policies.search import highest
from bench.reproduced import distserve, paged_attention, sarathi_serve
from bench.reproduced.buddy import BuddyAllocator, chunk_size
from bench.reproduced.chart import Bars, Panel, document
from bench.reproduced.played import Job, first_token, gaps, per_token, play
from bench.reproduced.profile import VLLM
from orca_jax.planning.cost_model import IterationShape


def by_token(shape: IterationShape) -> float:
    """A second for each input token."""
    return float(sum(shape.input_lengths))


def by_phase(shape: IterationShape) -> float:
    """30 seconds with a prompt in it, otherwise 1."""
    return 30.0 if max(shape.input_lengths) > 1 else 1.0


# Sarathi-Serve.


def test_a_prompt_stalls_decodes_by_its_whole_length_or_by_one_budget() -> None:
    """A decodes when B's prompt of 200 tokens arrives."""
    jobs = [Job(0.0, 4, 40, 40), Job(10.0, 200, 2, 2)]
    vllm = play(sarathi_serve.vllm(sarathi_serve.CHAT, 4), by_token, jobs)
    chunked = play(sarathi_serve.sarathi(8, 4), by_token, jobs)
    hybrid = play(sarathi_serve.sarathi(512, 4), by_token, jobs)
    assert max(gaps(vllm[:1])) == 200 + 2  # B's prompt, then a token of both
    assert max(gaps(hybrid[:1])) == 200 + 1  # in one iteration
    assert max(gaps(chunked[:1])) == 8  # the budget
    assert len(sarathi_serve.stalls(vllm)) > 0
    # Chunks of 7 tokens beside A's one: B's first token comes later than with its prompt at once.
    assert first_token(chunked[1:], 0.5) > first_token(vllm[1:], 0.5)


def test_lengths_have_the_quantiles_of_the_paper_s_table() -> None:
    for dataset in sarathi_serve.DATASETS.values():
        drawn = np.array(dataset.lengths(20_000))
        assert drawn.sum(axis=1).max() <= dataset.most
        for lengths, (median, p90) in zip(drawn.T, (dataset.n_input, dataset.n_output), strict=True):
            assert np.quantile(lengths, (0.5, 0.9)) == pytest.approx([median, p90], rel=0.05)


# DistServe.


def test_a_prompt_delays_decodes_together_and_only_the_link_does_apart() -> None:
    """B arrives when A has five of its ten further tokens. Times by hand."""
    jobs = [Job(0.0, 8, 11, 11), Job(35.0, 8, 11, 11)]
    together = distserve.together(jobs, by_phase)
    assert together[0] == distserve.Seen(first=30.0, between=(10 + 30) / 10)
    link = 8 * distserve.KV_BYTES / 5.0  # bytes a second: 5 seconds for a prompt
    apart = distserve.apart(jobs, by_phase, n_prefill=1, n_decode=1, bandwidth=link)
    assert apart == [distserve.Seen(first=30.0, between=(5 + 10) / 10)] * 2


def test_gpus_take_requests_in_turn_and_a_link_one_transfer_at_a_time() -> None:
    jobs = [Job(0.0, 300, 2, 2)] * 4  # two such prompts do not fit into an iteration of 512 tokens
    link = 300 * distserve.KV_BYTES / 100.0
    one = distserve.apart(jobs, by_phase, n_prefill=1, n_decode=1, bandwidth=link)
    assert [each.first for each in one] == [30.0, 60.0, 90.0, 120.0]
    # Transfers end at 130, 230, 330 and 430.
    assert [each.between for each in one] == [101.0, 171.0, 241.0, 311.0]
    two = distserve.apart(jobs, by_phase, n_prefill=2, n_decode=2, bandwidth=link)
    assert [each.first for each in two] == [30.0, 30.0, 60.0, 60.0]
    assert [each.between for each in two] == [101.0, 101.0, 171.0, 171.0]


def test_goodput_is_the_highest_rate_within_the_limits() -> None:
    assert highest(lambda rate: rate <= 7.0, 1.0, halvings=12) == pytest.approx(7.0, rel=1e-3)
    assert highest(lambda rate: rate <= 7.0, 500.0, halvings=12) == pytest.approx(7.0, rel=1e-3)
    assert highest(lambda rate: False, 1.0) == 0.0
    within = distserve.Seen(distserve.MOST_FIRST, distserve.MOST_BETWEEN)
    assert distserve.meets([within] * 10)
    assert not distserve.meets([within] * 8 + [distserve.Seen(9.0, 0.0)] * 2)


def test_the_authors_times_worked_by_hand() -> None:
    prompts = IterationShape([512, 100], [512, 100])
    a, b, c = VLLM.prefill
    assert VLLM(prompts) == pytest.approx((a + 612 * b + (512**2 + 100**2) * c) / 1e3)
    a, b, c = VLLM.small
    assert VLLM(IterationShape([1, 1], [300, 40])) == pytest.approx((a + 340 * b + 2 * c) / 1e3)
    mixed = VLLM(IterationShape([512, 100, 1], [512, 100, 300]))
    assert mixed == pytest.approx(VLLM(prompts) + (300 * b + c) / 1e3)
    many = IterationShape([1] * 95, [10] * 95)
    a, b, c = VLLM.large
    assert VLLM(many) == pytest.approx((a + 950 * b + 95 * c) / 1e3)


# PagedAttention.


def test_chunks_are_powers_of_two_that_never_overlap_and_merge_again() -> None:
    allocator, rng = BuddyAllocator(1000), np.random.default_rng(5)
    held: dict[int, int] = {}
    n_refused = 0
    for _ in range(2000):
        if held and rng.random() < 0.5:
            address = int(rng.choice(list(held)))
            allocator.release(address)
            del held[address]
            continue
        n = int(rng.integers(1, 200))
        address = allocator.allocate(n)
        if address is None:
            n_refused += 1
            continue
        held[address] = chunk_size(n)
        ordered = sorted(held.items())
        assert all(one + size <= other for (one, size), (other, _) in pairwise(ordered))
        assert ordered[-1][0] + ordered[-1][1] <= 1000
    assert n_refused > 0
    for address in held:
        allocator.release(address)
    # 1000 = 512 + 256 + 128 + 64 + 32 + 8
    assert [allocator.allocate(n) is not None for n in (512, 256, 128, 64, 32, 8, 1)] == [True] * 6 + [False]


def test_reservations_limit_the_batch_and_paging_does_not() -> None:
    """40 requests of 10 tokens in and 10 out at once; a later arrival ends the measurement."""
    jobs = [Job(0.0, 10, 10, 10)] * 40 + [Job(1e6, 10, 1, 1)]
    found = {system: paged_attention.run(system, jobs, by_phase) for system in paged_attention.SYSTEMS}
    busy = {system: memory.largest for system, memory in found.items()}
    assert busy == {"Orca (Max)": 7, "Orca (Pow2)": 40, "Orca (Oracle)": 40, "vLLM": 40}
    pow2 = found["Orca (Pow2)"].slots
    assert pow2["internal"] > 0  # outputs of 16 for 10
    assert found["vLLM"].shares(of_asked=True)["reserved"] == 0


def test_every_slot_has_one_use() -> None:
    """One request of 5 tokens in and 3 out, a second an iteration: by hand."""
    jobs = [Job(0.0, 5, 3, 3), Job(3.0, 5, 1, 1)]
    memory = paged_attention.run("Orca (Oracle)", jobs, lambda shape: 1.0)
    assert (memory.seconds, memory.mean_batch) == (3.0, 1.0)
    assert memory.slots == {  # 5, 6 and 7 tokens of the 8 that it asked for
        "tokens": 5 + 6 + 7,
        "reserved": 3 + 2 + 1,
        "internal": 0,
        "external": 3 * (paged_attention.N_SLOTS - 8),
    }


# Commands.


@pytest.mark.parametrize(
    ("main", "flags", "panels"),
    [
        (distserve.main, ["--requests", "2"], 2),
        (paged_attention.main, ["--requests", "3"], 3),
        (
            sarathi_serve.main,
            ["--requests", "4", "--capacity-requests", "4", "--part", "stalls", "--part", "tails"],
            2,
        ),
    ],
)
def test_a_command_prints_its_figures_and_draws_them(
    main: object,
    flags: list[str],
    panels: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: object,
) -> None:
    assert callable(main) and isinstance(capsys, pytest.CaptureFixture)
    monkeypatch.setattr("sys.argv", ["bench", *flags, "--picture", str(tmp_path / "figure.svg")])
    main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["bench"].startswith("reproduced.")
    drawn = ElementTree.parse(tmp_path / "figure.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}g")) == panels


def test_a_picture_escapes_names() -> None:
    panel = Panel(
        title="a < b", x_label="x", y_label="y", lines={"one & two": [(0, 0), (1, 2)]}, marks={"m": 1}
    )
    drawn = ElementTree.fromstring(document([panel, Bars("bars", ("p",), {"n": ([1.0], "1")})]))
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "one & two", "m", "bars", "n"} <= {*texts}


def test_the_mean_between_tokens_of_a_single_token_is_0() -> None:
    (record,) = play(sarathi_serve.sarathi(8, 4), by_token, [Job(0.0, 4, 1, 1)])
    assert per_token(record) == 0.0
