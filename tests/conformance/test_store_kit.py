"""The kit finds nothing wrong in stores that keep their promises, and finds each planted lie where it belongs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mooncache.conformance import runner
from mooncache.conformance.core.content import content_of, neighbours, odd_keys, version_of
from mooncache.conformance.core.verdicts import PromiseOutcome, chosen
from mooncache.conformance.store_contract import class_named
from mooncache.conformance.store_promises import STORE_PROMISES, failure
from mooncache.conformance.store_run import try_store
from mooncache.errors import InvalidArgument
from tests.conformance import stores

SEED = 11
LIES: dict[type[Any], str] = {
    stores.IgnoresTheLastByteOfKeys: "near-keys",
    stores.EndsKeysAtAZero: "odd-keys",
    stores.CutsLongKeys: "odd-keys",
    stores.LosesTheLastByte: "round-trip",
    stores.ReadsEmptyAsZero: "empty-value",
    stores.ReportsHalfAsWhole: "bounds",
    stores.RemovesForItselfOnly: "removed",
    stores.ShowsWhatIsNotCommitted: "unfinished",
    stores.WritesInPlace: "dead-writer",
    stores.KeepsTheCallersBuffer: "reused-source",
    stores.WritesLate: "settled-destination",
    stores.MixesValues: "change-while-read",
    stores.EvictsUnderReaders: "eviction",
    stores.HoldsMoreThanItSays: "eviction",
    stores.LosesAPutNowAndThen: "mixed-load",
    stores.TakesWhatCannotFit: "too-large",
    stores.AnswersWhileStopped: "stopped-node",
    stores.HangsWhileStopped: "stopped-node",
    stores.NeverComesBack: "killed-node",
    stores.ComparesNoChecksum: "flipped-bits",
}


def make(kind: type[Any], folder: Path, **more: Any) -> Any:
    return kind({"folder": str(folder / "store"), "capacity": 8 << 20, **more})


def test_every_promise_has_a_planted_lie() -> None:
    """But for two: a store that mixes writers and one without checksums break them too, as is tested below."""
    also = {"racing-writers", "truncated"}
    assert {promise.name for promise in STORE_PROMISES} == set(LIES.values()) | also


def test_an_honest_store_keeps_every_promise(tmp_path: Path) -> None:
    report = try_store(make(stores.FileStore, tmp_path), "files", SEED)
    assert report.kept
    assert {each.promise.name: each.seen for each in report.verdicts if each.outcome != "pass"} == {}
    assert len(report.verdicts) == len(STORE_PROMISES)


def test_without_hooks_promises_are_not_applicable_with_the_reason(tmp_path: Path) -> None:
    report = try_store(make(stores.BareStore, tmp_path), "bare", SEED)
    assert report.kept
    left = {each.promise.name: each.seen for each in report.verdicts if each.outcome != "pass"}
    assert left.pop("dead-writer") == "the store has no hook attach_config()"
    assert set(left) == {
        *("unfinished", "eviction", "too-large", "stopped-node", "killed-node", "flipped-bits", "truncated")
    }
    assert all("no hook" in seen for seen in left.values())


@pytest.mark.parametrize("kind", LIES, ids=lambda kind: kind.__name__)
def test_a_lie_is_found(kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "RECOVERY_S", 1.0)
    report = try_store(make(kind, tmp_path), kind.__name__, SEED, 2, [LIES[kind]])
    assert not report.kept
    assert [each.outcome for each in report.verdicts] == [PromiseOutcome.FAIL], report.verdicts[0].seen


def test_a_mix_of_writers_is_found(tmp_path: Path) -> None:
    report = try_store(make(stores.MixesValues, tmp_path), "mix", SEED, 1, ["racing-writers"])
    assert report.verdicts[0].outcome is PromiseOutcome.FAIL


def test_a_cut_value_is_found(tmp_path: Path) -> None:
    report = try_store(make(stores.ComparesNoChecksum, tmp_path), "cut", SEED, 1, ["truncated"])
    assert report.verdicts[0].outcome is PromiseOutcome.FAIL


def test_a_store_that_always_misses_keeps_nothing(tmp_path: Path) -> None:
    class Forgets(stores.BareStore):
        def get(self, key: bytes) -> bytes | None:
            return None

    only = [
        "near-keys",
        "odd-keys",
        "round-trip",
        "removed",
        "change-while-read",
        "mixed-load",
        "racing-writers",
    ]
    report = try_store(make(Forgets, tmp_path), "forgets", SEED, only=only)
    assert {each.outcome for each in report.verdicts} == {PromiseOutcome.FAIL}


def test_damage_that_changes_nothing_shows_nothing(tmp_path: Path) -> None:
    class Unharmed(stores.FileStore):
        def damage(self, rng: object) -> int:
            return 7

    report = try_store(make(Unharmed, tmp_path), "unharmed", SEED, only=["flipped-bits"])
    assert report.verdicts[0].outcome is PromiseOutcome.FAIL
    assert "nothing is shown" in report.verdicts[0].seen


def test_a_try_that_hangs_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Hangs(stores.BareStore):
        def get(self, key: bytes) -> bytes | None:
            over.wait()
            return None

    monkeypatch.setattr(runner, "TRY_S", 0.2)
    report = try_store(make(Hangs, tmp_path), "hangs", SEED, only=["near-keys", "odd-keys"])
    over.set()
    first, second = report.verdicts
    assert (first.outcome, second.outcome) == (PromiseOutcome.FAIL, PromiseOutcome.NOT_APPLICABLE)
    assert "near-keys hangs" in second.seen


def test_names_choose_promises_and_families() -> None:
    promises = list(STORE_PROMISES)
    assert [each.name for each in chosen(promises, ["identity"])] == ["near-keys", "odd-keys"]
    assert [each.name for each in chosen(promises, ["removed", "bounds"])] == ["bounds", "removed"]
    with pytest.raises(InvalidArgument, match="near-keys"):
        chosen(promises, ["near"])


def test_classes_are_named(tmp_path: Path) -> None:
    made = class_named("tests.conformance.stores:BareStore")({})
    assert isinstance(made, stores.BareStore)
    for name, why in (
        ("tests.conformance.stores", "package.module:Class"),
        ("tests.no_such:X", "cannot be imported"),
        ("tests.conformance.stores:Nothing", "cannot be imported"),
        ("tests.conformance.stores:PartialFile", "no put, get"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            class_named(name)


def test_content_tells_keys_and_versions_apart() -> None:
    keys = odd_keys(b"x/")
    assert len(set(keys)) == len(keys)
    assert len({content_of(key, 8) for key in keys}) == len(keys)
    assert len({content_of(b"k", 64, version) for version in range(50)}) == 50
    assert version_of(content_of(b"k", 64, 3), b"k", 64, range(5)) == 3
    assert version_of(content_of(b"k", 64, 3)[:63] + b"\0", b"k", 64, range(5)) is None
    near = neighbours(b"abc", b"abcd")
    assert near == [b"bbc", b"acc", b"abd"]
