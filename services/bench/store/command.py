"""The command `mooncache bench store`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from mooncache.bench.delivery import deliver
from mooncache.bench.store import CASES, StoreBenchOptions, run
from mooncache.reporting.rows import JsonRows, MarkdownRows


def store(
    *,
    peer: Annotated[
        Literal["mooncake"] | None,
        Parameter(help="Measure the original beside it (extra [bench])."),
    ] = None,
    peer_build: Annotated[
        Path | None,
        Parameter(
            help="Folder with another build of the original (pip install --no-deps --target FOLDER …)."
        ),
    ] = None,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    repeats: Annotated[int, Parameter(help="Rounds over all systems; medians are printed. At least 5.")] = 9,
    only: Annotated[
        tuple[str, ...], Parameter(help=f"Run only these cases: {', '.join(CASES)}.", negative=())
    ] = (),
    quick: Annotated[
        bool, Parameter(negative=(), help="Less data: takes about a minute; the figures are not comparable.")
    ] = False,
) -> int:
    """Measure this machine's pool: bytes, small blocks, chains of keys, the index, a rebuild, memory, eviction.

    A client process and store-node processes on loopback, beside a raw socket copy, memcpy and, with --peer, the
    original's store. The case `dropin` makes the same calls of the original's Python API on both. What matters are
    the ratios. Takes several minutes.

    For example:

        mooncache bench store --peer mooncake --json store.json

        mooncache bench store --only batch --only small --quick

        mooncache bench store --only dropin --peer mooncake --peer-build ./original-0.3.14
    """
    console = Console()
    unknown = [name for name in only if name not in CASES]
    if unknown or repeats < 5:
        console.print(
            f"There is no case {unknown[0]!r}; the cases are: {', '.join(CASES)}."
            if unknown
            else "--repeats must be at least 5: fewer say nothing about a noisy machine.",
            style="red",
        )
        return 2
    options = StoreBenchOptions(peer=peer, peer_build=peer_build, repeats=repeats)
    if quick:
        options = options.quick()
    if peer is not None:
        from mooncache.bench.store.peer_mooncake import unavailable_reason

        reason = unavailable_reason(peer_build)
        if reason is not None:
            console.print(reason, style="red")
            return 2
    return deliver(lambda progress: run(options, progress, only or CASES), json, markdown)
