"""`mooncache conformance`: try the promises that a KV store or an engine should keep, and judge."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from mooncache.cli.common import AsJson
from mooncache.cli.conformance_progress import conformance_progress
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, print_json

if TYPE_CHECKING:
    from mooncache.conformance.core.verdicts import ConformanceReport
    from mooncache.conformance.runner import TryProgress

_WHAT = Group("What is tried", sort_key=10)
_HOW = Group("How", sort_key=20)
StoreName = Annotated[
    str | None, Parameter(group=_WHAT, help="A store: package.module:Class, or pool, or mooncake-store.")
]
EngineUrl = Annotated[
    str | None,
    Parameter(group=_WHAT, help="An engine: the URL of its OpenAI-compatible API, or of a gateway."),
]
ConnectorName = Annotated[
    str | None, Parameter(group=_WHAT, help="A KV connector of vLLM: package.module:Class, or mooncache.")
]
SettingPairs = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        negative=(),
        group=_WHAT,
        help="name=value of the store's configuration, of how the engine is asked, or of the connector "
        "(connector.NAME=value), its engines and their environment (env.NAME=value); several times.",
    ),
]


def conformance(
    *,
    store: StoreName = None,
    engine: EngineUrl = None,
    connector: ConnectorName = None,
    settings: SettingPairs = None,
    only: Annotated[
        list[str] | None,
        Parameter(negative=(), group=_HOW, help="A promise or a family, by name; several times."),
    ] = None,
    rounds: Annotated[int, Parameter(group=_HOW, help="Work for each promise, as a multiple.")] = 1,
    seed: Annotated[
        int | None, Parameter(group=_HOW, help="Repeats a run: its sizes, bytes, damaged bits and orders.")
    ] = None,
    report: Annotated[
        Path | None, Parameter(group=_HOW, help="Write what was found as a page, for a browser.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Try what any KV store, engine or connector should promise, on one of yours or ours.

    Each promise is passed, failed, or not applicable with the reason. The exit code is 0 when none was broken, 1 when
    one was. docs/conformance.md has the promises, and what a class needs to be tried. An engine is only asked: greedy
    answers of prompts that were loaded are compared with those of prompts that were computed. A connector is tried
    in engines of vLLM that are started for the run, killed in it, and removed; this takes minutes.

    A pool of two nodes that is started for the run, broken, and removed:

        mooncache conformance --store pool --report conformance.html

    The pool that runs on this machine (nothing in it is broken):

        mooncache conformance --store pool --set state_dir=~/.mooncache

    Your store, with its configuration, and one family of promises alone:

        mooncache conformance --store mypackage.kv:Store --set url=tcp://10.0.0.5 --only bytes

    The engines behind the gateway of this machine, or any other engine:

        mooncache conformance --engine http://127.0.0.1:8000 --set api_key_file=~/.mooncache/demo.key

    Our connector of vLLM, in engines and on a pool that are started for the run:

        mooncache conformance --connector mooncache --report conformance.html
    """
    from mooncache.errors import InvalidArgument

    if sum(subject is not None for subject in (store, engine, connector)) != 1:
        raise InvalidArgument(
            "Say what is to be tried: --store package.module:Class, --engine URL, or --connector package.module:Class."
        )
    if not 1 <= rounds <= 1000:
        raise InvalidArgument(f"--rounds: {rounds} must be between 1 and 1000.")
    seed = seed if seed is not None else secrets.randbelow(1_000_000)
    with conformance_progress(quiet=json) as progress:
        attempt = _Attempt(_configuration(settings or ()), only or (), rounds, seed, progress)
        if store is not None:
            found = attempt.on_store(store)
        elif connector is not None:
            found = attempt.on_connector(connector)
        else:
            found = attempt.on_engine(engine or "")
    return _finish(found, report, as_json=json)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How whatever is named is tried."""

    config: dict[str, Any]
    only: Sequence[str]
    rounds: int
    seed: int
    progress: TryProgress

    def on_store(self, name: str) -> ConformanceReport:
        from mooncache.conformance.store_contract import class_named
        from mooncache.conformance.store_run import try_store
        from mooncache.conformance.stores import OWN_STORES

        make = class_named(OWN_STORES.get(name, name))
        self.progress.work(f"starting {name}")
        store = make(self.config)
        try:
            return try_store(store, name, self.seed, self.rounds, self.only, self.progress)
        finally:
            store.close()

    def on_engine(self, url: str) -> ConformanceReport:
        from mooncache.conformance.engine_run import try_engine
        from mooncache.conformance.engine_target import EngineSettings

        settings = EngineSettings.of(self.config)
        return try_engine(url, settings, self.seed, self.rounds, self.only, self.progress)

    def on_connector(self, name: str) -> ConformanceReport:
        from mooncache.conformance.connector_run import try_connector
        from mooncache.conformance.connector_settings import ConnectorConfig

        config = ConnectorConfig.of(self.config)
        return try_connector(name, config, self.seed, self.rounds, self.only, self.progress)


def _configuration(settings: Sequence[str]) -> dict[str, Any]:
    """name=value pairs; a value that is a TOML literal (3, true) is read as that, others are text."""
    import tomllib

    from mooncache.errors import InvalidArgument

    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--set: {setting!r} is not name=value.")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, KeyError):
            found[name] = text
    return found


def _finish(found: ConformanceReport, page: Path | None, *, as_json: bool) -> int:
    from mooncache.conformance.core.verdicts import PromiseOutcome

    if page is not None:
        _write_page(page, found)
    if as_json:
        print_json(_document(found))
    else:
        counts = ", ".join(f"{found.count(outcome)} {outcome}" for outcome in PromiseOutcome)
        word = "Every promise that could be tried was kept" if found.kept else "A promise was broken"
        if not found.kept and not found.count(PromiseOutcome.FAIL):
            word = "Nothing was tried"
        console.print(f"{word}: {counts}. The same again: --seed {found.seed}", markup=False, highlight=False)
    return EXIT_OK if found.kept else EXIT_MISS


def _write_page(path: Path, found: ConformanceReport) -> None:
    from mooncache.conformance.report_page import conformance_page
    from mooncache.errors import InvalidArgument

    try:
        path.write_text(conformance_page(found), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--report: {path} cannot be written: {error.strerror}.") from None


def _document(found: ConformanceReport) -> dict[str, Any]:
    return {
        "subject": found.subject,
        "kept": found.kept,
        "seed": found.seed,
        "seconds": round(found.seconds, 1),
        "promises": [
            {
                "name": each.promise.name,
                "family": each.promise.family,
                "promise": each.promise.sentence,
                "verdict": each.outcome,
                "seen": each.seen,
                "seconds": round(each.seconds, 2),
            }
            for each in found.verdicts
        ],
    }
