"""The number of drafts: on a virtual clock with iterations of known costs, drafts save time and cost none."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig, Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.rows.scored import ScoredOutput
from orca_jax.iteration.shape import serving_buckets
from orca_jax.planning.cost_model import IterationShape
from orca_jax.planning.sizes import TOKENS_OF_AN_ITERATION, iteration_costs, serving_config
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.simulation.engine import hashed_token
from orca_jax.simulation.simulation import Simulation
from orca_jax.speculation.drafter import Speculation

CONFIG = ServingConfig(
    max_batch_size=32,
    n_slots=1 << 14,
    max_batch_tokens=512,
    scheduling=SchedulingConfig(speculative="ngram", prefix_caching=False),
)
BUCKETS = serving_buckets(CONFIG)
N_OUTPUT = 60


class Told:
    """Knows the output, and gives a wrong token with a given probability."""

    def __init__(self, req: Request, right: float) -> None:
        self._req, self._right = req, right
        self._random = random.Random(req.seed)

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        first = len(output_ids)
        drafts = [hashed_token(self._req, i) for i in range(first, first + n)]
        return [token_id if self._random.random() < self._right else token_id + 1 for token_id in drafts]


class Shared:
    """A draft model whose round takes `each` for each depth, and which drafts as the requests are told."""

    failed = False

    def __init__(self, simulation: Simulation, each: float) -> None:
        self._clock, self._each = simulation.clock, each
        self.told: dict[Request, Told] = {}

    def cost(self, wanted: Sequence[tuple[Request, int]]) -> float:
        return self._each * max(n for _, n in wanted)

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int] | None]:
        self._clock.advance_to(self._clock.now() + self.cost(wanted))
        return [self.told[req].draft(req.output_ids, n) for req, n in wanted]


def seconds(
    n_streams: int, right: Sequence[float], costs: Sequence[float], each: float = -1.0
) -> tuple[float, list[Request]]:
    """The time of so many requests at once, whose drafts are right so often; without drafts if none are.

    With `each` a draft model drafts, whose iterations take so long.
    """
    config = replace(CONFIG, iteration_costs=tuple(costs))

    def duration(shape: IterationShape) -> float:
        n_tokens = sum(shape.input_lengths)
        return next(cost for size, cost in zip(BUCKETS, costs, strict=True) if size >= n_tokens)

    simulation = Simulation(config, duration=duration)
    shared = Shared(simulation, each)
    requests = list[Request]()
    for i in range(n_streams):
        req = Request(str(i), (1, 2, 3), 3 + N_OUTPUT, SamplingParams(max_tokens=N_OUTPUT), seed=i)
        if right:
            told = Told(req, right[i % len(right)])
            req.kind = Drafted(Speculation(lambda *_, told=told: told, 4, 1 << 20))
            if each >= 0:
                shared.told[req] = told
                req.kind = Drafted(Speculation(lambda *_: Silent(), 4, 1 << 20, shared=shared))
        requests.append(req)
        simulation.add_at(0.0, req)
    simulation.run()
    return simulation.clock.now(), requests


CPU_COSTS = [TOKENS_OF_AN_ITERATION + size for size in BUCKETS]
FLAT_TO_64 = [max(64.0, size) for size in BUCKETS]  # bound by memory up to 64 tokens
LINEAR = [float(size) for size in BUCKETS]  # bound by arithmetic


@pytest.mark.parametrize("costs", [CPU_COSTS, FLAT_TO_64, LINEAR], ids=["cpu", "flat", "linear"])
def test_drafts_never_make_a_crowd_slower(costs: list[float]) -> None:
    for n_streams, right in product((1, 12, 32), ((0.0,), (0.5,), (1.0, 0.0))):
        plain, before = seconds(n_streams, (), costs)
        drafted, after = seconds(n_streams, right, costs)
        assert drafted <= 1.05 * plain, (n_streams, right)
        assert [req.output_ids for req in before] == [req.output_ids for req in after]


def test_what_they_save() -> None:
    for costs, n_streams, least in ((CPU_COSTS, 1, 1.5), (FLAT_TO_64, 1, 2.9), (FLAT_TO_64, 12, 1.5)):
        assert seconds(n_streams, (), costs)[0] / seconds(n_streams, (0.8,), costs)[0] > least, n_streams
    # Of requests whose drafts are right and of others the former get the places that are worth their time.
    _, requests = seconds(20, (1.0, 0.0), FLAT_TO_64)
    assert sum(map(n_drafted, requests[::2])) > 1.5 * sum(map(n_drafted, requests[1::2]))


@pytest.mark.parametrize("costs", [CPU_COSTS, FLAT_TO_64, LINEAR], ids=["cpu", "flat", "linear"])
def test_the_time_of_a_draft_model_counts(costs: list[float]) -> None:
    each = 0.1 * costs[0]
    for n_streams, right in product((1, 12, 32), ((0.0,), (0.5,), (1.0, 0.0))):
        _, before = seconds(n_streams, (), costs)
        _, after = seconds(n_streams, right, costs, each)
        # On average: where some drafts are right, the others' requests wait for them too.
        plain, drafted = (sum(req.token_times[-1] for req in requests) for requests in (before, after))
        assert drafted <= 1.06 * plain, (n_streams, right)
        assert [req.output_ids for req in before] == [req.output_ids for req in after]
    for right in (0.0, 1.0):  # an iteration of the draft model takes as long as the model's
        assert seconds(1, (right,), LINEAR, LINEAR[0])[0] == seconds(1, (), LINEAR)[0]


def test_what_a_draft_model_saves() -> None:
    for costs, n_streams, right, least in (
        (CPU_COSTS, 1, 0.9, 1.5),
        (FLAT_TO_64, 1, 0.8, 2.0),
        (FLAT_TO_64, 12, 0.8, 1.4),
    ):
        plain, each = seconds(n_streams, (), costs)[0], 0.1 * costs[0]
        assert plain / seconds(n_streams, (right,), costs, each)[0] > least, n_streams


class Silent:
    """Leaves the drafts to the draft model."""

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        return ()


def n_drafted(req: Request) -> int:
    assert isinstance(req.kind, Drafted)
    return req.kind.speculation.n_drafted


def test_tokens_that_are_certain_need_not_be_worth_their_time() -> None:
    simulation, scored = Simulation(replace(CONFIG, iteration_costs=tuple(LINEAR))), tuple(range(20))
    params = SamplingParams(max_tokens=20)
    req = Request("a", (1, 2, 3), 23, params, seed=0, kind=ScoredOutput(scored))
    simulation.add_at(0.0, req)
    simulation.run()
    assert req.output_ids == list(scored) and req.n_iterations == 2


def test_costs_of_a_device() -> None:
    llama, mixture = PRESETS["llama-3.1-8b"], PRESETS["mixtral-8x7b"]

    def costs(model: ModelConfig, device: str) -> list[float]:
        layers = range(model.n_layers)
        room = StageRoom(layers=layers, n_devices=1, itemsize=2, attention="kernel", free=100 << 30)
        return list(iteration_costs(CONFIG, model, [room], device=device))

    at = {size: i for i, size in enumerate(BUCKETS)}
    assert costs(llama, "cpu") == CPU_COSTS
    on_gpu = costs(llama, "NVIDIA H100 80GB HBM3")
    # Weights of 16 GB at 3.35 TB/s, and from some 300 tokens on twice as many operations as weights a token.
    assert on_gpu[at[1]] == pytest.approx(16.06e9 / 3.35e12, rel=0.1)
    assert on_gpu[at[64]] < 1.7 * on_gpu[at[1]] and on_gpu[at[512]] > 2 * on_gpu[at[64]]
    assert on_gpu == sorted(on_gpu)
    of_experts = costs(mixture, "h100")
    assert of_experts[at[8]] > 2.5 * of_experts[at[1]], "more tokens read more experts"
    asked = Sizes(max_batch_size=32, n_slots=1 << 14, speculative="ngram")
    room = StageRoom(layers=range(32), n_devices=1, itemsize=2, attention="kernel", free=100 << 30)
    serving = serving_config(llama, asked, [room], device="h100")
    assert len(serving.iteration_costs) == len(serving_buckets(serving))
    assert ServingConfig.from_dict(json.loads(json.dumps(serving.recorded()))) == serving
    assert not serving_config(llama, replace(asked, speculative="off"), [room], device="h100").iteration_costs
