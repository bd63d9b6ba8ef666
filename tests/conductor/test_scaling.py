"""How many instances a model needs, and KEDA's external scaler over real gRPC, which tells it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from mooncache.conductor.core.scaling import NeedsKeeper, WorkTotals, needs_now
from mooncache.errors import ConfigInvalid
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.keda import external_scaler_pb2 as keda
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.conductor.fleets import Row, fleet
from tests.conductor.support import Conductor, chain, config_at, instance, pair, running, serve

BOTH, PREFILL, DECODE = InstanceRole.BOTH, InstanceRole.PREFILL, InstanceRole.DECODE
IDLE = WorkTotals()
ON = {"conductor.scaler_enabled": True, "conductor.scaler_port": 0}

# --- what is needed


def test_an_idle_model_needs_nothing() -> None:
    rows = (Row("p"), Row("d", "decode"), Row("b", "both"))
    found = needs_now(fleet(*rows), IDLE, 1.0)
    assert (found.prefill, found.decode, found.both) == (0.0, 0.0, 0.0)


def test_prompts_that_are_asked_for_need_their_computing_time() -> None:
    one = fleet(Row("p"), Row("d", "decode"))
    assert needs_now(one, WorkTotals(1.5, 1.5), 1.0).prefill == pytest.approx(
        2.0
    )  # three quarters of an instance's time
    queued = fleet(Row("p", queue_s=60.0), Row("d", "decode"))
    assert needs_now(queued, IDLE, 1.0).prefill == pytest.approx(2.0)  # to be worked off in half a minute


def test_answers_need_memory_and_places() -> None:
    room = {"kv_capacity_tokens": 1000.0, "sequences_max": 100.0}
    full = fleet(Row("p"), Row("d", "decode", kv_tokens=1700.0, sequences=2.0, **room))
    assert needs_now(full, IDLE, 1.0).decode == pytest.approx(2.0)
    many = fleet(Row("p"), Row("d", "decode", kv_tokens=10.0, sequences=170.0, **room))
    assert needs_now(many, IDLE, 1.0).decode == pytest.approx(2.0)


def test_what_runs_is_needed_also_on_instances_that_drain() -> None:
    row = Row("d", "decode", ready=False, kv_tokens=1700.0, sequences=2.0, kv_capacity_tokens=1000.0)
    assert needs_now(fleet(Row("p"), row), IDLE, 1.0).decode == pytest.approx(2.0)


def test_an_instance_that_does_both_is_needed_for_both() -> None:
    row = Row("b", "both", kv_tokens=850.0, sequences=1.0, kv_capacity_tokens=1000.0)
    assert needs_now(fleet(row), WorkTotals(0.75, 0.0, 0.75), 1.0).both == pytest.approx(2.0)


def test_a_side_without_an_instance_is_needed_when_there_is_load() -> None:
    alone = fleet(Row("p"))
    assert needs_now(alone, IDLE, 1.0).decode == 0.0
    assert needs_now(alone, WorkTotals(0.3), 1.0).decode == 1.0


def test_prompts_that_generating_instances_compute_need_no_prefill_instance() -> None:
    found = needs_now(fleet(Row("p"), Row("d", "decode")), WorkTotals(1.5, 0.0, 1.5), 1.0)
    assert (found.prefill, found.decode) == (0.0, pytest.approx(2.0))


def test_refused_requests_count() -> None:
    found = needs_now(fleet(Row("p"), Row("d", "decode")), WorkTotals(3.0, 0.75), 1.0)
    assert found.prefill == pytest.approx(4.0)


def test_load_that_stays_is_followed_within_a_minute_or_two() -> None:
    keeper, one = NeedsKeeper(1.0, hold_s=0.0), fleet(Row("p"), Row("d", "decode"))
    needs = [keeper.look("m", one, WorkTotals(1.5 * t, 1.5 * t), float(t)).prefill for t in range(121)]
    assert needs[0] == 0.0
    assert needs[20] > 0.9
    assert needs[120] == pytest.approx(2.0, rel=0.03)


def test_the_largest_need_within_the_time_counts() -> None:
    keeper = NeedsKeeper(1.0, hold_s=60.0)
    busy, idle = fleet(Row("p", queue_s=90.0), Row("d", "decode")), fleet(Row("p"), Row("d", "decode"))
    for second in range(61):
        keeper.look("m", idle, IDLE, float(second))
    assert keeper.need("m", PREFILL, idle, 60.0) == 0.0
    assert not keeper.is_active("m")
    keeper.look("m", busy, IDLE, 61.0)
    for second in range(62, 140):
        keeper.look("m", idle, IDLE, float(second))
        held = second <= 121
        assert keeper.need("m", PREFILL, idle, float(second)) == pytest.approx(3.0 if held else 0.0), second
        assert keeper.is_active("m") == held


def test_at_first_nothing_that_is_there_is_too_much() -> None:
    keeper = NeedsKeeper(1.0, hold_s=60.0)
    idle = fleet(Row("p"), Row("q"), Row("d", "decode"), Row("e", "decode", ready=False))
    assert keeper.is_active("m")
    assert keeper.need("m", PREFILL, idle, 0.0) == 2.0
    keeper.look("m", idle, IDLE, 0.0)
    assert (keeper.need("m", PREFILL, idle, 59.0), keeper.need("m", DECODE, idle, 59.0)) == (2.0, 1.0)
    assert keeper.need("m", PREFILL, idle, 60.0) == 0.0
    keeper.forget({"other"})
    assert keeper.need("m", PREFILL, idle, 90.0) == 2.0


# --- KEDA


class Scaler:
    """KEDA's side of the port."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, method: str, request: Any, answer: Any) -> Any:
        asked = self._channel.unary_unary(
            f"/externalscaler.ExternalScaler/{method}", type(request).SerializeToString, answer.FromString
        )
        return await asked(request, timeout=20)

    async def needed(self, role: str, model: str = "m") -> float:
        request = keda.GetMetricsRequest(scaled_object_ref=ref(role, model), metric_name=metric())
        found = await self.call("GetMetrics", request, keda.GetMetricsResponse)
        (value,) = found.metric_values
        assert value.metric_value >= value.metric_value_float > value.metric_value - 1
        return float(value.metric_value_float)

    async def active(self) -> bool:
        return bool((await self.call("IsActive", ref("both"), keda.IsActiveResponse)).result)

    async def refusal(self, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method, request, keda.GetMetricsResponse)
        return caught.value.code(), str(caught.value.details())


def metric() -> str:
    return "mooncache_instances_needed"


def ref(role: str, model: str = "m") -> keda.ScaledObjectRef:
    return keda.ScaledObjectRef(name="x", namespace="llm", scaler_metadata={"model": model, "role": role})


def scaled(tmp_path: Path, scenario: Callable[[Conductor, Scaler], Awaitable[None]], **more: Any) -> None:
    async def run(c: Conductor) -> None:
        assert c.service.scaler is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{c.service.scaler.port}") as channel:
            await scenario(c, Scaler(channel))

    serve(tmp_path, run, **{**ON, **more})


def test_each_role_has_its_own_need(tmp_path: Path) -> None:
    async def scenario(c: Conductor, scaler: Scaler) -> None:
        await c.register(*pair(), instance("p2", pb.INSTANCE_ROLE_PREFILL))
        spec = await scaler.call("GetMetricSpec", ref("prefill"), keda.GetMetricSpecResponse)
        assert [(one.metric_name, one.target_size, one.target_size_float) for one in spec.metric_specs] == [
            (metric(), 1, 1.0)
        ]
        await until(lambda: c.service.state.needs.knows("m"), "the duty looked")
        # nothing has been seen for a minute: what is ready is not too much
        assert (await scaler.needed("prefill"), await scaler.needed("decode")) == (2.0, 1.0)

    scaled(tmp_path, scenario)


def test_load_raises_the_need_and_it_falls_again(tmp_path: Path) -> None:
    async def scenario(c: Conductor, scaler: Scaler) -> None:
        await c.register(*pair())

        async def need_of_both() -> bool:
            return await scaler.needed("prefill") > 1.0 and await scaler.needed("decode") > 1.0

        async def nothing_left() -> bool:
            return await scaler.needed("decode") == 0.0

        await until(nothing_left)  # idle, and nothing is held
        plans = [await c.schedule(f"r{i}", chain(f"a{i}", 1000), max_output_tokens=4000) for i in range(80)]
        assert all(plan.admitted for plan in plans)
        await until(need_of_both, every_s=0.1)
        assert await scaler.active()
        most = await scaler.needed("prefill")
        for plan in plans:
            await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED)

        async def falls() -> bool:
            return await scaler.needed("prefill") < most / 2  # what remains are the rates, which fade

        await until(falls, every_s=0.1)

    scaled(tmp_path, scenario, **{"conductor.scaler_hold_s": 0, "conductor.admission_enabled": False})


def test_what_keda_should_not_ask(tmp_path: Path) -> None:
    async def scenario(c: Conductor, scaler: Scaler) -> None:
        await c.register(*pair())
        for method in ("IsActive", "GetMetricSpec"):
            code, text = await scaler.refusal(method, ref("prefill", "unknown"))
            assert (code, "'unknown'" in text) == (grpc.StatusCode.NOT_FOUND, True)
        wrong = keda.GetMetricsRequest(scaled_object_ref=ref("prefill", "unknown"), metric_name=metric())
        assert (await scaler.refusal("GetMetrics", wrong))[0] is grpc.StatusCode.NOT_FOUND
        assert (await scaler.refusal("IsActive", ref("", "m")))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert (await scaler.refusal("IsActive", ref("both", "")))[0] is grpc.StatusCode.INVALID_ARGUMENT
        other = keda.GetMetricsRequest(scaled_object_ref=ref("both"), metric_name="cpu")
        assert (await scaler.refusal("GetMetrics", other))[0] is grpc.StatusCode.INVALID_ARGUMENT
        large = ref("both", "m" * 100_000)
        assert (await scaler.refusal("IsActive", large))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    scaled(tmp_path, scenario)


def test_a_stream_tells_each_change(tmp_path: Path) -> None:
    async def scenario(c: Conductor, scaler: Scaler) -> None:
        await c.register(*pair())
        asked = scaler._channel.unary_stream(
            "/externalscaler.ExternalScaler/StreamIsActive",
            keda.ScaledObjectRef.SerializeToString,
            keda.IsActiveResponse.FromString,
        )
        watch = asked(ref("prefill"), timeout=60)
        await until(lambda: not c.service.state.needs.is_active("m"))
        while (await watch.read()).result:
            pass
        plan = await c.schedule("r", chain("a", 4000))
        assert (await watch.read()).result
        await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED)
        unknown = asked(ref("prefill", "unknown"), timeout=20)
        assert await unknown.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()

    scaled(tmp_path, scenario, **{"conductor.scaler_hold_s": 0})


async def test_without_the_setting_there_is_no_port(tmp_path: Path) -> None:
    async with running(config_at(tmp_path)) as c:
        assert c.service.scaler is None
        assert not c.service.state.needs.knows("m")


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async with running(config_at(tmp_path, **ON)) as c:
        assert c.service.scaler is not None
        taken = {**ON, "conductor.scaler_port": c.service.scaler.port}
        with pytest.raises(ConfigInvalid, match="scaler_port"):
            async with running(config_at(tmp_path, **taken)):
                pass
