"""What operators do on the console: real conductor, real master and nodes; who may, what came of it, what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncache
from mooncache.accounts.audit_log import AUDIT_FILE, lines
from mooncache.accounts.core.audit import AuditEntry, first_break, read_entry
from mooncache.auth import tenant_token
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.config import load
from mooncache.errors import ConductorUnavailable, InvalidArgument
from mooncache.gateway.console import collector as collecting
from mooncache.gateway.console.messages import act_request
from mooncache.gateway.console.viewers import Topic
from mooncache.gateway.core.console_acts import ConsoleAct, parse
from mooncache.gateway.service import GatewayService
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.proto.v1 import master_pb2
from mooncache.runtime import logs
from mooncache.runtime.logs import Event
from tests.client.conftest import make_cluster
from tests.conditions import until
from tests.conductor.support import BLOCK, CALM, Conductor, chain, config_at, instance
from tests.conductor.support import running as running_conductor

DRAIN = {"act": "instance drain", "name": "e"}


class Scene:
    """A gateway over a real conductor, which knows instance e, and a real pool."""

    def __init__(self, gateway: GatewayService, conductor: Conductor, http: aiohttp.ClientSession) -> None:
        self.gateway, self.conductor, self._http = gateway, conductor, http
        self.bearer = {"authorization": f"Bearer {gateway.token.text}"}
        self.accounts = gateway.config.cluster.accounts_place

    async def act(self, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        async with self._http.post(
            self.gateway.url + "/console/act", json=body, headers=self.bearer if headers is None else headers
        ) as response:
            return response.status, await response.json()

    async def cookie(self, key: str) -> dict[str, str]:
        headers = {"authorization": f"Bearer {key}"}
        async with self._http.post(self.gateway.url + "/console/session", headers=headers) as response:
            assert response.status == 200
            return {"cookie": response.headers["set-cookie"].split(";")[0]}

    async def instance(self) -> pb.Instance:
        answer = await self.conductor.call("ListInstances", pb.ListInstancesRequest())
        found: pb.Instance = answer.instances[0].instance
        return found

    async def page(self, topic: Topic) -> dict[str, Any]:
        """What a page of the console shows now."""
        collector = self.gateway.state.require_console().collector
        event = collector.events(await collector.look())[topic]
        found: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
        return found

    async def until_node_is(self, state: str) -> None:
        """Wait until a page shows node-1 in this state."""

        async def shown() -> bool:
            rows = (await self.page(Topic.POOL))["nodes"] or ()
            return any((row["id"], row["state"]) == ("node-1", state) for row in rows)

        await until(shown, f"node-1 is {state}", every_s=0.05)

    def entries(self) -> list[AuditEntry]:
        found = [read_entry(line) for line in lines(self.accounts)]
        assert first_break(lines(self.accounts)) is None
        return [entry for entry in found if entry is not None]


@contextlib.asynccontextmanager
async def scene(
    pool: EmbeddedCluster, folder: Path, http: aiohttp.ClientSession, **settings: Any
) -> AsyncIterator[Scene]:
    master = pool.client_settings()["master"]
    shared = {"cluster.state_dir": folder, "cluster.token_file": pool.state_dir / "cluster.token"}
    async with running_conductor(
        config_at(folder, **{**CALM, **shared, "cluster.master_targets": master})
    ) as conductor:
        await conductor.register(instance("e"))
        config = load(
            env={},
            overrides={
                **shared,
                "gateway.port": 0,
                "gateway.drain_timeout_s": 0.2,
                "cluster.master_targets": master,
                "cluster.conductor_target": conductor.service.grpc_target,
                **{name.replace("__", "."): value for name, value in settings.items()},
            },
        )
        gateway = GatewayService(config)
        await gateway.start()
        try:
            yield Scene(gateway, conductor, http)
        finally:
            await gateway.stop()


def act_of(**body: str) -> ConsoleAct:
    return parse(json.dumps(body).encode())


def test_acts_are_the_commands_and_their_calls() -> None:
    for body, command, request in (
        ({"act": "instance drain", "name": "e"}, ["instance drain", "e"], pb.SetInstanceRequest(drain=True)),
        (
            {"act": "instance undrain", "name": "e"},
            ["instance undrain", "e"],
            pb.SetInstanceRequest(drain=False),
        ),
        (
            {"act": "instance role", "name": "e", "role": "both"},
            ["instance role", "e", "both"],
            pb.SetInstanceRequest(role=pb.INSTANCE_ROLE_BOTH),
        ),
    ):
        request.instance_id = "e"
        act = act_of(**body)
        assert (act.command, act_request(act)) == (command, request)
    for body, command, node in (
        ({"act": "drain", "name": "n"}, ["drain", "n"], master_pb2.DrainNodeRequest(move_blocks=True)),
        (
            {"act": "drain --cancel", "name": "n"},
            ["drain", "n", "--cancel"],
            master_pb2.DrainNodeRequest(cancel=True),
        ),
    ):
        node.node_id = "n"
        act = act_of(**body)
        assert (act.command, act_request(act)) == (command, node)


@given(
    st.binary(max_size=64)
    | st.sampled_from(
        (
            b"{}",
            b"[" * 2000,
            b'{"act": "down", "name": "e"}',
            b'{"act": "drain"}',
            b'{"act": "drain", "name": ""}',
            b'{"act": "drain", "name": 7}',
            b'{"act": "drain", "name": "' + b"n" * 257 + b'"}',
            b'{"act": "drain", "name": "n", "role": "both"}',
            b'{"act": "drain", "name": "n", "force": true}',
            b'{"act": "instance role", "name": "e"}',
            b'{"act": "instance role", "name": "e", "role": "king"}',
            b'{"act": "prefix pin", "name": "0"}',
            b'{"act": "prefix pin", "name": "0x1"}',
            b'{"act": "prefix pin", "name": "11112222333344445"}',
            b'{"act": "prefix pin", "name": "1", "copies": 2}',
            b'{"act": "prefix copy", "name": "1"}',
            b'{"act": "prefix copy", "name": "1", "copies": 65}',
            b'{"act": "prefix copy", "name": "1", "copies": 0}',
        )
    )
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse(body)


async def test_instances_and_nodes(
    pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path, http) as found:
        cookie = await found.cookie(found.gateway.token.text)
        assert await found.act(DRAIN, cookie) == (200, {"done": True, "said": "", "audited": True})
        assert (await found.instance()).state == pb.INSTANCE_STATE_DRAINING
        assert (await found.act({**DRAIN, "act": "instance undrain"}))[0] == 200
        assert (await found.act({"act": "instance role", "name": "e", "role": "decode"}))[0] == 200
        seen = await found.instance()
        assert (seen.state, seen.role) == (pb.INSTANCE_STATE_READY, pb.INSTANCE_ROLE_DECODE)
        status, answer = await found.act({**DRAIN, "name": "nobody"})
        assert status == 404 and "nobody" in answer["error"]["message"]

        assert (await found.act({"act": "drain", "name": "node-1"}))[0] == 200
        await found.until_node_is("draining")
        tasks = (await found.page(Topic.POOL))["tasks"]
        assert (tasks[0]["kind"], tasks[0]["of"]) == ("drain", "node-1")
        assert (await found.act({"act": "drain --cancel", "name": "node-1"}))[0] == 200
        await found.until_node_is("active")
        assert (await found.page(Topic.POOL))["repair"]["state"] in ("off", "whole")
        entries = found.entries()
    assert [(each.what, each.arguments, each.result) for each in entries] == [
        ("instance drain", ["e"], "OK"),
        ("instance undrain", ["e"], "OK"),
        ("instance role", ["e", "decode"], "OK"),
        ("instance drain", ["nobody"], "INSTANCE_UNKNOWN"),
        ("drain", ["node-1"], "OK"),
        ("drain", ["node-1", "--cancel"], "OK"),
    ]
    assert {each.who for each in entries} == {"the cluster token at 127.0.0.1"}


async def test_hot_prefixes(pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession) -> None:
    keys = chain("story", 4)
    blocks = [keys[at : at + 32] for at in range(0, len(keys), 32)]
    with mooncache.connect(**pool.client_settings()) as client:
        client.put_many(blocks, [b"kv" * 100] * 4).raise_for_errors()
        async with scene(pool, tmp_path, http) as found:
            hot, now_s = found.conductor.service.state.hot, found.conductor.service.state.clock.now_s()
            hot.use("m", keys, 4, BLOCK, now_s, ("h",))
            seen = await found.page(Topic.PREFIXES)
            assert seen["counted"] is True
            rows = {row["first_block"]: row for row in seen["prefixes"]}
            assert [rows[at]["blocks"] for at in (0, 1, 2)] == [1, 1, 2]
            assert [rows[at]["parent"] for at in (0, 1, 2)] == [None, rows[0]["id"], rows[1]["id"]]
            name = rows[2]["id"]

            async def all_reported() -> bool:
                return bool((await found.page(Topic.OVERVIEW))["pool"]["blocks"] >= 4)

            await until(all_reported, "the master knows the blocks", every_s=0.05)
            status, answer = await found.act({"act": "prefix pin", "name": name})
            assert (status, answer["said"]) == (200, "2 of 2 blocks are pinned for an hour.")
            status, answer = await found.act({"act": "prefix copy", "name": name, "copies": 2})
            assert status == 200 and answer["said"].startswith("Task ")
            await until(
                lambda: [Counter(e.key for e in client.list())[one] for one in blocks] == [1, 1, 2, 2]
            )
            status, answer = await found.act({"act": "prefix evict", "name": rows[0]["id"]})
            assert (status, answer["said"]) == (200, "1 of 1 blocks are in the pool no longer.")
            assert client.get(blocks[0]) is None and client.get(blocks[2]) is not None
            status, answer = await found.act({"act": "prefix evict", "name": "1"})
            assert status == 404 and "not read for a while" in answer["error"]["message"]
            entries = found.entries()
    assert [(each.what, each.arguments, each.result) for each in entries] == [
        ("prefix pin", [name], "OK"),
        ("prefix copy", [name, "2"], "OK"),
        ("prefix evict", [rows[0]["id"]], "OK"),
        ("prefix evict", ["1"], "NOT_FOUND"),
    ]
    assert entries[0].details["said"] == "2 of 2 blocks are pinned for an hour."


async def test_what_moves_and_who_holds_it(
    pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_TENANTS_S", 0.0)
    bob = {**pool.client_settings(), "tenant": "bob"}
    with mooncache.connect(**pool.client_settings()) as client, mooncache.connect(**bob) as other:
        async with scene(pool, tmp_path, http) as found:
            await found.conductor.report(
                "e", load=pb.InstanceLoad(pool_hit_tokens_total=10, output_tokens_total=5)
            )
            before = (await found.page(Topic.POOL))["flows"]
            load = pb.InstanceLoad(pool_hit_tokens_total=110, output_tokens_total=55)
            await found.conductor.report("e", load=load)
            client.put_many([bytes([9, at]) * 16 for at in range(4)], [b"kv" * 50_000] * 4).raise_for_errors()
            other.put(b"b" * 32, b"kv" * 10_000)
            assert client.get(bytes([9, 0]) * 16) is not None
            page = await found.page(Topic.POOL)
    assert all(each["bytes_per_s"] is None for each in before)
    rates = {each["what"]: each["bytes_per_s"] for each in page["flows"]}
    assert rates["blocks stored"] > rates["blocks read"] > 0
    (generated,) = (each["tokens_per_s"] for each in page["flows"] if each["what"] == "tokens generated")
    assert rates["blocks loaded"] == pytest.approx(
        generated * 2 * 1024
    )  # 100 tokens of 1,024 bytes, 50 generated
    assert sum(row["stored_per_s"] for row in page["nodes"]) == pytest.approx(rates["blocks stored"])
    held = dict.fromkeys(page["tenants"]["tenants"], 0)
    for _, at, memory, _ in page["tenants"]["cells"]:
        held[page["tenants"]["tenants"][at]] += memory
    assert held["bob"] >= 20_000 and max(held.values()) >= 400_000


async def test_hits_over_those_of_an_unlimited_pool(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_TENANTS_S", 0.0)
    cluster = make_cluster(tmp_path / "small", nodes=1, capacity_bytes=16 << 20)
    await asyncio.to_thread(cluster.start)
    try:
        with mooncache.connect(**cluster.client_settings()) as client:
            async with scene(cluster, tmp_path, http) as found:
                assert (await found.page(Topic.OVERVIEW))["pool"]["hits_of_unlimited"] is None
                keys = [bytes([7, at]) * 16 for at in range(48)]  # three times what the node can hold
                for at in range(0, 48, 4):
                    client.put_many(keys[at : at + 4], [b"kv" * 500_000] * 4).raise_for_errors()
                there = client.exists_many(keys)
                kept, evicted = keys[there.index(True)], keys[there.index(False)]
                assert client.match([kept]).leading_blocks == 1
                assert (await found.page(Topic.OVERVIEW))["pool"]["hits_of_unlimited"] == 1.0
                assert client.match([evicted]).leading_blocks == 0
                share = (await found.page(Topic.OVERVIEW))["pool"]["hits_of_unlimited"]
                assert 0.0 < share < 1.0
                (row,) = (await found.page(Topic.POOL))["nodes"]
                assert row["hits_of_unlimited"] == share
    finally:
        await asyncio.to_thread(cluster.stop)


async def test_incidents_of_a_conductor_that_went_and_came(
    pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: Any) -> Any:
        raise ConductorUnavailable("The conductor does not answer.")

    async with scene(pool, tmp_path, http) as found:
        assert (await found.page(Topic.OVERVIEW))["incidents"] == []
        with monkeypatch.context() as patched:
            patched.setattr(ConductorLink, "call", gone)
            (first,) = (await found.page(Topic.OVERVIEW))["incidents"]
            assert (first["kind"], first["name"], first["until_s"]) == ("service", "conductor", None)
        page = await found.page(Topic.OVERVIEW)
    (ended,) = page["incidents"]  # it was asked three questions, and was one trouble
    assert (ended["name"], ended["since_s"]) == ("conductor", first["since_s"])
    assert ended["since_s"] <= ended["until_s"] <= page["at_s"]


async def test_who_may_not(pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    digest = hashlib.sha256(b"sk-look").hexdigest()
    keys.write_text(f'[[key]]\nsha256 = "{digest}"\ntenant = "ops"\nconsole = true\n')
    async with scene(pool, tmp_path, http, gateway__keys_file=keys) as found:
        tenant = tenant_token(found.gateway.token, "alice").text
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer sk-look"}, 403),
            (await found.cookie("sk-look"), 403),
            ({"authorization": f"Bearer {tenant}"}, 403),
            ({**await found.cookie(found.gateway.token.text), "sec-fetch-site": "cross-site"}, 403),
            ({**found.bearer, "sec-fetch-site": "same-site"}, 403),
        ):
            assert (await found.act(DRAIN, headers))[0] == status, headers
        url = found.gateway.url + "/console/act"
        for data, kind, status in (
            (json.dumps(DRAIN), "text/plain", 415),  # what a form of another site could send
            ("{", "application/json", 400),
            ("x" * 5000, "application/json", 413),
        ):
            headers = {**found.bearer, "content-type": kind}
            async with http.post(url, data=data, headers=headers) as response:
                assert response.status == status
        async with http.get(url, headers=found.bearer) as response:
            assert response.status == 405
        assert (await found.instance()).state == pb.INSTANCE_STATE_READY
        assert not (found.accounts / AUDIT_FILE).exists()


async def test_a_console_that_only_shows(
    pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path, http, gateway__console_acts=False) as found:
        async with http.post(found.gateway.url + "/console/session", headers=found.bearer) as response:
            assert (await response.json())["acts"] is False
        status, answer = await found.act(DRAIN)
        assert status == 403 and "gateway.console_acts" in answer["error"]["message"]


async def test_an_act_that_cannot_be_kept_says_so(
    pool: EmbeddedCluster,
    tmp_path: Path,
    http: aiohttp.ClientSession,
) -> None:
    stream = io.StringIO()
    logs.setup("gateway", log_format="json", stream=stream)
    async with scene(pool, tmp_path, http) as found:
        found.accounts.mkdir(mode=0o700, exist_ok=True)
        (found.accounts / AUDIT_FILE).touch(mode=0o666)
        (found.accounts / AUDIT_FILE).chmod(0o666)  # others could have written it
        assert await found.act(DRAIN) == (200, {"done": True, "said": "", "audited": False})
        assert (await found.instance()).state == pb.INSTANCE_STATE_DRAINING
    assert Event.CONSOLE_ACT_NOT_AUDITED in stream.getvalue()


async def test_a_conductor_that_is_gone_is_an_error_that_is_kept(
    pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: Any) -> Any:
        raise ConductorUnavailable("The conductor does not answer.")

    async with scene(pool, tmp_path, http) as found:
        monkeypatch.setattr(ConductorLink, "call", gone)
        status, answer = await found.act(DRAIN)
        assert status == 503 and "does not answer" in answer["error"]["message"]
        assert [each.result for each in found.entries()] == ["CONDUCTOR_UNAVAILABLE"]
