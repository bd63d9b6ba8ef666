"""Places in an engine's queue: online before offline, by priority, then by arrival; and nothing starves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts.core.api_key import KeyScope
from mooncache.accounts.core.request_limits import PRIORITY_MAX
from mooncache.accounts.key_store import create_key
from mooncache.accounts.limit_store import change_limits
from mooncache.gateway.core.queue_place import OFFLINE_S, PRIORITY_S, queue_place
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.gateway.stand_in import Bench, FakeEngine, running
from tests.gateway.test_two_legs import CHAT, two_legs

NOW_S = 1.8e9
ARRIVALS = st.floats(0, 300).map(lambda after_s: round(NOW_S + after_s, 3))
PRIORITIES = st.integers(-(1 << 31), (1 << 31) - 1)


def test_who_goes_first() -> None:
    online = queue_place(NOW_S)
    assert queue_place(NOW_S + 0.001) == online + 1
    assert queue_place(NOW_S - 59, offline=True) > online
    assert queue_place(NOW_S - 61, offline=True) < online, "a minute was enough"
    assert queue_place(NOW_S + 4, priority=1) < online < queue_place(NOW_S + 6, priority=1)
    assert queue_place(NOW_S - 4, priority=-1) > online > queue_place(NOW_S - 6, priority=-1)
    assert queue_place(NOW_S, priority=1 << 30) == queue_place(NOW_S, priority=PRIORITY_MAX)


@given(ARRIVALS, ARRIVALS, PRIORITIES, PRIORITIES, st.booleans(), st.booleans())
def test_nothing_starves(
    came_s: float, later_s: float, priority: int, other: int, offline: bool, other_offline: bool
) -> None:
    """Whatever comes long enough after a request stands behind it."""
    most_s = OFFLINE_S + 2 * PRIORITY_S * PRIORITY_MAX
    mine = queue_place(came_s, priority=priority, offline=offline)
    assert mine < queue_place(came_s + most_s + 1, priority=other, offline=other_offline)
    assert 0 < mine < 1 << 53, "a number that JSON keeps in every language"
    if came_s < later_s:
        assert mine < queue_place(later_s, priority=priority, offline=offline)


async def places(
    bench: Bench, http: aiohttp.ClientSession, key: str, **more: Any
) -> tuple[int | None, int | None]:
    """What the prefill and the decode leg of one request said."""
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(bench.url + "/v1/chat/completions", json=CHAT | more, headers=headers) as response:
        assert response.status == 200, await response.text()
    prefill, decode = (bench.engines[name].requests[-1].get("priority") for name in ("p1", "d1"))
    return prefill, decode


async def test_only_engines_that_order_by_it_get_a_place_and_no_client_names_its_own(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        tenant, operator = bench.key("alice"), bench.gateway.token.text
        assert await places(bench, http, tenant, priority=-5) == (None, None)
        plan: pb.ScheduleResponse = bench.plan("d1", "p1")
        plan.decode.orders_by_priority = True
        bench.conductor.plans = [plan]
        prefill, decode = await places(bench, http, tenant, priority=-1000)
        assert prefill is None
        assert decode is not None
        now_ms = bench.gateway.state.clock.wall_s() * 1e3
        assert now_ms - 60_000 < decode <= now_ms, "as it came, whatever the client says"
        plan.prefill.orders_by_priority = True
        assert len(set(await places(bench, http, tenant))) == 1, "both legs have one place"
        _, first = await places(bench, http, operator, priority=4)
        assert first is not None
        assert first < decode, "the cluster token may say so"


async def test_a_tenant_and_its_keys_have_the_priority_that_was_set(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with two_legs(tmp_path, tokenizer_folder) as bench:
        state = bench.gateway.state
        plan: pb.ScheduleResponse = bench.plan("d1", "p1")
        plan.decode.orders_by_priority = True
        bench.conductor.plans = [plan]
        place = state.config.cluster.accounts_place
        assert isinstance(place, Path)
        text, record = create_key(
            place, "alice", [KeyScope.INFERENCE], created_s=int(state.clock.wall_s()), created_by="test"
        )
        change_limits(place, "alice", "", {"priority": 4})
        change_limits(place, "alice", record.key_id, {"priority": -4})
        await until(lambda: state.keyring.priority_of("alice", record.key_id) == -4)
        await until(lambda: state.keyring.end_of(record.key_id) is None)
        came = [
            (await places(bench, http, key, priority=asked))[1]
            for key, asked in ((text, 4), (bench.key("bob"), 4), (bench.key("alice"), -4))
        ]
        slow, normal, fast = (each for each in came if each is not None)
        assert fast < normal < slow, (
            "each came later than the one before, and what a client asks for counts nothing"
        )
        assert [asked.priority for asked in bench.conductor.scheduled] == [-4, 0, 4], "admission has it, too"


async def test_without_a_conductor_a_leg_has_a_place_too(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    engines = [FakeEngine("e")]
    for orders in (True, False):
        async with running(tmp_path / str(orders), engines, instance={"orders_by_priority": orders}) as bench:
            await bench.conductor.stop()
            body, headers = CHAT | {"priority": -1000}, bench.auth()
            async with http.post(bench.url + "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                assert response.headers["x-mooncache-decision"] == "unscheduled"
            now_ms = bench.gateway.state.clock.wall_s() * 1e3
        place = engines[0].requests[-1].get("priority")
        assert (place is not None and now_ms - 60_000 < place <= now_ms) if orders else place is None
