"""The kernel's performance and correctness targets on a Hopper GPU, checked against the results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.kernel.results import Result
from bench.kernel.shapes import Case, Subject
from orca_jax.planning.cost_model import Device

LARGE_KV_BYTES = 256 << 20
BANDWIDTH_SHARE = 0.85
LATENCY_SECONDS = 5e-6
LONG_INITIATION = 2048
MATRIX_RATE_SHARE = 0.60
OVER_CUDNN = 1.15
OVER_PARTS = 1.10
RELATIVE_ERROR = 1e-2
_RIGHT, _STILL = f"error against float64 at most {RELATIVE_ERROR:g}", "the same input gives the same bits"
CORRECT = (_RIGHT, _STILL)  # the aims of correctness


@dataclass(frozen=True, slots=True)
class Aim:
    """An aim. `hit` is None if nothing was measured; `worst` names the case furthest from it, with its
    figure.
    """

    name: str
    hit: bool | None
    n_hit: int
    n_cases: int
    worst: str


def check_aims(results: Iterable[Result], device: Device | None) -> list[Aim]:
    """All aims, in the order of the table."""
    kept = list(results)
    return [_correct(kept), _equal(kept), *(_timed(kept, device) if device is not None else [])]


def _aim(name: str, cases: Sequence[tuple[float, float, str]]) -> Aim:
    """`cases` are (figure, bound, description); a case hits if the figure is at most the bound."""
    if not cases:
        return Aim(name, None, 0, 0, "not measured")
    n_hit = sum(figure <= bound for figure, bound, _ in cases)
    *_, worst = max(cases, key=lambda case: case[0] / case[1])
    return Aim(name, n_hit == len(cases), n_hit, len(cases), worst)


def _correct(results: Sequence[Result]) -> Aim:
    """The error of every form; infinite if it could not run."""
    cases = []
    for result in results:
        if result.task.section == "correctness":
            values = result.values
            sound = result.failed is None and values["finite"] and values["padding_zero"]
            error = values["relative"] if sound else float("inf")
            cases.append((error, RELATIVE_ERROR, f"{result.task.name}: {error:.1e}"))
        elif result.task.subject == "kernel" and result.seconds is not None:
            error = result.values["error"]
            cases.append((error, RELATIVE_ERROR, f"{result.task.name}: {error:.1e}"))
    return _aim(_RIGHT, cases)


def _equal(results: Sequence[Result]) -> Aim:
    cases = []
    for result in results:
        if result.task.section == "correctness" and result.failed is None:
            moved = result.values["n_runs"] - result.values["n_equal"]
            cases.append((moved + 1.0, 1.0, f"{result.task.name}: {moved} runs differ"))
    return _aim(_STILL, cases)


def _timed(results: Sequence[Result], device: Device) -> list[Aim]:
    timed = [result for result in results if result.seconds is not None]

    def seconds(subject: Subject, case: Case) -> float | None:
        of_case = (r.seconds for r in timed if r.task.subject == subject and r.task.case == case)
        return next(of_case, None)

    ours = [(r.task.case, r.seconds) for r in timed if r.task.subject == "kernel"]
    ours = [(case, s) for case, s in dict(ours).items() if case is not None and s is not None]
    increments = [(case, s) for case, s in ours if case.increments_only]
    large = [
        (BANDWIDTH_SHARE / share, 1.0, f"{case.name}: {share:.0%}")
        for case, s in increments
        if case.kv_bytes >= LARGE_KV_BYTES
        for share in (case.n_bytes / s / device.bandwidth,)
    ]
    small = [
        (
            s,
            case.floor(device) + LATENCY_SECONDS,
            f"{case.name}: floor + {(s - case.floor(device)) * 1e6:.1f} us",
        )
        for case, s in increments
        if case.kv_bytes < LARGE_KV_BYTES
    ]
    prompts = [
        (case, s) for case, s in ours if len(set(case.rows)) == 1 and case.rows[0][0] == case.rows[0][1] > 1
    ]
    rate = [
        (MATRIX_RATE_SHARE / share, 1.0, f"{case.name}: {share:.0%}")
        for case, s in prompts
        if len(case.rows) == 1 and case.n_tokens >= LONG_INITIATION
        for share in (case.n_flops / s / device.matrix_rate,)
    ]

    def relative_to(peer: Subject, bound: float) -> list[tuple[float, float, str]]:
        return [
            (s / theirs, bound, f"{case.name}: {s / theirs:.2f} of its time")
            for case, s in ours
            if (theirs := seconds(peer, case)) is not None
        ]

    mixed = []
    for case, s in ours:
        if len(set(case.rows)) > 1:
            parts = [seconds("kernel", part) for part in case.parts()]
            if parts[0] is not None and parts[1] is not None:
                share = s / (parts[0] + parts[1])
                mixed.append((share, OVER_PARTS, f"{case.name}: {share:.2f} of its parts"))
    return [
        _aim(f"decodes that read 256 MB and more: {BANDWIDTH_SHARE:.0%} of the bandwidth", large),
        _aim("decodes that read less: floor + 5 us", small),
        _aim(
            f"a prompt of {LONG_INITIATION} tokens and more: {MATRIX_RATE_SHARE:.0%} of the matrix rate", rate
        ),
        _aim(f"prompts: at most {OVER_CUDNN:g} of cuDNN's time", relative_to("cudnn", OVER_CUDNN)),
        _aim("ahead of JAX's decode_attention", relative_to("decode_attention", 1.0)),
        _aim("ahead of JAX's paged_attention", relative_to("paged_attention", 1.0)),
        _aim(f"a mixed batch: at most {OVER_PARTS:g} of the sum of its parts", mixed),
    ]
