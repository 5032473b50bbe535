"""Attacks a real server while sixteen well-behaved streams run, and measures their delays.

    python -m bench.hostile [--seconds 4] [--rounds 10] [--only NAME,NAME] [--tries 1] [--no-judge]

Starts `orca serve` with the demo model. A second process runs the sixteen streams, with probes of /health and
of a body of 10 kB, and records their longest waits; a third runs the attacker. First it measures without an
attack, and while the attacker's process only computes; then each attack, then all attacks briefly, `--rounds`
times. For each attack it shows the longest gap between two chunks of a stream, the longest wait for a first
chunk and for each probe, how long the server's watchdog saw the event loop and the GIL held, the attacker's
processor time, the growth of the server's memory, descriptors and threads (after the attack, and the maximum
in parentheses), and the answers that the attacker got. After each round it shows the server's memory.

Exits with 1, naming why, if a gap took 0.05 s longer than without an attacker, or a probe 0.25 s, a
well-behaved client was refused or cut off, an answer was a 5xx other than 503, memory, descriptors or threads
grew over the rounds (checked from four rounds on), or the server left a traceback or did not exit cleanly.

Everything runs on loopback and shares the machine's cores, so the clients' own processor time counts against
the server: an attack that took half a core or more is compared with the waits beside a process that only
computes. On a shared machine, `--tries 3` gives an attack that cost too much two more tries, and the best
counts: the cost of the attack itself shows in every try.
"""

import argparse
import json
import sys
import time

from rich.console import Console
from rich.progress import Progress

from bench.hostile.attacker import ATTACKS
from bench.hostile.report import Report, attack_table, round_table, summary
from bench.hostile.trial import Cost, Trial

# Freed memory goes back to the system a few seconds after a long body, so that many of them share the work.
_GIVE_BACK_SECONDS = 6.0


def attacked(trial: Trial, report: Report, name: str, seconds: float, number: int, tries: int) -> Cost:
    """Run one attack, and again while there are complaints and tries left; returns the best result."""
    costs = [trial.attack(name, seconds, number)]
    while report.complaints(costs[-1]) and len(costs) < tries:
        costs.append(trial.attack(name, seconds, number))
    return min(costs, key=lambda cost: (len(report.complaints(cost)), cost.waits.between + cost.waits.health))


def run(names: list[str], flags: argparse.Namespace, progress: Progress) -> Report:
    """Run everything."""
    seconds, n_rounds, round_seconds = flags.seconds, flags.rounds, flags.round_seconds
    report = Report(seconds)
    with Trial() as trial:
        n_steps = 2 + len(names) * (1 + n_rounds)
        task = progress.add_task("no attack", total=n_steps)
        report.baseline = trial.quiet(seconds + 1.0)
        progress.advance(task)
        report.busy = trial.busy(seconds + 1.0)
        progress.advance(task)
        for name in names:
            progress.update(task, description=name)
            report.costs.append(attacked(trial, report, name, seconds, 0, flags.tries))
            progress.advance(task)
        for number in range(1, n_rounds + 1):
            for name in names:
                progress.update(task, description=f"round {number}: {name}")
                cost = attacked(trial, report, name, round_seconds, number, flags.tries)
                report.round_costs.append(cost)
                progress.advance(task)
            time.sleep(_GIVE_BACK_SECONDS)
            report.rounds.append(trial.footprint())
        report.exit_status = trial.finish()
        report.n_servers, report.traceback = trial.n_servers, trial.traceback
    return report


def main() -> int:
    """Run the attacks; print tables, failures and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description="Hostile clients")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per attack (default: 4)")
    parser.add_argument("--rounds", type=int, default=10, help="further rounds of all attacks (default: 10)")
    parser.add_argument(
        "--round-seconds", type=float, default=1.5, help="per attack in a round (default: 1.5)"
    )
    parser.add_argument("--only", metavar="NAME,NAME", help=f"some of: {', '.join(ATTACKS)}")
    parser.add_argument("--tries", type=int, default=1, help="per attack that costs too much (default: 1)")
    parser.add_argument("--no-judge", action="store_true", help="exit with 0 whatever the result")
    flags = parser.parse_args()
    names = list(ATTACKS) if flags.only is None else flags.only.split(",")
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        parser.error(f"--only has {unknown[0]!r}; the attacks are {', '.join(ATTACKS)}")
    with Progress(console=Console(stderr=True)) as progress:
        report = run(names, flags, progress)
    console = Console(width=200)
    console.print(attack_table(report))
    if report.rounds:
        console.print(round_table(report))
    for cost in report.costs:
        for line in cost.held if report.complaints(cost) else ():
            print(f"{cost.name}: {line}")
    result = summary(report)
    for failure in result["failures"]:
        print(f"FAILED: {failure}")
    print(json.dumps(result))
    return 1 if result["failures"] and not flags.no_judge else 0


if __name__ == "__main__":
    sys.exit(main())
