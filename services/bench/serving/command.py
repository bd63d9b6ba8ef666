"""The command `mooncache bench serving`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import Parameter

from mooncache.bench.delivery import deliver
from mooncache.reporting.rows import JsonRows, MarkdownRows, Report


def serving(
    case: Annotated[Literal["turns", "soak"], Parameter(help="turns of a conversation, or a soak.")],
    *,
    engine: Annotated[Literal["vllm", "hf"], Parameter(help="Which engine.")] = "hf",
    model: Annotated[
        str, Parameter(help="Folder of a model; empty builds a small one with random weights.")
    ] = "",
    talks: Annotated[int, Parameter(help="turns: conversations; medians are printed.")] = 5,
    turn_tokens: Annotated[int, Parameter(help="turns: tokens that each turn adds, roughly.")] = 400,
    streams: Annotated[int, Parameter(help="soak: concurrent streams.")] = 64,
    seconds: Annotated[float, Parameter(help="soak: seconds of load.")] = 300.0,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
) -> int:
    """Measure a whole cluster on this machine: gateway, conductor, engines, pool.

    For example:

        mooncache bench serving turns --engine vllm

        mooncache bench serving soak --streams 64 --seconds 300
    """
    from mooncache.bench.serving import soak, turns
    from mooncache.cluster.settings import EngineKind

    def measure(progress: Callable[[str], None]) -> Report:
        if case == "turns":
            return turns.run(turns.TurnsOptions(EngineKind(engine), model, turn_tokens, talks), progress)
        return soak.run(soak.SoakOptions(EngineKind(engine), model, streams, seconds), progress)

    return deliver(measure, json, markdown)
