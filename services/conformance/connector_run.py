"""A whole run on a connector of vLLM."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from functools import partial

from mooncache.conformance.connector_bench import ConnectorBench, ConnectorEngines, Damage
from mooncache.conformance.connector_promises import CONNECTOR_PROMISES, ConnectorTry
from mooncache.conformance.connector_settings import ConnectorConfig
from mooncache.conformance.core.verdicts import ConformanceReport
from mooncache.conformance.engine_promises.failure import run_command
from mooncache.conformance.own_connector import OWN_CONNECTOR, OwnConnector
from mooncache.conformance.runner import TryProgress, try_all


def try_connector(
    name: str,
    config: ConnectorConfig,
    seed: int,
    rounds: int = 1,
    only: Sequence[str] = (),
    progress: TryProgress | None = None,
) -> ConformanceReport:
    """Try the promises with these names, or all. Engines are started for the run, killed in it, and removed.

    Args:
        name: `package.module:Class`, or `mooncache`: our own, with a pool that is started and broken.

    Raises:
        InvalidArgument: vLLM or the connector cannot be started, or a name that no promise has.
    """
    shown_to = progress or TryProgress()
    command = config.vllm.damage_command
    damage: Damage | None = (lambda _rng: _after_command(command)) if command else None
    with contextlib.ExitStack() as closing:
        connector = name
        if name == OWN_CONNECTOR:
            shown_to.work("starting a pool")
            own = closing.enter_context(contextlib.closing(OwnConnector()))
            connector, damage = own.connector, damage or own.damage
            config = own.completed(config)
        shown_to.work("starting vLLM, with the connector and without")
        engines = closing.enter_context(contextlib.closing(ConnectorEngines(connector, config)))
        bench = ConnectorBench(
            engines.target,
            secrets.token_hex(4),
            seed,
            rounds,
            shown_to,
            engines.reference,
            engines=engines,
            damage=damage,
        )
        promises = {text: partial(_try_served, tries) for text, tries in CONNECTOR_PROMISES.items()}
        return try_all(name, seed, bench, promises, only, shown_to)


def _try_served(tries: ConnectorTry, bench: ConnectorBench) -> str:
    """A try of a promise; an engine that an earlier one has ended is started again, for it to be judged by itself."""
    if not bench.engines.server.serves():
        bench.restart()
    return tries(bench)


def _after_command(command: str) -> str:
    """Raises NotOfferedError."""
    run_command(command)
    return "by the command some"
