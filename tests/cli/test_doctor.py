"""Every sentence of the doctor, from facts made by hand: some make a check fail, others do not."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from mooncache.cli.doctor.core import access, cache, host, network, pool, serving, versions
from mooncache.cli.doctor.core.checks import groups
from mooncache.cli.doctor.core.facts import (
    BlockProbe,
    ClockOffset,
    Facts,
    MemberFacts,
    NodeFacts,
    PoolFacts,
    Reach,
    ServingFacts,
    TenantUse,
)
from mooncache.cli.doctor.core.result import CheckResult, Status, of_finding
from mooncache.cli.doctor.view import show
from mooncache.topology.core.findings import BAD, Finding
from mooncache.topology.core.host_facts import ArenaFacts, Certificate, Disk, HostFacts, PrivateFile
from mooncache.topology.core.model import Host, NumaNode

GIB = 1 << 30
NOW_S = 1.8e9
HOST = HostFacts(
    Host("h", numa=(NumaNode(0, "0-3", 64 * GIB),)),
    host_id="h1",
    software_version="1.0",
    wall_s=NOW_S,
    open_files=50,
    open_files_max=65_536,
    memory_bytes=64 * GIB,
    memory_left_bytes=32 * GIB,
    shm_bytes=8 * GIB,
    shm_free_bytes=8 * GIB,
    arena=ArenaFacts(16 * GIB, "memory", 2 << 20),
    disks=(Disk("ssd", "/ssd", 100 * GIB, 0, 200 * GIB, "xfs"),),
)
READY = {
    "instance_id": "e1",
    "role": "both",
    "state": "ready",
    "reason": "",
    "engine": "vllm",
    "model": "m",
    "pool": True,
    "apart": "",
    "passport": "p1",
    "software_version": "1.0",
    "running": 1,
    "waiting": 0,
    "kv_usage": 0.2,
    "report_age_s": 0.1,
}


def of_host(**change: Any) -> HostFacts:
    return msgspec.structs.replace(HOST, **change)


def node(name: str, **change: Any) -> NodeFacts:
    target, data = f"10.0.0.{name[-1]}:1", f"10.0.0.{name[-1]}:2"
    usual = NodeFacts(
        name, host_id=f"host-{name}", target=target, data=data, version="1.0", capacity_bytes=GIB, host=HOST
    )
    return dataclasses.replace(usual, probe=BlockProbe(), clock=ClockOffset(0.0, 0.01), **change)


def pool_of(*nodes: NodeFacts, **change: Any) -> PoolFacts:
    return PoolFacts(master_id="m1", version="1.0", nodes=nodes, **change)


def engines(*changes: dict[str, Any], **change: Any) -> ServingFacts:
    rows = tuple({**READY, **each} for each in changes)
    return ServingFacts(conductor_target="c:1", gateway_url="http://g:1", instances=rows, **change)


def facts(**change: Any) -> Facts:
    return Facts(**{"here": HOST, "pool": pool_of(node("n1")), "now_s": NOW_S, **change})


def trouble(results: Any) -> list[CheckResult]:
    listed = [results] if isinstance(results, CheckResult) else list(results)
    found = [one for one in listed if one.status in {Status.FAIL, Status.WARN}]
    assert all(one.fix for one in found), "each trouble says what to do"
    return found


HOSTS = [
    (host.descriptors, {"open_files": 60_000}, Status.FAIL, "60000 of 65536"),
    (host.descriptors, {"open_files_max": 1024}, Status.WARN, "1024"),
    (host.memory, {"memory_limit_bytes": 8 * GIB}, Status.FAIL, "the container's memory limit of 8.0 GiB"),
    (host.memory, {"memory_limit_bytes": 17 * GIB}, Status.WARN, "little is left"),
    (
        host.huge_pages,
        {"arena": ArenaFacts(16 * GIB, "memory", 4096, "none is free")},
        Status.WARN,
        "none is free",
    ),
    (host.io_uring, {"io_uring": "kernel.io_uring_disabled refuses it"}, Status.WARN, "through threads"),
    (
        host.disks,
        {"disks": (Disk("ssd", "/ssd", 100 * GIB, 10 * GIB, GIB, "xfs"),)},
        Status.FAIL,
        "1.0 GiB free",
    ),
    (host.disks, {"disks": (Disk("ssd", "/ssd", GIB, 0, 2 * GIB, "tmpfs"),)}, Status.WARN, "tmpfs"),
    (host.disks, {"disks": (Disk("ssd", "/ssd", GIB, 0, 2 * GIB, "nfs4"),)}, Status.WARN, "network"),
    (host.disks, {"disks": (Disk("ssd", "/ssd", GIB, 0, 2 * GIB, "zfs", False),)}, Status.WARN, "O_DIRECT"),
    (
        host.disks,
        {"disks": (Disk("ssd", "/ssd", GIB, error="Input/output error"),)},
        Status.FAIL,
        "Input/output",
    ),
    (host.numa, {"arena": ArenaFacts(GIB, "memory", 4096, "", 3)}, Status.FAIL, "numa_node is 3"),
    (
        host.numa,
        {"arena": ArenaFacts(65 * GIB, "memory", 4096, "", 0)},
        Status.FAIL,
        "NUMA node 0 has 64.0 GiB",
    ),
    (access.files, {"private_files": (PrivateFile("t", "/t", 0o644),)}, Status.FAIL, "0644"),
    (access.ports_beyond_loopback, {"open_binds": ("gateway.host = 0.0.0.0",)}, Status.WARN, "0.0.0.0"),
]


@pytest.mark.parametrize(("check", "change", "status", "text"), HOSTS)
def test_a_host(check: Any, change: dict[str, Any], status: Status, text: str) -> None:
    assert not trouble(check("here", HOST))
    (found,) = trouble(check("here", of_host(**change)))
    assert found.status is status
    assert text in found.why


def test_shared_memory_counts_for_engines_that_use_it() -> None:
    tiny = of_host(shm_bytes=64 << 20)
    (found,) = trouble(host.shared_memory("here", tiny, needed=True))
    assert "64.0 MiB" in found.why
    assert host.shared_memory("here", tiny, needed=False).status is Status.SKIPPED


@pytest.mark.parametrize(
    ("begins_days", "ends_days", "error", "status", "text"),
    [
        (-20, -10, "", Status.FAIL, "expired 10.0 days ago"),
        (5, 20, "", Status.FAIL, "valid only in 5.0 days"),
        (-5, 5, "", Status.WARN, "expires in 5.0 days"),
        (0, 0, "holds no certificate", Status.FAIL, "holds no certificate"),
    ],
)
def test_certificates(begins_days: float, ends_days: float, error: str, status: Status, text: str) -> None:
    at = NOW_S + begins_days * access.DAY_S, NOW_S + ends_days * access.DAY_S
    one = of_host(tls=True, certificates=(Certificate("tls.cert_file", "/c", *at, error),))
    (found,) = trouble(access.certificates("here", one, NOW_S))
    assert (found.status, text in found.why) == (status, True), found
    good = Certificate("tls.cert_file", "/c", NOW_S - 1, NOW_S + 100 * access.DAY_S)
    assert not trouble(access.certificates("here", of_host(tls=True, certificates=(good,)), NOW_S))


def test_tokens() -> None:
    (found,) = trouble(access.token(facts(pool=PoolFacts(error="wrong proof", refused=True))))
    assert "wrong proof" in found.why
    (found,) = trouble(access.token(facts(token_error="mode 0644")))
    assert "mode 0644" in found.why
    assert not trouble(access.token(facts()))


@pytest.mark.parametrize(
    ("offset_s", "bound_s", "status"),
    [(1000, 0.1, Status.FAIL), (-1000, 0.1, Status.FAIL), (60, 0.1, Status.WARN), (6, 2.0, Status.PASS)],
)
def test_clocks_count_only_beyond_what_the_round_trip_hides(
    offset_s: float, bound_s: float, status: Status
) -> None:
    found = access.clock(dataclasses.replace(node("n1"), clock=ClockOffset(offset_s, bound_s)))
    assert found.status is status


def test_nodes_that_others_do_not_reach() -> None:
    lost = Reach(data="timed out")
    nodes = [
        node("n1", reach={"n2": Reach(), "n3": lost}),
        node("n2", reach={"n3": lost, "n1": Reach()}),
        node("n3", reach={"n1": Reach(), "n2": Reach(control="refused")}),
    ]
    found = {one.subject: one for one in trouble(network.between_nodes(pool_of(*nodes)))}
    assert set(found) == {"n2", "n3"}
    assert "no other node reaches it: data port 10.0.0.3:2: timed out" in found["n3"].why
    assert "not reached from n3: control port 10.0.0.2:1: refused" in found["n2"].why
    assert "open data port 10.0.0.3:2" in found["n3"].fix
    near = dataclasses.replace(nodes[2], target="127.0.0.1:1")
    (at_n3,) = [
        one for one in trouble(network.between_nodes(pool_of(*nodes[:2], near))) if one.subject == "n3"
    ]
    assert "advertise_host" in at_n3.fix


def test_a_node_that_does_not_answer_us() -> None:
    far, near = (dataclasses.replace(node("n2"), error="gone", host_id=host_id) for host_id in ("far", "h1"))
    (found,) = trouble(network.from_here(pool_of(node("n1"), far), "h1"))
    assert (found.subject, "gone" in found.why, "nc -vz 10.0.0.2 1" in found.fix) == ("n2", True, True)
    (found,) = trouble(network.from_here(pool_of(node("n1"), near), "h1"))
    assert "mooncache node restart n2" in found.fix
    (found,) = trouble(network.from_here(pool_of(dataclasses.replace(far, target="127.0.0.1:1")), "h1"))
    assert "advertise_host" in found.fix


def test_a_node_that_is_gone_is_said_once() -> None:
    gone = dataclasses.replace(node("n2"), error="gone", probe=BlockProbe("no answer"))
    both = pool_of(node("n1", reach={"n2": Reach("refused", "refused")}), gone)
    (found,) = trouble(network.from_here(both, "h1"))
    assert "no other node reaches it either" in found.why
    assert not trouble(network.between_nodes(both))
    assert not trouble(pool.probe_blocks(both))


def test_ports_that_are_taken_before_the_first_start() -> None:
    (found,) = trouble(network.local_ports(facts(pool=None, busy_ports={"master.port": 7700})))
    assert "7700 (master.port)" in found.why


def test_versions() -> None:
    older = pool_of(node("n1"), dataclasses.replace(node("n2"), version="0.9"))
    (found,) = trouble(versions.software(facts(pool=older)))
    assert "0.9: n2" in found.why
    assert not trouble(versions.software(facts()))
    skewed = pool_of(dataclasses.replace(node("n1"), counters={"version_skews": 3}))
    (found,) = trouble(versions.wire(facts(pool=skewed)))
    assert "n1 refused 3" in found.why


POOLS = [
    ({"error": "nobody there"}, pool.masters, Status.FAIL, "nobody there"),
    ({"directory_complete": False}, pool.directory, Status.WARN, "rebuilt"),
    ({"nodes": ()}, pool.nodes, Status.FAIL, "none is active"),
    (
        {"nodes": (node("n1"), dataclasses.replace(node("n2"), state="dead"))},
        pool.nodes,
        Status.FAIL,
        "is dead",
    ),
    (
        {"nodes": (node("n1"), dataclasses.replace(node("n2"), state="draining"))},
        pool.nodes,
        Status.WARN,
        "draining",
    ),
    (
        {"nodes": (dataclasses.replace(node("n1"), arena_gone=True),)},
        pool.nodes,
        Status.FAIL,
        "memory of its blocks",
    ),
    ({"nodes": (dataclasses.replace(node("n1"), pinned_bytes=GIB),)}, pool.nodes, Status.WARN, "are pinned"),
    (
        {"nodes": (dataclasses.replace(node("n1"), probe=BlockProbe("get: other bytes came back")),)},
        pool.probe_blocks,
        Status.FAIL,
        "other bytes",
    ),
    (
        {"repair": {"state": "blocked", "short_block_count": 7, "resting_code": "NO_SPACE"}},
        pool.repair,
        Status.FAIL,
        "7 blocks",
    ),
    ({"repair": {"state": "repairing", "short_block_count": 7}}, pool.repair, Status.WARN, "7 blocks"),
]


@pytest.mark.parametrize(("change", "check", "status", "text"), POOLS)
def test_a_pool(change: dict[str, Any], check: Any, status: Status, text: str) -> None:
    assert not trouble(check(pool_of(node("n1"))))
    (found,) = trouble(check(dataclasses.replace(pool_of(node("n1")), **change)))
    assert (found.status, text in found.why) == (status, True), found


def test_processes_that_were_started_again() -> None:
    (found,) = trouble(pool.supervised(facts(parts=(("node-1", "was started again twice"),))))
    assert "twice" in found.why


SERVED = [
    (engines(READY, conductor_error="no answer"), serving.conductor, Status.FAIL, "no answer"),
    (
        engines(READY, conductor={"pool_connected": False}),
        serving.conductor,
        Status.FAIL,
        "does not reach the pool",
    ),
    (engines(READY, gateway_reason="starting"), serving.gateways, Status.FAIL, "starting"),
    (engines(), serving.engines, Status.FAIL, "none is registered"),
    (engines({"state": "suspect", "reason": "silent"}), serving.engines, Status.FAIL, "silent"),
    (engines({"state": "draining"}), serving.engines, Status.WARN, "draining"),
    (engines({"state": "starting"}), serving.engines, Status.WARN, "loads"),
    (engines({"pool": False}), serving.engines, Status.WARN, "does not use the pool"),
    (engines({"role": "prefill"}), serving.engines, Status.FAIL, "no engine that decodes"),
    (
        engines(READY, {"instance_id": "e2", "apart": "differs: dtype"}),
        serving.passports,
        Status.FAIL,
        "dtype",
    ),
    (engines(READY, {"instance_id": "e2", "model": "other"}), serving.passports, Status.WARN, "one passport"),
    (engines({"kv_usage": 0.99, "waiting": 3}), serving.overload, Status.WARN, "99% full"),
    (engines({"waiting": 20}), serving.overload, Status.WARN, "20 requests wait"),
    (engines({"report_age_s": 60.0}), serving.overload, Status.WARN, "60 s ago"),
    (
        engines({"running": 40}, *({"instance_id": f"e{n}", "running": 0} for n in range(2, 6))),
        serving.overload,
        Status.WARN,
        "has 40 requests",
    ),
]


@pytest.mark.parametrize(("found", "check", "status", "text"), SERVED)
def test_what_serves(found: ServingFacts, check: Any, status: Status, text: str) -> None:
    well = engines({"role": "prefill"}, {"instance_id": "e2", "role": "decode"})
    assert not trouble(check(well))
    (one,) = trouble(check(found))
    assert (one.status, text in one.why) == (status, True), one


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "gpu_memory_utilization"),
        ("OSError: [Errno 98] Address already in use", "ss -ltnp"),
        ("ModuleNotFoundError: No module named 'vllm'", "mooncache[vllm]"),
        ("RuntimeError: The NVIDIA driver on your system is too old", "driver"),
        ("it ended with signal SIGKILL", "dmesg"),
    ],
)
def test_an_engine_that_does_not_start_has_a_cause(words: str, fix: str) -> None:
    found = engines({"state": "starting", "reason": "exit code 1"}, engine_logs={"e1": f"x\n{words}\ny"})
    (one,) = trouble(serving.engines(found))
    assert (one.status, fix in one.fix) == (Status.FAIL, True), one


def agreed(reason: str = "", **change: Any) -> Facts:
    one = {
        "instance_id": "e1", "engine_tokens": 64, "first_difference": -1, "keys": ["aa", "bb"], "error": "", "saved": 2
    } | change  # fmt: skip
    model = {"model": "m", "prompt_tokens": 64, "block_tokens": 16, "reason": reason, "instances": [one]}
    return facts(serving=engines(READY, agreement=(model,)))


def test_hash_agreement() -> None:
    assert not trouble(serving.agreement(agreed()))
    for change, status, text in (
        ({"first_difference": 5, "engine_tokens": 70}, Status.FAIL, "as 70, which differ from token 5 on"),
        ({"saved": 1}, Status.FAIL, "the pool has 1 of the 2 blocks"),
        ({"error": "it did not answer"}, Status.WARN, "it did not answer"),
        ({"reason": "its tokenizer differs"}, Status.FAIL, "its tokenizer differs"),
    ):
        (found,) = trouble(serving.agreement(agreed(**change)))
        assert (found.status, text in found.why) == (status, True), found
    assert (
        serving.agreement(facts(serving=engines(READY, agreement_error="no gateway"))).send(None).why
        == "no gateway"
    )


def test_a_hot_node() -> None:
    def of(*hits: int) -> PoolFacts:
        return pool_of(*(node(f"n{at}", counters={"hits": count}) for at, count in enumerate(hits)))

    (found,) = trouble([cache.hot_node(of(9000, 100, 100, 100))])
    assert (found.subject, "97%" in found.why) == ("n0", True)
    assert cache.hot_node(of(2600, 2500, 2400)).status is Status.PASS
    assert cache.hot_node(of(90, 1)).status is Status.SKIPPED, "too few reads to say anything"


def looked_up(hits: int, evicted: int, unknown: int, **change: Any) -> PoolFacts:
    counters = {"store_hits": hits, "store_misses_evicted": evicted, "store_misses_unknown": unknown}
    return pool_of(node("n1", counters=counters), **change)


def test_a_low_hit_ratio_has_its_reasons() -> None:
    assert not trouble(cache.hit_ratio(looked_up(900, 50, 50), None))
    (found,) = trouble(cache.hit_ratio(looked_up(100, 600, 300), None))
    assert "60% were here and had been evicted" in found.why
    (found,) = trouble(cache.hit_ratio(looked_up(100, 0, 900), None))
    assert "share few prefixes" in found.why
    apart = engines({"apart": "differs"})
    (found,) = trouble(cache.hit_ratio(looked_up(100, 0, 900), apart))
    assert "e1 cannot share blocks" in found.why
    tenants = {"big": TenantUse(95 * GIB, 10, 10), "small": TenantUse(5 * GIB, 1, 100)}
    (found,) = trouble(cache.hit_ratio(looked_up(100, 0, 900, tenants=tenants), None))
    assert "tenant big holds 95% of the memory, and small no share" in found.why


def test_prompts_that_were_computed_again_say_why() -> None:
    def requests(computed: int, reason: str) -> ServingFacts:
        record = {
            "prompt_tokens": 100, "cacheable_tokens": 96, "observed": {"computed_tokens": computed},
            "misses": [{"from_token": 0, "to_token": computed, "reason": reason}],
        }  # fmt: skip
        return engines(READY, decisions=(record,) * 30)

    assert not trouble(cache.prompts(requests(20, "never_seen")))
    (found,) = trouble(cache.prompts(requests(95, "other_passport")))
    assert ("5% of the prompt tokens" in found.why, "other_passport" in found.why) == (True, True)
    (found,) = trouble(cache.prompts(requests(40, "load_failed")))
    assert "load_failed" in found.why, "many hits do not hide what is broken"


def test_findings_of_rdma_and_engine_settings_are_among_the_groups() -> None:
    assert of_finding("RDMA", "here", Finding(BAD, "mlx5_0", "is gone", "look")).status is Status.FAIL
    found = groups(facts(engine_problem="On a CPU vLLM answers garbage"))
    assert [one.why for one in trouble(found["RDMA and GPUs"])] == ["On a CPU vLLM answers garbage"]


def test_all_is_well_and_short() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    found = groups(facts(serving=engines({"role": "prefill"}, {"instance_id": "e2", "role": "decode"})))
    assert not [one for results in found.values() for one in trouble(results)]
    show(console, found, 0.5, verbose=False)
    text = console.export_text()
    assert "nothing is wrong" in text
    assert len(text.splitlines()) == len(found) + 3, "one line for each group"


def test_trouble_is_shown_in_full() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    show(console, groups(facts(pool=PoolFacts(error="nobody there"))), 0.5, verbose=False)
    text = console.export_text()
    for words in ("✗ pool", "master, pool: nobody there", "→ check that `mooncache master` runs", "1 failed"):
        assert words in text


def test_without_a_cluster_the_rest_is_skipped() -> None:
    found = groups(facts(pool=None))
    assert {name for name, results in found.items() if trouble(results)} == set()
    assert [one.status for one in found["pool"]] == [Status.SKIPPED]


def member(name: str, **change: Any) -> MemberFacts:
    return MemberFacts(
        **{"kind": "gateway", "name": name, "host": "h2", "state": "ready", "version": "1.0", **change}
    )


def test_processes_that_are_missed() -> None:
    served = facts(serving=engines(READY))
    missed = (
        member("g1"),
        member("g2", state="silent", heard_age_s=12.0),
        member("m2", kind="master", state="gone", heard_age_s=90.0),
        member("n1", kind="store node", state="silent"),
        member("g3", state="stopped"),
    )
    found = trouble(serving.processes(dataclasses.replace(served, members=missed)))
    assert [(one.status, one.subject) for one in found] == [
        (Status.FAIL, "gateway g2 on h2"),
        (Status.WARN, "master m2 on h2"),
    ], "nodes have a check of their own, and who stopped is not missed"
    assert "12 s ago" in found[0].why
    (well,) = serving.processes(dataclasses.replace(served, members=(member("g1"), member("g4", host="h3"))))
    assert well.status == Status.PASS and "2 are heard of, on 2 hosts" in well.why
    (unknown,) = serving.processes(dataclasses.replace(served, members_error="it is too old"))
    assert unknown.status == Status.SKIPPED and "too old" in unknown.why


def test_versions_of_processes_that_only_the_list_has() -> None:
    mixed = facts(
        members=(member("w1", kind="worker", version="0.9"), member("old", version="0.8", state="gone"))
    )
    (found,) = trouble(versions.software(mixed))
    assert "0.9: worker w1" in found.why and "0.8" not in found.why, "what is gone runs no version"


def test_clocks_of_hosts_without_a_store_node() -> None:
    late = ClockOffset(-20.0, 0.1)
    listed = (
        member("g1", clock=ClockOffset(0.01, 0.02)),
        member("g2", host="h3", clock=late),
        member("w2", host="h3", clock=ClockOffset(-21.0, 5.0)),
        member("n1", host="h4", clock=late),
        member("w1", host="h5", clock=late, state="gone"),
        member("w3", host="h6"),
    )
    found = list(access.clocks_of_members(listed, {"n1"}))
    assert [(one.status, one.subject) for one in found] == [(Status.PASS, "h2"), (Status.WARN, "h3")]
    assert "20 s behind ours" in found[1].why, "the closer comparison of a host counts"
