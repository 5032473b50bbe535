"""Systems under load: the same requests at ascending rates, on every system in turn (ORCA 6.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.paper.play import MakeScheduler, play
from bench.paper.serving_curve import Served, served
from bench.paper.serving_records import ServingRecords
from bench.paper.shared_engine import SharedEngine
from server.load.trace import Trace, homogeneous_trace, mean_lengths, mean_rate, scaled

PLAY_SECONDS = 900.0  # one play
ALONE = 5  # requests that are measured alone
FURTHER, STEP = 6, 1.5  # rates beyond the requested ones
HONEST_REQUESTS = 8  # played at once, where batches have one request

Progress = Callable[[str, int, int], object]  # the play, requests done, requests in all


@dataclass(frozen=True, slots=True)
class System:
    """A system to measure: a scheduler with its sizes, on the one engine. The label is the paper's."""

    label: str
    is_orca: bool
    make: MakeScheduler


@dataclass(frozen=True, slots=True)
class Playing:
    """One play: a system at a rate, in requests a second."""

    system: System
    rate: float
    records: ServingRecords
    figures: Served


@dataclass(slots=True)
class Load:
    """Ascending load: `requests` at each rate, or as many as arrive in `seconds` if that is more.

    A system whose median normalized latency passed `until`, in seconds, is not played at higher rates; at
    `reach` systems are compared.
    """

    trace: Trace  # arrivals at one request a second, or recorded ones
    recorded: bool
    requests: int
    seconds: float
    until: float
    reach: float
    playings: list[Playing] = field(default_factory=list[Playing])

    def at_rate(self, rate: float) -> Trace:
        """The trace's first requests, at `rate`; all requests of a recorded trace."""
        if self.recorded:
            return scaled(self.trace, mean_rate(self.trace) / rate)
        n = min(len(self.trace), max(self.requests, round(rate * self.seconds)))
        return scaled(self.trace[:n], 1 / rate)

    def climb(
        self, shared: SharedEngine, systems: Sequence[System], rates: Sequence[float], on_progress: Progress
    ) -> None:
        """Play every rate on every system in turn, so that a disturbance affects all systems.

        Systems that have not reached `reach` then continue alone, at up to six further rates, each 1.5
        times the last.
        """
        for rate in sorted(rates):
            self._play(shared, [one for one in systems if self._last(one) <= self.until], rate, on_progress)
        rate = max(rates)
        for _ in range(FURTHER):
            rate *= STEP
            if not self.recorded:
                self._play(
                    shared, [one for one in systems if self._last(one) < self.reach], rate, on_progress
                )

    def _play(
        self, shared: SharedEngine, systems: Sequence[System], rate: float, on_progress: Progress
    ) -> None:
        trace = self.at_rate(rate)
        for one in systems:
            records = play_on(shared, one.make, trace, f"{one.label} at {rate:.3g} req/s", on_progress)
            figures = served(records)
            self.playings.append(Playing(one, rate, records, figures))
            print(
                f"{one.label} at {rate:.3g} req/s: {figures.req_s:.3g} req/s, median normalized latency "
                f"{figures.normalized_median * 1e3:.1f} ms a token",
                flush=True,
            )

    def _last(self, system: System) -> float:
        """The system's median normalized latency at the highest rate so far."""
        return max((one.normalized_median for one in self.curve(system)[-1:]), default=0.0)

    def curve(self, system: System) -> list[Served]:
        """The system's figures by ascending rate."""
        return [one.figures for one in self.playings if one.system is system]


@dataclass(frozen=True, slots=True)
class Honesty:
    """Requests a second of ORCA over the baseline where all requests arrive at once.

    One ratio for each round, for ORCA with overlap and without.
    """

    case: str
    overlap: list[float]
    no_overlap: list[float]


def play_on(
    shared: SharedEngine, make: MakeScheduler, trace: Trace, name: str, on_progress: Progress
) -> ServingRecords:
    """Play a trace on the engine. Raises NotPlayed."""
    n_done = 0

    def finished(n: int) -> None:
        nonlocal n_done
        n_done += n
        on_progress(name, n_done, len(trace))

    on_progress(name, 0, len(trace))
    return play(
        trace,
        make,
        deadline=PLAY_SECONDS,
        check=shared.check,
        bucket_sizes=shared.buckets,
        on_finished=finished,
    )


def own_execution(
    shared: SharedEngine, make: MakeScheduler, trace: Trace, on_progress: Progress
) -> tuple[float, float]:
    """Seconds of a request of the trace's mean lengths alone, and seconds per generated token."""
    n_input, n_output = mean_lengths(trace)
    seconds: list[float] = []
    for i in range(ALONE + 1):
        one = homogeneous_trace(
            1, n_input=n_input, n_output=n_output, vocab_size=shared.model.vocab_size, seed=i
        )
        figures = served(play_on(shared, make, one, "one request alone", on_progress))
        seconds.extend([figures.seconds] * (i > 0))  # the first warms up
    return median(seconds), median(seconds) / n_output


def honesty(
    shared: SharedEngine, trace: Trace, max_bs: int, rounds: int, on_progress: Progress
) -> list[Honesty]:
    """Measure where scheduling makes no difference: one request, and equal requests in batches of `max_bs`.

    In each round ORCA, ORCA without overlap and the baseline play in turn; the first round is not counted.
    """
    n_input, n_output = mean_lengths(trace)
    vocab_size = shared.model.vocab_size
    equal = homogeneous_trace(2 * max_bs, n_input=n_input, n_output=n_output, vocab_size=vocab_size)
    found: list[Honesty] = []
    for case, n, requests in (
        ("max_bs 1", 1, scaled(trace[:HONEST_REQUESTS], 0)),
        (f"equal requests, max_bs {max_bs}", max_bs, equal),
    ):
        one = Honesty(case, [], [])
        systems = (shared.orca(n), shared.orca(n, overlap=False), shared.baseline(n, n))
        for i in range(rounds + 1):
            overlap, no_overlap, baseline = (
                served(play_on(shared, make, requests, case, on_progress)).req_s for make in systems
            )
            if i:
                one.overlap.append(overlap / baseline)
                one.no_overlap.append(no_overlap / baseline)
        found.append(one)
    return found
