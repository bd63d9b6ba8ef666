"""Simulated clusters, by seeds: python -m tests.simulation [--seeds 0:200] [--jobs 2] [--planted NAME] [--table].

A seed that breaks an invariant prints one line that repeats it. The exit status is 1 then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from mooncache.runtime import logs
from tests.simulation.faults import FAULTS
from tests.simulation.planted import OF_SERVING, PLANTED
from tests.simulation.run import Outcome, run_seed
from tests.simulation.situations import SITUATIONS
from tests.simulation.world import SERVING_EVERY

PROGRESS_S = 60.0
PHASES = ("steady", "full report", "copying", "rebuild", "election")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="A:B[:STEP]", help="seeds A to B-1, or one seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    parser.add_argument(
        "--planted", default="", choices=["", *PLANTED], metavar="NAME", help="plant this bug"
    )
    parser.add_argument(
        "--table", action="store_true", help="plant each bug in turn, and count the seeds that find it"
    )
    parser.add_argument("--digests", action="store_true", help="print each seed's digest")
    parser.add_argument("--coverage", action="store_true", help="print how often each fault hit each phase")
    asked = parser.parse_args()
    parts = [int(part) for part in asked.seeds.split(":")]
    seeds = range(*parts) if len(parts) > 1 else range(parts[0], parts[0] + 1)
    with multiprocessing.get_context("fork").Pool(asked.jobs, initializer=_quiet) as pool:
        if asked.table:
            return _table(pool, seeds)
        return _run(pool, seeds, asked)


def _quiet() -> None:
    logs.setup("simulation", level="critical")


def _one(given: tuple[int, str]) -> Outcome:
    return run_seed(*given)


class Progress:
    """Says each minute on standard error how far a run is, how fast, and how long it will take."""

    def __init__(self, seeds: int) -> None:
        self._seeds, self._began_s = seeds, time.monotonic()
        self._next_s = self._began_s + PROGRESS_S

    def seed_done(self, done: int, broken: int, simulated_s: float, cpu_s: float) -> None:
        """One more is done; the last numbers are sums."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PROGRESS_S
        a_second = done / (now_s - self._began_s)
        left_s = (self._seeds - done) / a_second
        print(
            f"{done} of {self._seeds} seeds ({done / self._seeds:.1%}), {broken} broken; {a_second * 3600:.0f} an hour,"
            f" {simulated_s / max(cpu_s, 1e-9):.0f} simulated s in a processor second;"
            f" about {left_s / 60:.0f} minutes left",
            file=sys.stderr,
            flush=True,
        )


def _run(pool: multiprocessing.pool.Pool, seeds: range, asked: argparse.Namespace) -> int:
    began_s, broken, total = time.monotonic(), 0, Outcome(-1)
    progress = Progress(len(seeds))
    for done, outcome in enumerate(
        pool.imap(_one, ((seed, asked.planted) for seed in seeds), chunksize=4), 1
    ):
        if asked.digests:
            print(outcome.seed, outcome.digest, flush=True)
        if outcome.violation is not None:
            broken += 1
            plant = f" --planted {asked.planted}" if asked.planted else ""
            print(
                f"FAILED {outcome.violation}  repeat: python -m tests.simulation --seeds {outcome.seed}{plant}",
                flush=True,
            )
        total.simulated_s += outcome.simulated_s
        total.cpu_s += outcome.cpu_s
        total.counts += outcome.counts
        total.coverage += outcome.coverage
        progress.seed_done(done, broken, total.simulated_s, total.cpu_s)
    if asked.coverage:
        _coverage(total.coverage)
    wall_s = time.monotonic() - began_s
    print(
        f"{len(seeds)} seeds, {broken} broken; {total.simulated_s:.0f} simulated s in {total.cpu_s:.1f} processor s"
        f" ({total.simulated_s / max(total.cpu_s, 1e-9):.0f} a second), {len(seeds) / wall_s * 3600:.0f} seeds an hour;"
        f" {total.counts['reads']} reads, {total.counts['commands']} commands,"
        f" {sum(n for name, n in total.counts.items() if name.startswith('request '))} requests"
    )
    return 1 if broken else 0


def _table(pool: multiprocessing.pool.Pool, seeds: range) -> int:
    """The table of docs/simulation.md: as many seeds of its kind for each bug; 1 when a bug is not found."""
    print(
        "| planted bug | what is taken away | where | found by | first seed | by the rule |\n"
        "|---|---|---|---|---|---|"
    )
    missed, count = 0, sum(seed % SERVING_EVERY == 0 for seed in seeds)
    for name, (where, what, _) in PLANTED.items():
        of_serving = name in OF_SERVING
        tried = [seed for seed in seeds if (seed % SERVING_EVERY == 0) == of_serving][:count]
        outcomes = list(pool.imap(_one, ((seed, name) for seed in tried), chunksize=2))
        found = [each for each in outcomes if each.violation]
        rules = Counter(each.violation.rule for each in found if each.violation)
        first = found[0].seed if found else ""
        print(
            f"| `{name}` | {what} | {where} | {len(found)} of {len(outcomes)} | {first} | {', '.join(rules)} |",
            flush=True,
        )
        missed += not found
    return 1 if missed else 0


def _coverage(coverage: Counter[tuple[str, str]]) -> None:
    print(f"| fault | {' | '.join(PHASES)} |\n|---|{'---|' * len(PHASES)}")
    for kind in (*FAULTS, *SITUATIONS):
        print(f"| {kind} | {' | '.join(str(coverage[kind, phase]) for phase in PHASES)} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
