from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.config import ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.errors import EngineError
from orca_jax.iteration.message import ADJUSTED, CONSTRAINED, SAMPLED
from orca_jax.iteration.rows.scored import ScoredOutput
from orca_jax.request.request import Request, RequestState, begin_iteration
from orca_jax.request.sampled import LOGPROBS, Sampled
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import never
from orca_jax.scheduling.kv_manager import KVManager
from tests.host.simulation.tokens import SimulatedConstraint

CONFIG = ServingConfig(max_batch_size=6, n_slots=256, max_batch_tokens=128, block_size=4)


@dataclass
class Pending:
    """Tokens that are ready after `n_polls` looks; longer than the batch, as from a padded program."""

    token_ids: np.ndarray
    n_polls: int = 0
    error: Exception | None = None
    waits: list = field(default_factory=list)

    def is_ready(self):
        self.n_polls -= 1
        return self.n_polls < 0

    def wait(self, seconds):
        self.waits.append(seconds)

    def fetch(self):
        if self.error is not None:
            raise self.error
        return Sampled(self.token_ids)


class PendingRecords(Pending):
    """Tokens with log-probabilities."""

    def __init__(self, token_ids, records):
        super().__init__(token_ids)
        self.records = records

    def fetch(self):
        return Sampled(self.token_ids, self.records)


@dataclass
class FakeWorker:
    """Keeps its messages; the token of row r in iteration i is 100 i + r, or as `pending` says."""

    messages: list = field(default_factory=list)
    words: list = field(default_factory=list)
    pending: list = field(default_factory=list)
    error: Exception | None = None

    def issue(self, message, words):
        if self.error is not None:
            raise self.error
        self.messages.append(message)
        if message.constrained.any():
            self.words.append(words())
        if self.pending:
            return self.pending.pop(0)
        tokens = np.full(len(message.row) + 3, -1, np.int32)
        tokens[: len(message.row)] = 100 * (len(self.messages) - 1) + message.row
        return Pending(tokens)


def engine(worker, *, n_rows=12, **options):
    kv = KVManager(
        n_blocks=CONFIG.n_blocks, block_size=CONFIG.block_size, n_rows=n_rows, max_blocks_per_row=8
    )
    return EngineMaster(worker, kv, vocab_size=300, **options), kv


def request(name, prompt_ids, *, max_tokens=16, seed=0, **sampling):
    return Request(name, tuple(prompt_ids), max_tokens, SamplingParams(**sampling), seed)


def whole(*requests):
    """Rows in which each request computes all that is left."""
    return [(r, r.n_to_compute) for r in requests]


def issue(master, *requests):
    """Issue an iteration in which each request computes all that is left."""
    rows = whole(*requests)
    iteration = master.issue(rows)
    begin_iteration(rows)
    return iteration


def waited_for(master, iteration):
    """Issue an iteration and wait for its return."""
    returned = master.wait(iteration, lambda: False)
    assert returned is not None
    return returned


def run(master, kv, batch, lengths=None):
    """Run one iteration as the scheduler would, of all tokens that are left or of this many of each."""
    for r in batch:
        if r.row < 0:
            r.row = kv.reserve(r.max_tokens)
    rows = whole(*batch) if lengths is None else [*zip(batch, lengths, strict=True)]
    iteration = master.issue(rows)
    partial, _ = begin_iteration(rows)
    returned = waited_for(master, iteration)
    for i, (r, token_id) in enumerate(zip(batch, returned.token_ids, strict=True)):
        r.n_in_flight = r.n_partial = 0
        r.state = RequestState.INITIATION if i in partial else RequestState.INCREMENT
        if i not in partial:
            r.output_ids.append(token_id)
    return returned


def lose_cache(r):
    """Reset the request as after a loss; the reservation stays."""
    r.state, r.n_computed = RequestState.INITIATION, 0


def test_figure_3_iteration_by_iteration():
    """x1 "I think" becomes "this is great <EOS>" in four iterations; x2 "I love" leaves after two."""
    worker = FakeWorker()
    master, kv = engine(worker)
    x1, x2 = request("x1", [11, 12]), request("x2", [21, 22])
    for batch in ([x1, x2], [x1, x2], [x1], [x1]):
        run(master, kv, batch)
    first, second, third, fourth = worker.messages
    assert first.initiation.tolist() == [True, True] and second.initiation.tolist() == [False, False]
    assert first.token_ids.tolist() == [11, 12, 21, 22]
    assert second.token_ids.tolist() == [0, 0] and second.token_on_device.tolist() == [True, True]
    assert [m.input_length.tolist() for m in worker.messages] == [[2, 2], [1, 1], [1], [1]]
    assert [m.kv_length.tolist() for m in worker.messages] == [[2, 2], [3, 3], [4], [5]]
    assert [m.token_index.tolist() for m in worker.messages] == [[0, 0], [1, 1], [2], [3]]
    assert third.row.tolist() == fourth.row.tolist() == [x1.row]
    assert (x1.output_ids, x2.output_ids) == ([0, 100, 200, 300], [1, 101])


def test_figure_4_is_one_iteration():
    """x1 (x11 x12 | x13 x14) and x2 (x21 | x22) go on, x3 (x31 x32) and x4 (x41 x42 x43) begin."""
    worker = FakeWorker()
    master, kv = engine(worker)
    x1, x2 = request("x1", [11, 12]), request("x2", [21])
    x3, x4 = request("x3", [31, 32]), request("x4", [41, 42, 43])
    run(master, kv, [x1])
    run(master, kv, [x1, x2])
    returned = run(master, kv, [x1, x2, x3, x4])
    message = worker.messages[-1]
    assert len(worker.messages) == 3
    assert message.initiation.tolist() == [False, False, True, True]
    assert message.input_length.tolist() == [1, 1, 2, 3]
    assert message.kv_length.tolist() == [4, 2, 2, 3]
    assert message.token_index.tolist() == [2, 1, 0, 0]
    assert message.token_ids.tolist() == [0, 0, 31, 32, 41, 42, 43]
    assert returned.token_ids == [200, 201, 202, 203]
    assert all(type(token_id) is int for token_id in returned.token_ids)


def test_a_request_that_runs_again_puts_in_all_it_knows():
    worker = FakeWorker()
    master, kv = engine(worker)
    again, other = request("again", [1, 2, 3], seed=9), request("other", [7])
    for _ in range(3):
        run(master, kv, [again, other])
    row, known = again.row, [1, 2, 3, *again.output_ids]
    lose_cache(again)
    run(master, kv, [other, again])
    message = worker.messages[-1]
    assert message.row.tolist() == [other.row, row]
    assert message.initiation.tolist() == [False, True]
    assert message.token_ids.tolist() == [0, *known] and len(known) == 6
    assert message.input_length.tolist() == [1, 6]
    assert message.kv_length.tolist() == [4, 6]
    assert message.token_index.tolist() == [3, 3]  # the same key as without the fault
    assert message.token_on_device.tolist() == [True, False]
    run(master, kv, [again])
    assert worker.messages[-1].kv_length.tolist() == [7]
    assert worker.messages[-1].token_index.tolist() == [4]


def test_a_row_is_handed_on_with_nothing_of_its_former_request():
    worker = FakeWorker()
    master, kv = engine(worker)
    former = request("former", [1, 2], temperature=0.5, top_p=0.5, top_k=5, seed=5)
    run(master, kv, [former])
    run(master, kv, [former])
    kv.release(former.row)
    next_one = request("next", [8, 9, 10], temperature=0)
    run(master, kv, [next_one])
    assert next_one.row == former.row
    message = worker.messages[-1]
    assert message.kv_length.tolist() == [3] and message.token_index.tolist() == [0]
    s = message.sampling
    assert [s[name].tolist() for name in ("temperature", "top_p", "top_k", "seed")] == [[0], [1], [0], [0]]


def slow_message(batch, lengths, kv):
    """The control message from the requests, one at a time."""
    entries, token_ids, earlier_ids, biases = [], [], [], []
    n_blocks = max(-(-(r.n_computed + n) // CONFIG.block_size) for r, n in zip(batch, lengths, strict=True))
    for i, (r, n) in enumerate(zip(batch, lengths, strict=True)):
        known = [*r.prompt_ids, *r.output_ids]
        first = r.state is RequestState.INITIATION
        end = r.n_computed + n
        samples = end == len(known)
        token_ids += known[r.n_computed : end] if first else [0]
        if first and samples and is_adjusted(r.sampling):
            earlier_ids += known[: r.n_computed]
            biases += [(i, *pair) for pair in r.sampling.logit_bias.items()]
        entries.append(
            {
                "row": r.row,
                "initiation": first,
                "token_index": len(r.output_ids) if samples else 0,
                "input_length": n,
                "kv_length": end,
                "token_on_device": not first,
                "block_table": kv.block_table[r.row, :n_blocks].tolist(),  # those in use in some row
                "n_prompt": len(r.prompt_ids) if first else 0,
                "next_token": -1 if samples else known[end],
                **{name: float(np.float32(getattr(r.sampling, name))) for name in REALS},
                "temperature": float(np.float32(r.sampling.temperature)) if samples else 0,
                "top_k": r.sampling.top_k,
                "seed": r.seed,
                "logprobs": -1 if r.sampling.logprobs is None or not samples else r.sampling.logprobs,
                "prompt_logprobs": r.sampling.prompt_logprobs if first and asks_for_prompt(r) else -1,
                "flags": samples * (ADJUSTED * is_adjusted(r.sampling) + CONSTRAINED * is_constrained(r)),
            }
        )
    columns = {name: [entry[name] for entry in entries] for name in entries[0]}
    return columns | {"token_ids": token_ids, "earlier_ids": earlier_ids, "bias": biases}


REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def asks_for_prompt(r):
    return r.sampling.prompt_logprobs is not None and r.prompt_logprobs is None


def is_adjusted(sampling):
    changed = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return bool(changed or sampling.logit_bias)


def is_constrained(r):
    return r.constraint is not None and len(r.output_ids) % 2 == 0


def allowed_by(r):
    words = np.zeros(10, np.int32)
    r.constraint.allowed(r.prompt_ids, r.output_ids, words)
    return words


def as_lists(message):
    names = ("row", "initiation", "token_index", "input_length", "kv_length", "token_on_device")
    names += ("block_table", "token_ids", "earlier_ids", "n_prompt", "next_token", "bias")
    result = {name: getattr(message, name).tolist() for name in names}
    result |= {name: message.sampling[name].tolist() for name in message.sampling.dtype.names}
    return result


def constrained_or_not(*args, constrained, **kwargs):
    r = request(*args, **kwargs)
    r.constraint = SimulatedConstraint(300) if constrained else None
    return r


requests = st.builds(
    constrained_or_not,
    st.just("any"),
    st.lists(st.integers(0, 99), min_size=1, max_size=6),
    max_tokens=st.just(32),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 2.0]),
    top_p=st.sampled_from([0.2, 1.0]),
    top_k=st.integers(0, 5),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 299), st.sampled_from([-100.0, 0.5]), max_size=3),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    prompt_logprobs=st.one_of(st.none(), st.integers(0, 20)),
    constrained=st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_message_against_a_slow_computation(data):
    """Requests come whole or in chunks, run in any order, run again after a fault, and leave."""
    worker = FakeWorker()
    master, kv = engine(worker, n_rows=8)
    live = []
    for _ in range(data.draw(st.integers(1, 8))):
        while len(live) < 8 and (not live or data.draw(st.booleans())):
            live.append(data.draw(requests))
        chosen = data.draw(st.lists(st.sampled_from(range(len(live))), min_size=1, max_size=6, unique=True))
        batch = [live[i] for i in chosen]
        for r in batch:
            if r.row < 0:
                r.row = kv.reserve(r.max_tokens)
                # Behind a beginning that is cached, where no log-probabilities of its prompt are wanted.
                cached = len(r.prompt_ids) - 1 if r.sampling.prompt_logprobs is None else 0
                r.n_computed = data.draw(st.integers(0, cached))
        lengths = [
            data.draw(st.one_of(st.just(r.n_to_compute), st.integers(1, r.n_to_compute))) for r in batch
        ]
        expected = slow_message(batch, lengths, kv)
        words_before = {
            id(r): allowed_by(r)
            for r, n in zip(batch, lengths, strict=True)
            if is_constrained(r) and n == r.n_to_compute
        }
        run(master, kv, batch, lengths)
        assert as_lists(worker.messages[-1]) == expected
        words = [words_before[id(r)] for r in batch if id(r) in words_before]
        assert np.array_equal(worker.words.pop() if words else [], words)
        assert not worker.words
        for r in batch:
            fate = data.draw(st.sampled_from(["goes on", "goes on", "runs again", "leaves"]))
            if fate == "runs again":
                lose_cache(r)
            elif fate == "leaves":
                kv.release(r.row)
                live.remove(r)


def test_messages_do_not_change_after_they_are_sent():
    """A worker may read a message after later ones were made: none shares memory with the master's rows."""
    worker = FakeWorker()
    master, kv = engine(worker)
    r = request("r", [1, 2])
    run(master, kv, [r])
    before = as_lists(worker.messages[0])
    run(master, kv, [r])
    kv.release(r.row)
    assert as_lists(worker.messages[0]) == before


def test_each_iteration_returns_its_own_tokens():
    worker = FakeWorker()
    master, kv = engine(worker, n_workers=3)
    requests = [request(str(i), [i]) for i in range(3)]
    in_flight = []
    for r in requests:
        r.row = kv.reserve(16)
        in_flight.append(issue(master, r))
    for i, (r, iteration) in enumerate(zip(requests, in_flight, strict=True)):
        assert iteration.rows == [(r, 1)]
        assert waited_for(master, iteration).token_ids == [100 * i + r.row]


def test_a_wait_may_be_interrupted_and_taken_up_again():
    tokens = Pending(np.array([5, -1], np.int32), n_polls=4)
    master, kv = engine(FakeWorker(pending=[tokens]), n_workers=2, look_seconds=0.5)
    r = request("r", [1])
    r.row = kv.reserve(16)
    iteration = issue(master, r)
    answers = iter([False, True])
    assert master.wait(iteration, lambda: next(answers)) is None
    assert tokens.waits == [0.5]
    assert waited_for(master, iteration).token_ids == [5]
    assert tokens.waits == [0.5, 0.5, 0.5]


def test_a_wait_that_nothing_interrupts_looks_at_nothing():
    worker = FakeWorker(pending=[Pending(np.array([5], np.int32), n_polls=1 << 60)])
    master, kv = engine(worker)
    r = request("r", [1])
    r.row = kv.reserve(16)
    returned = master.wait(issue(master, r), never)
    assert returned is not None and {type(token_id) for token_id in returned.token_ids} == {int}
    assert returned is not None and returned.token_ids == [5]


@pytest.mark.parametrize("when", ["issue", "wait"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), EngineError("worker 2 is gone")])
def test_a_workers_error_is_an_engine_error_and_the_next_iteration_is_a_new_one(when, error):
    good = Pending(np.array([1], np.int32))
    worker = FakeWorker(
        pending=[Pending(np.array([1], np.int32), error=error if when == "wait" else None), good]
    )
    master, kv = engine(worker, n_workers=3)
    one, two = request("one", [1]), request("two", [2])
    for r in (one, two):
        r.row = kv.reserve(16)
    iteration = issue(master, one)
    if when == "issue":
        worker.error = error
        with pytest.raises(EngineError) as caught:
            issue(master, two)
    else:
        issue(master, two)
        with pytest.raises(EngineError) as caught:
            master.wait(iteration, lambda: False)
    if isinstance(error, EngineError):
        assert caught.value is error
    else:
        assert "RuntimeError: out of memory" in str(caught.value)
        assert caught.value.__cause__ is error
    worker.error = None
    later = request("later", [3])
    later.row = kv.reserve(16)
    worker.pending = [Pending(np.array([9], np.int32))]
    assert waited_for(master, issue(master, later)).token_ids == [9]


def test_masks_are_sent_once_the_tokens_before_them_are_known():
    worker = FakeWorker()
    master, kv = engine(worker)
    a, b = (request(name, [1, 2]) for name in "ab")
    for r in (a, b):
        r.constraint = SimulatedConstraint(300)
        r.row = kv.reserve(16)
    asked = []
    worker.issue = lambda message, words: asked.append((message, words)) or Pending(np.zeros(2, np.int32))
    issue(master, a, b)
    issue(master, a, b)
    (_, first), (message, _) = asked
    assert message.constrained.tolist() == [False, False], "after one token it acts on nothing"
    issue(master, a, b)
    message, third = asked[2]
    assert message.constrained.tolist() == [True, True]
    assert first() is not None and third() is None
    a.output_ids += [7, 8]
    assert third() is None
    b.state = RequestState.FINISHED
    words = third()
    expected = np.zeros_like(words[0])
    SimulatedConstraint(300).allowed(a.prompt_ids, a.output_ids, expected)
    assert words[0].tolist() == expected.tolist()
    assert set(words[1].tolist()) == {-1}, "it is thrown away, and any token will do"


def test_a_forced_output_is_sent_token_by_token_in_a_batch_with_sampled_rows():
    worker = FakeWorker()
    master, kv = engine(worker)
    given = request("given", (1, 2, 3), max_tokens=8, logprobs=0)
    given.kind = ScoredOutput((7, 8, 9, 10, 11))
    other = request("other", (4, 5))
    for r in (given, other):
        r.row = kv.reserve(r.max_tokens)
    issue(master, given, other)
    first = worker.messages[0]
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.next_token.tolist() == [7, SAMPLED]
    assert first.sampling["logprobs"].tolist() == [0, -1]
    for r, token_id in ((given, 7), (other, 50)):
        r.n_in_flight, r.state = 0, RequestState.INCREMENT
        r.output_ids.append(token_id)

    records = np.zeros(5, LOGPROBS)
    records["token_id"], records["logprob"] = range(60, 65), range(5)
    worker.pending = [PendingRecords(np.arange(40, 45, dtype=np.int32), records)]
    rows = [(given, 3), (other, 1)]
    iteration = master.issue(rows)
    message = worker.messages[1]
    assert message.row.tolist() == [given.row] * 3 + [other.row]
    assert message.input_length.tolist() == [1] * 4 and message.kv_length.tolist() == [4, 5, 6, 3]
    assert message.token_ids.tolist() == [7, 8, 9, 0]
    assert message.next_token.tolist() == [8, 9, 10, SAMPLED]
    assert message.token_on_device.tolist() == [False] * 3 + [True]
    assert not message.initiation.any() and message.samples.tolist() == [False] * 3 + [True]
    assert message.sampling["logprobs"].tolist() == [0, 0, 0, -1]
    returned = waited_for(master, iteration)
    assert returned.token_ids == [40, 43]
    ((place, (_, logprobs)),) = returned.answers.items()
    assert place == 0
    assert [(one.token_id, one.logprob) for one in logprobs] == [(60, 0), (61, 1), (62, 2)]
