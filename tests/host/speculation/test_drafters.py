"""Requests that are drafted, a user's drafter, and every way to get the options wrong."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest

from orca_jax.config import SchedulingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.presets import PRESETS
from orca_jax.families.recurrence_config import ShortConvolution
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.rows.message_builder import BlockTables, MessageBuilder
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.request.request import PLAIN, Request, RequestState
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.prepared_params import RuleMaker
from orca_jax.simulation.simulation import Simulation
from orca_jax.speculation.drafter import Speculation, configured_speculation
from orca_jax.speculation.ngram import NgramDrafter
from tests.host.engines import CONFIG, LETTERS, MODEL, SOON, orca, simulated, writing
from tests.log_records import messages_of, records_of

SPECULATION = Speculation(lambda prompt_ids, _: NgramDrafter(prompt_ids), 4, MODEL.vocab_size)


@pytest.mark.parametrize(
    "asked, is_drafted",
    [
        ({}, True),
        ({"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0, "stop": ("x",), "top_k": 3}, True),
        ({"guided_regex": "a*", "min_tokens": 1, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}}, True),
        ({"max_tokens": 2}, False),
        ({"use_beam_search": True, "n": 2}, False),
    ],
)
def test_which_requests_are_drafted(asked: dict[str, Any], is_drafted: bool) -> None:
    rules = RuleMaker(MODEL, LETTERS, speculation=SPECULATION).rules(SamplingParams(**asked))
    assert isinstance(rules.kind(), Drafted) is is_drafted
    assert not isinstance(rules.kind((1, 2, 3)), Drafted), "a scored output"


def test_rows_without_drafts_are_plain() -> None:
    """A full batch, which has no room for drafts, is sent like one of requests that are never drafted."""
    tables = BlockTables(
        block_size=4,
        block_table=np.zeros((2, 8), np.int32),
        n_reserved=np.zeros(2, np.int64),
        encoder_blocks=np.zeros(2, np.int32),
        max_encoder_blocks=0,
        rows_of=lambda row: (row,),
    )
    builder = MessageBuilder(tables, keeps_tokens=True)
    each = [
        Request(
            str(i),
            (1, 2, 1, 2, 1),
            20,
            SamplingParams(max_tokens=15),
            seed=0,
            kind=kind,
            state=RequestState.INCREMENT,
            row=i % 2,
            output_ids=[2],
            n_computed=5,
        )
        for i, kind in enumerate([Drafted(SPECULATION), Drafted(SPECULATION), PLAIN, PLAIN])
    ]
    drafted, plain = (builder.rows([(req, 1) for req in some]) for some in (each[:2], each[2:]))
    assert (drafted.first, drafted.known, drafted.places) == (plain.first, plain.known, plain.places)
    for name in ("start", "input_length", "row"):
        assert getattr(drafted, name).tolist() == getattr(plain, name).tolist()
    assert Drafted.most_tokens(each[:2]) == [5, 5]
    with_drafts = builder.rows([(each[0], 3), (each[1], 1)])
    assert with_drafts.first == [0, 3, 4] and with_drafts.start.tolist() == [5, 6, 7, 5]


class Counted:
    """Drafts 10, 11, 12, ... after an output that ends with 9, and so on, and notes when it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        self.asked.append((len(output_ids), n))
        return [output_ids[-1] + 1 + i for i in range(n)]


def test_a_drafter_is_not_asked_again_while_the_output_follows_what_it_drafted_at_once() -> None:
    drafter = Counted()
    made = Speculation(lambda *_: drafter, 3, 100, is_ours=True, n_at_once=8)
    req = Request("a", (0,), 60, SamplingParams(max_tokens=59), seed=0, kind=Drafted(made))
    req.state, req.output_ids = RequestState.INCREMENT, [1]

    def step(n_drafts: int, sampled: list[int]) -> Sequence[int]:
        assert Drafted.most_tokens([req]) == [4]
        known: Sequence[int]
        (known,) = Drafted.known_ids([(req, 1 + n_drafts)])
        Drafted.accept_all([req], [(sampled, ())])
        return known

    assert step(3, [2, 3, 4, 5]) == [1, 2, 3, 4]
    assert step(1, [6, 7]) == [5, 6]  # the batch had room for one
    assert drafter.asked == [(1, 8)]
    assert step(0, [8]) == [7]  # it had room for none, and only two of the eight were left
    assert step(1, [9, 10]) == [8, 9]
    assert drafter.asked == [(1, 8), (7, 8)]
    assert step(1, [11, 20]) == [10, 11]  # the token after the drafts is another
    assert step(3, [21, 22, 24, 0]) == [20, 21, 22, 23]  # the third draft is the fourth token
    assert step(3, [25, 26, 27, 28]) == [24, 25, 26, 27]
    assert drafter.asked == [(1, 8), (7, 8), (12, 8), (15, 8)]
    assert req.output_ids == [*range(1, 12), 20, 21, 22, 24, 25, 26, 27, 28]


class Repeat:
    """Knows that the output is "abab...", and ends with ids that no model has."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        assert list(prompt_ids) == [1, 2]

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return [ord("ab"[(len(output_ids) + i) % 2]) for i in range(n - 1)] + [MODEL.vocab_size, -1]


class Wrong(Repeat):
    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return [0]


class Fails(Repeat):
    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        if len(output_ids) < 5:
            return super().draft(output_ids, n)
        raise RuntimeError("out of ideas")


class Learns(Repeat):
    """Drafts the last output of the same salt, and fails at the end of an output of the letter b alone."""

    known: ClassVar = dict[object, list[int]]()

    def __init__(self, prompt_ids: Sequence[int], *, salt: tuple[str, ...]) -> None:
        self.salt = salt

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return self.known.get(self.salt, [])[len(output_ids) :][:n]

    def end(self, output_ids: Sequence[int]) -> None:
        self.known[self.salt] = list(output_ids)
        if output_ids[0] == ord("b"):
            raise RuntimeError("nothing to learn")


def output(drafter: type, n: int = 21) -> tuple[list[int], int, int]:
    scheduling = SchedulingConfig(speculative=f"{__name__}:{drafter.__name__}")
    with orca(simulated(writing("ab")), config=replace(CONFIG, scheduling=scheduling)) as service:
        token_ids = service.submit([1, 2], SamplingParams(max_tokens=n)).result(SOON).token_ids
    assert service.speculation is not None
    return token_ids, service.speculation.n_drafted, service.speculation.n_accepted


def test_a_user_s_drafter_and_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    whole = [ord(letter) for letter in "ab" * 10 + "a"]
    # The second token's iteration runs ahead of the first. Then four iterations keep three drafts each, and
    # the next one a single draft, because three tokens are left.
    assert output(Repeat) == (whole, 13, 13)
    assert not records_of(caplog, "orca_jax.iteration")
    assert output(Fails) == (whole, 3, 3)
    assert messages_of(caplog, "orca_jax.iteration") == [
        "the drafter failed; request request-0 goes on without drafts"
    ]


def test_a_user_s_drafter_that_learns_from_outputs_of_the_same_salt(caplog: pytest.LogCaptureFixture) -> None:
    scheduling = SchedulingConfig(speculative=f"{__name__}:Learns")
    with orca(simulated(writing("ab")), config=replace(CONFIG, scheduling=scheduling)) as service:
        assert (speculation := service.speculation) is not None
        for salt, n_accepted in (("x", 0), ("y", 0), ("x", 3)):
            params = SchedulingParams(cache_salt=salt)
            one = service.submit([1, 2], SamplingParams(max_tokens=7), scheduling=params).result(SOON)
            assert (bytes(one.token_ids), speculation.n_accepted) == (b"abababa", n_accepted)
    assert not caplog.records
    config = replace(CONFIG, max_batch_size=1, scheduling=scheduling)
    with orca(simulated(writing("ab")), config=config) as service:  # without a place for drafts
        params = SchedulingParams(cache_salt="z")
        service.submit([1, 2], SamplingParams(max_tokens=7), scheduling=params).result(SOON)
    assert bytes(Learns.known["", "z"]) == b"abababa"
    with orca(simulated(writing("b")), config=replace(CONFIG, scheduling=scheduling)) as service:
        assert (
            bytes(service.submit([1, 2], SamplingParams(max_tokens=7)).result(SOON).token_ids) == b"bbbbbbb"
        )
    assert [record.getMessage() for record in caplog.records] == [
        "the drafter failed at the end of request request-0"
    ]


def test_drafts_that_are_always_wrong_become_rare() -> None:
    """From the fourth iteration in vain on, a pause that grows.

    During a pause iterations run ahead, so that it is one token longer.
    """
    token_ids, n_drafted, n_accepted = output(Wrong, 60)
    assert (len(token_ids), n_drafted, n_accepted) == (60, 7, 0)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "prefix",
            "speculative is 'prefix'; it must be one of off, ngram, suffix, mtp, draft:MODEL, "
            "eagle3:DIRECTORY, package.file:Class",
        ),
        ("draft:some/model", "speculative is 'draft:some/model', and a simulation has no draft model"),
        ("mtp", "speculative is 'mtp', and a simulation has no draft model"),
        ("eagle3:a/head", "speculative is 'eagle3:a/head', and a simulation has no draft model"),
        ("eagle3:", "speculative is 'eagle3:', without a head; write eagle3:DIRECTORY"),
        ("no.such:Thing", "speculative is 'no.such:Thing', which cannot be imported"),
        (f"{__name__}:MODEL", "is no class with a method draft"),
        ("orca_jax.simulation.simulation:Simulation", "is no class with a method draft"),
        (f"{__name__}:Wants", "cannot be made from a prompt's token ids: missing a required argument: 'n'"),
    ],
)
def test_a_drafter_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        configured_speculation(SchedulingConfig(speculative=name), vocab_size=9)


class Wants(Repeat):
    def __init__(self, prompt_ids: Sequence[int], n: int) -> None: ...


def test_what_does_not_work_with_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy 'orca' .* excludes speculative 'ngram'"):
        Sizes(policy="orca", speculative="ngram")
    with pytest.raises(ConfigError, match="does not work yet with a model with an encoder"):
        serving_config(PRESETS["t5-small"], Sizes(speculative="ngram"), [])


@pytest.mark.parametrize(
    ("max_batch_size", "n_drafts", "expected"), [(8, 4, 4), (32, 4, 16), (3, 4, 2), (1, 4, 0), (12, 64, 11)]
)
def test_a_hybrid_s_engine_has_states_for_drafts(max_batch_size: int, n_drafts: int, expected: int) -> None:
    """On each of two stages as many as both of their batches may need; a state takes 2 x 16 numbers."""
    convolution = ShortConvolution(channels=16, width=3, bias=False)
    recurrent = replace(MODEL.layers[0], attention=None, recurrence=convolution)
    hybrid = replace(MODEL, layers=(recurrent, *MODEL.layers))
    rooms = [
        StageRoom(layers=layers, n_devices=1, itemsize=4, attention="native", free=1 << 30)
        for layers in (range(1), range(1, len(hybrid.layers)))
    ]
    asked = Sizes(speculative="ngram", speculative_tokens=n_drafts, max_batch_size=max_batch_size)
    serving = serving_config(hybrid, asked, rooms)
    shape = engine_shape(hybrid, serving, n_workers=2)
    assert serving.n_draft_states == shape.n_draft_states == 2 * expected
    assert shape.n_states == shape.n_rows + shape.n_snapshots + 2 * expected
    memory = rooms[0].memory(hybrid, shape)
    assert memory.draft_states == 2 * expected * 2 * 16 * 4
    assert memory.fixed - replace(memory, draft_states=0).fixed == memory.draft_states
    without = serving_config(hybrid, replace(asked, speculative="off"), rooms)
    assert engine_shape(hybrid, without, n_workers=2).n_draft_states == 0
    kv = kv_manager(shape, serving.scheduling)
    assert (0 if kv.draft_states is None else kv.draft_states.n_free) == 2 * expected


def requests_and_their_batches(drafted: bool) -> list[tuple[float, float, int]]:
    """When iterations began and ended, and their rows, for a drafted request beside a plain one."""
    config = replace(CONFIG, scheduling=SchedulingConfig())
    simulation = Simulation(config, token=lambda _, index: index % 7)
    right = Speculation(lambda *_: Right(), 3, MODEL.vocab_size)
    for i in range(2):
        req = Request(str(i), (8, 9), 32, SamplingParams(max_tokens=30), seed=i)
        req.kind = Drafted(right) if drafted and not i else PLAIN
        simulation.add_at(0.0, req)
    return [(one.issued, one.returned or 0.0, len(one.request_ids)) for one in simulation.run().iterations]


class Right:
    """Knows the output, from its tenth token to its twentieth."""

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        first = len(output_ids)
        return [i % 7 for i in range(first, first + n)] if 10 <= first < 20 else ()


def test_iterations_overlap_where_nothing_is_drafted_and_batches_stay_whole() -> None:
    whole = requests_and_their_batches(drafted=False)
    assert all(later[0] < earlier[1] for earlier, later in pairwise(whole))
    drafted = requests_and_their_batches(drafted=True)
    ahead = [later[0] < earlier[1] for earlier, later in pairwise(drafted)]
    # Some iterations of 10 to 20 output tokens, and those that await further drafts, are alone.
    first, n_alone = ahead.index(False), ahead.count(False)
    assert first in (9, 10) and 4 <= n_alone <= 12
    assert not any(ahead[first : first + n_alone]) and all(ahead[first + n_alone :])
    n_together = sum(n == 2 for _, _, n in drafted)
    assert all(n == 2 for _, _, n in drafted[:n_together]), "as long as both run, they run together"
