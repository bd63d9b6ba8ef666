"""A whole run on an engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from mooncache.conformance.core.verdicts import ConformanceReport
from mooncache.conformance.engine_bench import EngineBench
from mooncache.conformance.engine_promises import ENGINE_PROMISES
from mooncache.conformance.engine_target import EngineSettings, EngineTarget
from mooncache.conformance.runner import TryProgress, try_all


def try_engine(
    url: str,
    settings: EngineSettings,
    seed: int,
    rounds: int = 1,
    only: Sequence[str] = (),
    progress: TryProgress | None = None,
) -> ConformanceReport:
    """Try the promises with these names, or all, on the engine at a URL. It is only asked, and never stopped.

    Raises:
        InvalidArgument: no engine answers there, or a name that no promise has.
    """
    shown_to = progress or TryProgress()
    engine = EngineTarget(url, settings)
    reference = EngineTarget(settings.reference, settings) if settings.reference else None
    bench = EngineBench(engine, secrets.token_hex(4), seed, rounds, shown_to, reference)
    return try_all(f"{engine.model} at {url}", seed, bench, ENGINE_PROMISES, only, shown_to)
