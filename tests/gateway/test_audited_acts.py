"""An act on the console whose caller leaves: it is done to its end, counted so long, and kept as what it was."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncache.accounts.audit_log import lines
from mooncache.accounts.core.audit import AuditEntry, read_entry
from mooncache.errors import LimitExceeded, MooncacheError, NotFound
from mooncache.gateway.console.acts import ACTS_MAX, AuditedActs
from mooncache.gateway.shell.key_changes import look_for_keys
from mooncache.runtime.clock import SystemClock
from tests.conditions import until


def kept(place: Path) -> list[AuditEntry]:
    return [each for line in lines(place) if (each := read_entry(line)) is not None]


async def test_who_leaves_does_not_end_an_act(tmp_path: Path) -> None:
    acts, goes_on, begun = AuditedActs(SystemClock(), tmp_path), threading.Event(), asyncio.Semaphore(0)

    async def work() -> int:
        begun.release()
        await asyncio.to_thread(goes_on.wait)
        return 1

    try:
        calls = [
            asyncio.create_task(acts.run(("key create", f"{number}"), "me", {}, work))
            for number in range(ACTS_MAX)
        ]
        for _ in calls:
            await begun.acquire()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        with pytest.raises(LimitExceeded):  # their threads still work
            await acts.run(("key create", "more"), "me", {}, work)
    finally:
        goes_on.set()
    await acts.close()
    assert sorted((*each.arguments, each.result) for each in kept(tmp_path)) == [
        (str(number), "OK") for number in range(ACTS_MAX)
    ]
    assert (await acts.run(("key create", "more"), "me", {}, work))[0] == 1


@pytest.mark.parametrize(
    ("error", "result"), [(NotFound("no key"), "NOT_FOUND"), (ZeroDivisionError(), "INTERNAL")]
)
async def test_what_an_act_raises_is_kept(tmp_path: Path, error: Exception, result: str) -> None:
    acts = AuditedActs(SystemClock(), tmp_path)

    async def work() -> None:
        raise error

    with pytest.raises((MooncacheError, ZeroDivisionError)):
        await acts.run(("key revoke", "0" * 16), "me", {}, work)
    assert [each.result for each in kept(tmp_path)] == [result]


async def test_a_look_at_keys_is_alone_until_its_thread_ends() -> None:
    goes_on = threading.Event()
    looks: list[int] = []

    class SlowKeyring:
        unconfirmed_s = 0.0

        def refresh(self) -> bool:
            looks.append(len(looks))
            if len(looks) == 1:
                goes_on.wait()
            return False

        def end_of(self, key_id: str) -> float:
            raise AssertionError(key_id)

    state = cast(
        "Any",
        SimpleNamespace(
            keyring=SlowKeyring(),
            keyed=SimpleNamespace(end=lambda end_of: {}),
            key_look=asyncio.Lock(),
            accounts_lost=False,
        ),
    )
    try:
        first = asyncio.create_task(look_for_keys(state))
        await until(lambda: bool(looks))
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled() and state.key_look.locked(), "its thread still reads"
        second = asyncio.create_task(look_for_keys(state))
    finally:
        goes_on.set()
    await second
    assert looks == [0, 1]
