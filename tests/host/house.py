"""A scheduler on a scripted engine, with its batches and results by the requests' names."""

from collections.abc import Callable, Sequence

from orca_jax.config import ServingConfig
from orca_jax.request.request import FinishReason, Request, RequestState, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.simulation import Shown, shown

INITIATION, RUNNING, INCREMENT, FINISHED = RequestState
STOP_TOKEN = 1


def make_request(
    name: str,
    *,
    arrival: int = -1,
    n_input: int = 1,
    n_output: int = 8,
    state: RequestState = INITIATION,
    row: int = -1,
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(5,) * n_input,
        max_tokens=n_input + n_output,
        sampling=SamplingParams(max_tokens=n_output),
        seed=0,
        end_token_ids=frozenset({STOP_TOKEN}),
        arrival=arrival,
        state=state,
        row=row,
    )


def names(batch: Sequence[Request | Row]) -> str:
    return "".join(one[0].request_id if isinstance(one, tuple) else one.request_id for one in batch)


class ScriptedEngine:
    """Records its batches; returns the oldest with the token that was set for each request."""

    def __init__(self, n_workers: int = 1, *, keeps_tokens: bool = False) -> None:
        self.n_workers = n_workers
        self.keeps_tokens = keeps_tokens
        self.log: list[str] = []
        self.tokens: dict[str, int] = {}  # 9 where nothing is set
        self.on_issue: Callable[[Sequence[Row]], None] = lambda _: None
        self.on_wait: Callable[[Callable[[], bool]], bool] = lambda _: False  # True: interrupted

    def issue(self, rows: Sequence[Row]) -> Iteration:
        self.on_issue(rows)
        self.log.append("issue " + names(rows))
        return Iteration(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        if self.on_wait(interrupted):
            self.log.append("interrupted")
            return None
        self.log.append("return " + names(iteration.rows))
        return Returned([self.tokens.get(req.request_id, 9) for req, _ in iteration.rows])


class House:
    """A scheduler with all it needs, and a scripted engine."""

    def __init__(
        self,
        *,
        n_workers: int = 1,
        max_bs: int = 2,
        n_slots: int = 64,
        block_size: int = 1,
        deterministic: bool = False,
        overlap: bool = False,
    ) -> None:
        config = ServingConfig(
            max_batch_size=max_bs,
            n_slots=n_slots,
            block_size=block_size,
            max_batch_tokens=64,
            deterministic=deterministic,
        )
        self.now = 0.0
        self.deliveries: list[list[Shown]] = []
        self.timeline = Timeline(lambda: self.now)
        self.pool = RequestPool(
            max_waiting=100,
            on_deliveries=lambda some: self.deliveries.append(list(shown(some))),
            on_arrival=self.timeline.arrived,
        )
        self.kv = KVManager(
            n_blocks=config.n_blocks,
            block_size=block_size,
            n_rows=(n_workers + overlap) * max_bs,
            max_blocks_per_row=config.n_blocks,
        )
        self.engine = ScriptedEngine(n_workers, keeps_tokens=overlap)
        self.scheduler = Scheduler(self.pool, self.engine, self.kv, config=config, timeline=self.timeline)

    def add(self, name: str, *, n_input: int = 1, n_output: int = 8) -> Request:
        req = make_request(name, n_input=n_input, n_output=n_output)
        self.pool.add(req)
        return req

    def steps(self, n: int) -> list[str]:
        """Run `n` turns of the loop; return the iterations that the engine saw."""
        n_before = len(self.engine.log)
        for _ in range(n):
            assert self.scheduler.step() is True
        return self.engine.log[n_before:]

    def delivered(self) -> list[list[tuple[str, int | None, FinishReason | None]]]:
        return [
            [(req.request_id, token_id, reason) for req, token_id, reason in some] for some in self.deliveries
        ]
