"""The traces at the sizes and rates of each machine, and the policies that are compared on each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from bench.policies.limits import Limits
from bench.policies.policies import BASELINE, COMPARED
from bench.policies.traces import (
    MakeTrace,
    Trace,
    conversations,
    from_requests,
    longest,
    n_requests,
    single,
    with_flood,
    with_long_prompts,
)
from server.load.workload import Load, Requests

_SIX = (BASELINE, "orca", "orca + on-demand", "orca + chunked", "orca + prefix cache", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A trace at a rate, in conversations a second, and the policies that play it.

    With a `bound` in seconds, the highest rate of each policy is searched at which the median normalized
    latency stays within it; the search starts at `rate`. Then all policies play the trace at ORCA's rate.
    `references` are further plays to compare with: a label, a policy and a trace.
    """

    title: str
    make: MakeTrace
    rate: float
    limits: Limits
    bound: float | None = None
    policies: tuple[str, ...] = _SIX
    references: tuple[tuple[str, str, Callable[[], Trace]], ...] = ()


def simulated_cases(share: float = 1.0) -> Mapping[str, Case]:
    """The cases for llama-3.1-8b on an H200, with only this `share` of the requests."""

    def n(whole: int) -> int:
        return max(8, round(share * whole))

    long = {"every": 2.0, "n_input": 8192, "n_output": 16}
    short = partial(single, n(3000), n_input=(16, 64), n_output=(64, 256))
    tenant = partial(single, n(600), owner="tenant")
    flood = partial(single, owner="flood", seed=1)
    return {
        "paper": Case(
            title="the paper's trace: 32 to 512 tokens in, 1 to 128 out",
            make=partial(single, n(3000)),
            rate=100.0,
            limits=Limits(n_positions=2048, max_batch_size=128),
            bound=0.010,
        ),
        "declared": Case(
            title="limits of four times the outputs: 32 to 512 tokens in, 1 to 512 out, 65,536 slots",
            make=partial(single, n(1500), n_output=(1, 512), limit_factor=4),
            rate=40.0,
            limits=Limits(n_positions=4096, max_batch_size=256, n_slots=65_536),
            bound=0.010,
        ),
        "conversations": Case(
            title="conversations of 8 turns that share a system prompt of 200 tokens",
            make=lambda rate: conversations(
                n(400), rate, n_question=(32, 256), n_output=(64, 256), think=5.0
            ),
            rate=3.0,
            limits=Limits(n_positions=8192, max_batch_size=128),
        ),
        "long prompts": Case(
            title="a prompt of 8,192 tokens every two seconds among short requests",
            make=lambda rate: with_long_prompts(short(rate), **long),
            rate=80.0,
            limits=Limits(n_positions=16_384, max_batch_size=128),
            references=(
                ("orca, without the long prompts", "orca", lambda: short(80.0)),
                ("all, without the long prompts", "all", lambda: short(80.0)),
            ),
        ),
        "tenants": Case(
            title="a tenant with 40 requests a second beside one with 400",
            make=lambda rate: with_flood(tenant(rate), flood(10 * n(600), 10 * rate)),
            rate=40.0,
            limits=Limits(n_positions=2048, max_batch_size=128),
            policies=("orca", "all", "all, fair"),
            references=(("all, fair, alone", "all, fair", lambda: tenant(40.0)),),
        ),
    }


def file_case(
    requests: Requests, *, max_batch_size: int, n_slots: int | None = None, rate: float | None = None
) -> Case:
    """A file's requests at their own arrivals, or as a Poisson process of `rate` conversations a second.

    Raises TraceError, and OSError if the file cannot be read.
    """
    assert requests.file is not None
    trace = from_requests(requests.trace(Load(rate), 0))
    seconds = trace[-1].arrival - trace[0].arrival
    return Case(
        title=f"{requests.file.name}, {n_requests(trace):,} requests",
        make=lambda _: trace,
        rate=len(trace) / seconds if seconds > 0 else float("inf"),
        limits=Limits(n_positions=longest(trace), max_batch_size=max_batch_size, n_slots=n_slots),
        policies=COMPARED,
    )


def short_conversations(n: int, rate: float) -> Trace:
    """`n` conversations of a size for a CPU."""
    return conversations(n, rate, n_question=(8, 48), n_output=(8, 32), think=1.0)


def real_cases(share: float = 1.0) -> Mapping[str, Case]:
    """The cases for GPT-2 on a CPU, which take minutes: fewer and shorter requests, and no search."""

    def n(whole: int) -> int:
        return max(4, round(share * whole))

    limits = Limits(n_positions=1024, max_batch_size=16)
    short = partial(single, n(60), n_input=(8, 32), n_output=(16, 64))
    tenant = partial(single, n(20), n_input=(16, 64), n_output=(8, 32), owner="tenant")
    flood = partial(single, n(200), n_input=(16, 64), n_output=(8, 32), owner="flood", seed=1)
    return {
        "paper": Case(
            title="the paper's trace: 32 to 512 tokens in, 1 to 128 out",
            make=partial(single, n(30)),
            rate=1.1,
            limits=limits,
        ),
        "declared": Case(
            title="limits of four times the outputs: 32 to 128 tokens in, 16 to 96 out, 2,048 slots",
            make=partial(single, n(30), n_input=(32, 128), n_output=(16, 96), limit_factor=4),
            rate=6.0,
            limits=replace(limits, n_slots=2048),
        ),
        "conversations": Case(
            title="conversations of 8 turns that share a system prompt of 200 tokens",
            make=partial(short_conversations, n(8)),
            rate=0.4,
            limits=limits,
        ),
        "long prompts": Case(
            title="a prompt of 900 tokens every two seconds among short requests",
            make=lambda rate: with_long_prompts(short(rate), every=2.0, n_input=900, n_output=4),
            rate=2.5,
            limits=limits,
            references=(
                ("orca, without the long prompts", "orca", lambda: short(2.5)),
                ("all, without the long prompts", "all", lambda: short(2.5)),
            ),
        ),
        "tenants": Case(
            title="a tenant with one request a second beside one with ten",
            make=lambda rate: with_flood(tenant(rate), flood(10 * rate)),
            rate=1.0,
            limits=limits,
            policies=("orca", "all", "all, fair"),
            references=(("all, fair, alone", "all, fair", lambda: tenant(1.0)),),
        ),
    }
