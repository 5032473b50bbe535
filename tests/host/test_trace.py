"""The traces that engines are measured with."""

from bench.trace import homogeneous_trace, n_output_tokens, paper_trace


def test_the_paper_s_trace_reaches_its_bounds_and_no_further() -> None:
    trace = paper_trace(20_000, vocab_size=7)
    inputs, outputs = {len(r.prompt_ids) for r in trace}, {r.n_output for r in trace}
    assert (min(inputs), max(inputs)) == (32, 512)
    assert (min(outputs), max(outputs)) == (1, 128)
    assert {token for r in trace[:100] for token in r.prompt_ids} == set(range(7))


def test_a_seed_says_the_whole_trace() -> None:
    assert paper_trace(48, vocab_size=50257, seed=3) == paper_trace(48, vocab_size=50257, seed=3)
    assert paper_trace(48, vocab_size=50257, seed=3) != paper_trace(48, vocab_size=50257, seed=4)


def test_equal_requests_have_one_size_and_different_prompts() -> None:
    trace = homogeneous_trace(32, n_input=32, n_output=5, vocab_size=50257)
    assert {(len(r.prompt_ids), r.n_output) for r in trace} == {(32, 5)}
    assert len({r.prompt_ids for r in trace}) == 32
    assert n_output_tokens(trace) == 160
