"""`mooncache doctor`: is everything there, does it work together, and what to do where it does not."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from cyclopts import Parameter

from mooncache.cli.common import HERE, HOW, AsJson, Where
from mooncache.cli.doctor.core.checks import groups
from mooncache.cli.doctor.core.facts import Facts
from mooncache.cli.doctor.core.result import Status
from mooncache.cli.doctor.gather import gather
from mooncache.cli.doctor.view import AskingView, show, write_step
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, print_json


def doctor(
    *,
    verbose: Annotated[
        bool, Parameter(negative=(), group=HOW, help="Show what is well and what was skipped, too.")
    ] = False,
    steps: Annotated[
        bool,
        Parameter(
            negative=(),
            group=HOW,
            help="Write a line of JSON to standard error whenever a part begins or ends to be asked.",
        ),
    ] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Check this host and the cluster, and say what is wrong, why, and what to do. Exit code 1 when a check fails.

    Without a cluster it checks this host, before the first start. With one it asks every process that the master
    and the conductor know, writes a small block to each node and reads it back, and has the engines read one short
    prompt and load each other's blocks of it. All of it takes about ten seconds at most, also when processes do not
    answer.

    For example:

        mooncache doctor

        mooncache doctor --master 10.0.0.5:7700 --conductor 10.0.0.5:7800

        mooncache doctor --json | jq '.checks[] | select(.status == "fail")'
    """
    began_s = time.monotonic()
    with AskingView(console, quiet=json or steps) as progress:
        facts = asyncio.run(gather(where, write_step if steps else progress.tell))
    found = groups(facts)
    elapsed_s = time.monotonic() - began_s
    results = [(name, result) for name, inside in found.items() for result in inside]
    if json:
        print_json(
            {
                "checks": [
                    {**result._asdict(), "group": name, "status": str(result.status)}
                    for name, result in results
                ],
                "hosts": _hosts(facts),
                "elapsed_s": round(elapsed_s, 3),
            }
        )
    else:
        show(console, found, elapsed_s, verbose=verbose)
    return EXIT_MISS if any(result.status is Status.FAIL for _, result in results) else EXIT_OK


def _hosts(facts: Facts) -> dict[str, object]:
    import msgspec

    return {name: msgspec.to_builtins(host) for name, host in facts.hosts.items()}
