"""Drafted requests on a checked engine, over random traces with cancellations, losses and preemptions.

The checked engine keeps, for each slot, the tokens that its key and value depend on, drafts included. A row
may only read slots of its request's tokens, and a block in the prefix cache only has tokens that were kept.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.engine.draft_engine import DraftEngine
from orca_jax.errors import EngineError
from orca_jax.iteration.rows import drafted
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.shape import serving_buckets
from orca_jax.planning.sizes import engine_shape, kv_manager
from orca_jax.request.request import PLAIN, FinishReason, Request, Row, RowAnswer
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling import scheduler
from orca_jax.scheduling.draft_states import DraftStates
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_cache import chain_hashes, root_hash
from orca_jax.scheduling.prefix_lookup import publish_full_blocks
from orca_jax.scheduling.restart import run_again
from orca_jax.scheduling.snapshots import Snapshots
from orca_jax.simulation.simulation import Simulation
from orca_jax.speculation.drafter import Speculation
from tests.gpt_config import changed_config
from tests.host.engines import MODEL

END = 9  # the end-of-sequence token


def token_of(req: Request, index: int) -> int:
    """Two tokens, as in the prompts, so that outputs meet prompts; now and then the end."""
    number = req.seed * 7919 + index * 104_729
    return END if number % 23 == 0 else 7 + number // 3 % 2


def whole_output(req: Request) -> list[int]:
    """The output as it is without speculation."""
    tokens = [token_of(req, i) for i in range(req.most_output)]
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


class Oracle:
    """Knows the output, and is wrong with a given probability."""

    def __init__(self, seed: int, wrong: float, right: Callable[[int], int]) -> None:
        self._random = random.Random(seed)
        self._wrong = wrong
        self._right = right

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        first = len(output_ids)
        drafts = [self._right(i) for i in range(first, first + self._random.randint(0, n))]
        return [15 - t if self._random.random() < self._wrong else t for t in drafts]


class Silent:
    """Leaves the drafts to a draft model."""

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return ()


class CheckedEngine:
    """Checks what each row reads, and passes the batch to the simulated engine."""

    def __init__(self, simulation: Simulation) -> None:
        self.engine, self.kv, self.pool = simulation.engine, simulation.kv, simulation.pool
        self.n_workers = self.engine.n_workers
        self.keeps_tokens = True
        self.n_ahead = 0  # rows issued before the token before them was known
        self.content: dict[int, tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {}  # recurrent layers' states: the tokens in them
        self.n_undone = 0
        self.in_flight: set[int] = set()  # places of states after drafts whose answers are awaited
        self.kept_by: dict[int, set[int]] = {}  # the same by iteration

    def issue(self, rows: Sequence[Row]) -> Iteration:
        iteration = self.engine.issue(rows)  # the rows note their drafts
        before, after, kept = self.kv.state_copies
        for place, row in before:
            self.states[row] = self.states[place]
        first = self.kv.n_rows + (0 if self.kv.snapshots is None else self.kv.snapshots.n)
        self.n_undone += sum(place >= first for place, _ in before)
        written = [place for _, place in kept] + [place for _, place in after]
        assert len(written) == len(set(written)), "two states at one place"
        assert not self.in_flight & set(written), "a state whose answer is in flight is overwritten"
        self.in_flight |= {place for _, place in kept}
        self.kept_by[id(iteration)] = {place for _, place in kept}
        for req, n in rows:
            n_output, n_coming = len(req.output_ids), req.n_in_flight - req.n_partial
            assert not (req.kind.sent and n_coming), "drafts before the newest token is known"
            coming = [token_of(req, n_output + i) for i in range(n_coming)]
            tokens = (*req.prompt_ids, *req.output_ids, *coming, *req.kind.sent)
            assert req.n_computed + n <= len(tokens)
            if not req.in_initiation:  # no token is computed twice, and none is left out
                assert req.n_computed + n == len(tokens), "it goes on elsewhere"
            self.n_ahead += n_coming
            slots = self.slots(req.row)
            for position in range(req.n_computed):
                assert self.content[slots[position]] == tokens[: position + 1]
            for position in range(req.n_computed, req.n_computed + n):
                self.content[slots[position]] = tokens[: position + 1]
            if self.kv.draft_states is None:
                continue
            assert not req.n_computed or self.states[req.row] == tokens[: req.n_computed], "not its state"
            ends = range(req.n_computed + 1, req.n_computed + n)
            places = [place for row, place in kept if row == req.row]
            assert len(places) == (len(ends) if req.kind.sent else 0)
            for end, place in zip(ends, places, strict=False):
                self.states[place] = tokens[:end]
            self.states[req.row] = tokens[: req.n_computed + n]
        for state, snapshot in after:
            self.states[snapshot] = self.states[state]
        return iteration

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        returned = self.engine.wait(iteration, interrupted)
        if returned is not None:
            self.in_flight -= self.kept_by.pop(id(iteration))
        return returned

    def slots(self, row: int) -> list[int]:
        size = self.kv.block_size
        return [block * size + i for block in self.kv.blocks_of(row).tolist() for i in range(size)]

    def check_cache(self) -> None:
        """Every block that can be found has the tokens that its hash says, and each full one can be found."""
        if self.kv.prefixes is None:
            return
        size, root = self.kv.block_size, root_hash(self.kv.hash_seed, self.kv.namespace)
        if self.kv.snapshots is not None:
            for block_hash, place in self.kv.snapshots.all_named():
                tokens = self.states[place]
                assert len(tokens) % size == 0, "a state between two borders"
                assert chain_hashes(root, tokens, size)[-1] == block_hash, "a state with a rejected draft"
        for req in self.pool.admitted():
            if not (req.in_initiation or req.n_in_flight):
                n_full = min(req.n_computed, req.n_tokens) // self.kv.block_size
                assert req.n_found == n_full, "a full block that nobody can find"
        for block_hash, block in self.kv.prefixes._block_of.items():  # pyright: ignore[reportPrivateUsage]
            tokens = self.content[block * size + size - 1]
            assert chain_hashes(root, tokens, size)[-1] == block_hash, "a block with a rejected draft"


class CheckedDraftModel:
    """A draft model's engine that checks what each row reads. Its tokens are the request's own, or wrong.

    A row has `sampled` a token that no later message brings back.
    """

    n_workers, keeps_tokens = 1, True

    def __init__(self, kv: KVManager, wrong: float) -> None:
        self.kv = kv
        self._wrong = wrong
        self._content: dict[int, tuple[int, ...]] = {}
        self._sampled: dict[Request, list[int]] = {}
        self._n_in_flight = 0

    def issue(self, rows: Sequence[Row]) -> Iteration:
        self._n_in_flight += 1
        assert self._n_in_flight <= 2
        token_ids = list[int]()
        for own, n in rows:
            known = own.known_ids(0, own.n_tokens)
            if not own.n_in_flight:
                self._sampled[own] = []
                assert own.n_computed + n <= len(known)
            tokens = (*known, *self._sampled[own])
            assert own.n_in_flight == 0 or own.n_computed + n == len(tokens)
            slots = CheckedEngine.slots(self, own.row)  # pyright: ignore[reportArgumentType]
            for position in range(own.n_computed):
                assert self._content[slots[position]] == tokens[: position + 1], "of other tokens"
            for position in range(own.n_computed, own.n_computed + n):
                self._content[slots[position]] = tokens[: position + 1]
            index = own.n_computed + n - len(own.prompt_ids)
            right = token_of(own, max(0, index))
            token_ids.append(15 - right if random.Random(own.seed + index).random() < self._wrong else right)
            if own.n_computed + n == len(tokens):
                self._sampled[own].append(token_ids[-1])
        return Iteration(rows, token_ids)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        self._n_in_flight -= 1
        return Returned(iteration.pending)


def draft_model(rng: random.Random, config: ServingConfig, longest: int) -> DraftEngine:
    """A draft model that may have too few slots, positions or tokens for some requests, and small chunks."""
    sizes = ServingConfig(
        max_batch_size=config.max_batch_size,
        n_slots=config.n_slots // rng.choice((1, 1, 2)) + config.block_size,
        block_size=config.block_size,
        max_batch_tokens=config.max_batch_size + rng.choice((0, 3, longest)),
        coarse_buckets=True,
        scheduling=SchedulingConfig(prefix_caching=rng.random() < 0.5),
    )
    n_positions = max(2, longest - rng.choice((0, 0, 0, 5, longest)))
    model = changed_config(
        MODEL, vocab_size=rng.choice((50, 50, 8)), n_positions=n_positions, eos_token_ids=()
    )
    kv = kv_manager(engine_shape(model, sizes, n_workers=1), sizes.scheduling)
    costs = [0.0] * len(serving_buckets(sizes))
    engine = CheckedDraftModel(kv, rng.choice((0.0, 0.0, 0.2, 1.0)))
    return DraftEngine(engine, kv, model=model, config=sizes, costs=costs)


def play(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    block_size, max_bs = rng.randint(1, 4), rng.randint(2, 6)
    stems = [tuple(rng.choices((7, 8), k=rng.randint(1, 14))) for _ in range(2)]
    prompts = [
        rng.choice(stems) + tuple(rng.choices((7, 8), k=rng.randint(0, 3))) for _ in range(rng.randint(1, 9))
    ]
    n_outputs = [rng.randint(1, 24) for _ in prompts]
    longest = max(len(prompt) + n for prompt, n in zip(prompts, n_outputs, strict=True))
    chunked = rng.random() < 0.5
    config = ServingConfig(
        max_batch_size=max_bs,
        n_slots=-(-longest // block_size) * block_size + rng.choice((0, longest, 4 * longest)),
        block_size=block_size,
        max_batch_tokens=max_bs + rng.choice((0, 5)) if chunked else longest + max_bs,
        scheduling=SchedulingConfig(
            chunked_prefill=chunked,
            reservation=rng.choice(("full", "on-demand")),
            scheduling_policy=rng.choice(("fcfs", "priority", "longest-prefix")),
            speculative="ngram",
        ),
    )
    if rng.random() < 0.15:  # prefills and decodes alternate, and decodes get their drafts afterwards
        plain = SchedulingConfig(chunked_prefill=False, prefix_caching=False, reservation="full")
        config = replace(
            config,
            deterministic=True,
            max_batch_tokens=longest + max_bs,
            scheduling=replace(plain, speculative="ngram"),
        )
    states = random.Random(f"states {seed}")
    is_hybrid = states.random() < 0.6
    if is_hybrid:
        n_snapshots = states.choice((0, 1, 3, 20)) if config.scheduling.prefix_caching else 0
        scheduling = replace(
            config.scheduling,
            prefix_caching=n_snapshots > 0,
            snapshot_blocks=states.choice((1, 1, 2)),
            scheduling_policy=config.scheduling.scheduling_policy if n_snapshots else "fcfs",
        )
        n_draft_states = states.choice((1, 4, 4 * max_bs))
        config = replace(
            config, n_snapshots=n_snapshots, n_draft_states=n_draft_states, scheduling=scheduling
        )
    shared_rng = random.Random(-seed)
    shared = draft_model(shared_rng, config, longest) if shared_rng.random() < 0.4 else None
    simulation = Simulation(config, n_workers=rng.choice((1, 1, 2, 3)), token=token_of)
    engine = simulation.scheduler.engine = CheckedEngine(simulation)
    speculations = list[Speculation]()
    requests = list[Request]()
    for i, (prompt, n_output) in enumerate(zip(prompts, n_outputs, strict=True)):
        req = Request(
            str(i), prompt, len(prompt) + n_output, SamplingParams(max_tokens=n_output), seed=seed + 31 * i,
            end_token_ids=frozenset({END}), priority=rng.choice((0, 0, 1)),
        )  # fmt: skip
        if rng.random() < 0.8:
            right, wrong = (lambda index, req=req: token_of(req, index)), rng.choice((0.0, 0.2, 1.0))
            one = Speculation(lambda *_, i=i, w=wrong, r=right: Oracle(i, w, r), rng.randint(1, 6), 50)
            if shared is not None:
                one = Speculation(lambda *_: Silent(), one.n_tokens, 50, shared=shared)
            speculations.append(one)
            req.kind = Drafted(one)
        requests.append(req)
        simulation.add_at(rng.choice((0.0, 0.0, 2.0, 7.0)), req)
        if rng.random() < 0.15:
            simulation.end_at(rng.choice((3.0, 9.0, 15.0)), str(i))
    loss = rng.randrange(40) if rng.random() < 0.3 else -1
    turns, n_turns = simulation.steps(), 0
    while True:
        if n_turns == loss:
            simulation.engine.fail(rng.choice(("issue", "wait")))
        try:
            next(turns)
        except StopIteration:
            break
        except EngineError:
            run_again(simulation.scheduler)
            engine.content.clear()
            engine.states.clear()
            engine.in_flight.clear()
            engine.kept_by.clear()
            turns = simulation.steps()
        engine.check_cache()
        n_turns += 1
        assert n_turns < 2000, "no end in sight"
    kv = simulation.kv
    assert (len(simulation.pool), simulation.scheduler.n_rsrv, simulation.scheduler.n_scheduled) == (0, 0, 0)
    assert (kv.n_free_blocks, kv.n_free_rows) == (kv.n_blocks, kv.n_rows)
    if kv.draft_states is not None:
        assert kv.draft_states.n_free == kv.draft_states.n, "a state that nobody gives back"
    if kv.snapshots is not None:
        assert len(kv.snapshots) == len(kv.snapshots.all_named()), "a snapshot that nobody can find"
    for req in requests:
        whole = whole_output(req)
        own = [token for one, token, _ in simulation.deliveries if one is req and token is not None]
        assert own == req.output_ids
        if req.finish_reason is FinishReason.CANCELLED:
            assert own == whole[: len(own)]
            continue
        assert own == whole
        assert req.finish_reason is (FinishReason.STOP if whole[-1] == END else FinishReason.LENGTH)
    if shared is not None:
        assert not shared.failed
        shared.draft([])
        assert shared.n_followed == 0, "requests that have ended"
        free = shared.kv.n_free_blocks, shared.kv.n_free_rows
        assert free == (shared.kv.n_blocks, shared.kv.n_rows)
    n_drafted = sum(one.n_drafted for one in speculations)
    n_accepted = sum(one.n_accepted for one in speculations)
    assert 0 <= n_accepted <= n_drafted
    return Counter(
        {
            "accepted": n_accepted,
            "rejected": n_drafted - n_accepted,
            "preempted": simulation.scheduler.n_preemptions,
            "cancelled": sum(req.finish_reason is FinishReason.CANCELLED for req in requests),
            "stopped": sum(req.output_ids[-1:] == [END] for req in requests if req.kind is not PLAIN),
            "losses": sum(req.n_losses > 0 for req in requests),
            "ahead": engine.n_ahead,
            "cached": sum(req.n_cached for req in requests),
            "by a draft model": sum(one.n_accepted for one in speculations if one.shared is not None),
            "states undone": engine.n_undone,
            "snapshots used": 0 if kv.snapshots is None else kv.snapshots.n_used,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "n_traces", [80, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_outputs_are_those_without_drafts_and_nothing_is_lost(n_traces: int) -> None:
    seen = Counter[str]()
    for seed in range(n_traces):
        try:
            seen += play(seed)
        except BaseException as error:
            error.add_note(f"play({seed})")
            raise
    assert len(seen) == 11 and min(seen.values()) >= 10, seen


# Faults in the verification of drafts and in what undoes wrong ones, each of which some trace must show.


def keep_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    n_right = drafted._n_right
    monkeypatch.setattr(
        drafted, "_n_right", lambda drafts, sampled: min(n_right(drafts, sampled) + 1, len(drafts))
    )


def overwrite_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_all = Drafted.accept_all

    def mutant(requests: Sequence[Request], answers: Sequence[RowAnswer]) -> object:
        before, accepted = [req.n_computed for req in requests], accept_all(requests, answers)
        for req, n_computed in zip(requests, before, strict=True):
            req.n_computed = min(n_computed, req.n_computed + 1)
        return accepted

    monkeypatch.setattr(Drafted, "accept_all", mutant)


def publish_no_kept_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(requests: Iterable[Request], kv: KVManager) -> None:
        publish_full_blocks([req for req in requests if not req.kind.sent], kv)

    monkeypatch.setattr(scheduler, "publish_full_blocks", mutant)


def publish_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(requests: Iterable[Request], kv: KVManager) -> None:
        for req in requests:
            n_output = len(req.output_ids)
            is_issued = req.n_computed > req.n_tokens  # with drafts that are not in the output yet
            req.output_ids += req.kind.sent if is_issued else ()
            publish_full_blocks([req], kv)
            del req.output_ids[n_output:]

    monkeypatch.setattr(scheduler, "publish_full_blocks", mutant)


def undo_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = DraftStates.settle
    monkeypatch.setattr(DraftStates, "settle", lambda self, row, n_computed: settle(self, row, 1 << 30))


def undo_one_token_more(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = DraftStates.settle

    def mutant(self: DraftStates, row: int, n_computed: int) -> bool:
        is_first = row in self._held and n_computed - 1 == self._held[row][0]
        return settle(self, row, n_computed - (not is_first))

    monkeypatch.setattr(DraftStates, "settle", mutant)


def give_states_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = DraftStates.keep

    def mutant(self: DraftStates, row: int, n_computed: int, n_tokens: int) -> list[int]:
        places = keep(self, row, n_computed, n_tokens)
        self._free += places
        self._held[row] = n_computed, []
        return places

    monkeypatch.setattr(DraftStates, "keep", mutant)


def leave_states_of_ended_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftStates, "release", lambda self, row: None)


def keep_snapshots_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "unmake", lambda self, row, n_computed: None)


def snapshots_of_whole_drafted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Snapshots.make
    monkeypatch.setattr(
        Snapshots, "make", lambda self, *args, **kwargs: make(self, *args, **{**kwargs, "state": None})
    )


@pytest.mark.parametrize(
    "fault",
    [
        keep_one_more,
        overwrite_one_less,
        publish_no_kept_drafts,
        publish_all_drafts,
        undo_nothing,
        undo_one_token_more,
        give_states_back_at_once,
        leave_states_of_ended_rows,
        keep_snapshots_of_rejected_drafts,
        snapshots_of_whole_drafted_rows,
    ],
)
def test_a_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    def play_all() -> None:
        for seed in range(80):
            play(seed)

    with pytest.raises(AssertionError):
        play_all()
