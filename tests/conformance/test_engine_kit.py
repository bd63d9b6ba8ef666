"""The kit finds nothing wrong in an engine that keeps its promises, and finds each planted lie where it belongs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mooncache.conformance.core.verdicts import ConformanceReport, PromiseOutcome
from mooncache.conformance.engine_promises import ENGINE_PROMISES, failure
from mooncache.conformance.engine_run import try_engine
from mooncache.conformance.engine_target import EngineSettings, EngineTarget
from mooncache.errors import InvalidArgument
from tests.conformance import engines

SEED = 5
LIES: dict[type[engines.Engine], str] = {
    engines.LoadsWrongBytes: "loaded",
    engines.LosesTheTailOfALongPrompt: "turns",
    engines.StreamsAnotherAnswer: "streamed",
    engines.CountsTooMuch: "counted",
    engines.IgnoresAWord: "near-prompts",
    engines.SharesOverSalts: "salts",
    engines.SharesOverTenants: "tenants",
    engines.SavesWhatWasCutOff: "aborted",
    engines.ReusesEvictedBlocks: "many-prompts",
    engines.MixesConcurrentRequests: "mixed-load",
    engines.FailsOnBadRequests: "bad-requests",
    engines.TakesBadRequests: "bad-requests",
    engines.AnswersWronglyWhileBroken: "broken-cache",
    engines.NeverRecovers: "broken-cache",
}


def tried(engine: engines.Engine, folder: Path, *only: str, **settings: Any) -> ConformanceReport:
    keys = {}
    for name in ("api_key_file", "other_key_file"):
        path = folder / name
        path.write_text(f"key of {name}\n")
        keys[name] = str(path)
    with engines.serving(engine) as url:
        look = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1]).read()"
        commands = {
            f"{word}_command": f'{sys.executable} -c "{look}" {url}/broken/{state}'
            for word, state in (("break", "yes"), ("mend", "no"))
        }
        chosen = EngineSettings.of({**keys, **commands, "call_limit_s": 10, **settings})
        return try_engine(url, chosen, SEED, only=only)


def test_every_promise_has_a_planted_lie() -> None:
    """But for one: an engine that is not greedy cannot be compared, as is tested below."""
    assert {promise.name for promise in ENGINE_PROMISES} == {*LIES.values(), "repeatable"}


def test_an_honest_engine_keeps_every_promise(tmp_path: Path) -> None:
    report = tried(engines.Engine(), tmp_path)
    assert {each.promise.name: each.seen for each in report.verdicts if each.outcome != "pass"} == {}
    assert report.kept and len(report.verdicts) == len(ENGINE_PROMISES)


@pytest.mark.parametrize("kind", LIES, ids=lambda kind: kind.__name__)
def test_a_lie_is_found(kind: type[engines.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "RECOVERY_S", 1.0)
    report = tried(kind(), tmp_path, LIES[kind])
    assert [each.outcome for each in report.verdicts] == [PromiseOutcome.FAIL], report.verdicts[0].seen


def test_an_engine_that_caches_nothing_shows_nothing(tmp_path: Path) -> None:
    class Forgets(engines.Engine):
        def load(self, name: str) -> str | None:
            return None

    report = tried(Forgets(), tmp_path, "loaded", "turns", "salts", "tenants")
    assert {each.outcome for each in report.verdicts} == {PromiseOutcome.NOT_APPLICABLE}
    assert not report.kept


def test_an_engine_that_is_not_greedy_is_not_judged(tmp_path: Path) -> None:
    report = tried(engines.NeverTheSame(), tmp_path, "repeatable", "loaded")
    assert {each.outcome for each in report.verdicts} == {PromiseOutcome.NOT_APPLICABLE}
    assert all("cannot be compared" in each.seen for each in report.verdicts)


def test_an_engine_with_one_answer_for_all_is_not_judged(tmp_path: Path) -> None:
    class Mumbles(engines.Engine):
        def answer(self, key: str, body: dict[str, Any]) -> tuple[list[str], int, int]:
            words, prompt, loaded = super().answer(key, body)
            return [" um"] * len(words), prompt, loaded

    report = tried(Mumbles(), tmp_path, "near-prompts")
    assert report.verdicts[0].outcome is PromiseOutcome.NOT_APPLICABLE
    assert "alike" in report.verdicts[0].seen


def test_without_salts_another_engine_tells_the_truth(tmp_path: Path) -> None:
    class KnowsNoSalt(engines.LoadsWrongBytes):
        def scope(self, key: str, salt: str) -> str:
            return key

    with engines.serving(engines.Engine()) as reference:
        report = tried(KnowsNoSalt(), tmp_path, "loaded", reference=reference)
    assert report.verdicts[0].outcome is PromiseOutcome.FAIL
    report = tried(KnowsNoSalt(), tmp_path, "loaded")
    assert report.verdicts[0].outcome is PromiseOutcome.NOT_APPLICABLE
    assert "reference" in report.verdicts[0].seen


def test_without_commands_and_keys_promises_are_not_applicable(tmp_path: Path) -> None:
    report = tried(
        engines.Engine(),
        tmp_path,
        "tenants",
        "broken-cache",
        other_key_file="",
        break_command="",
        mend_command="",
    )
    assert {each.outcome for each in report.verdicts} == {PromiseOutcome.NOT_APPLICABLE}
    assert all("--set" in each.seen for each in report.verdicts)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"colour": "red"}, "no setting colour"),
        ({"many": "lots"}, "is no int"),
        ({"many": True}, "is no int"),
        ({"max_tokens": 0}, "above 0"),
    ],
)
def test_wrong_settings_are_explained(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        EngineSettings.of(settings)


def test_wrong_urls_are_explained(tmp_path: Path) -> None:
    for url, why in (("127.0.0.1:1", "no URL"), ("http://127.0.0.1:1", "names no model")):
        with pytest.raises(InvalidArgument, match=why):
            EngineTarget(url, EngineSettings())
    with pytest.raises(InvalidArgument, match="cannot be read"):
        EngineTarget("http://127.0.0.1:1", EngineSettings(api_key_file=str(tmp_path / "none")))
