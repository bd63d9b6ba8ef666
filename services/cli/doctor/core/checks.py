"""All checks in the order in which to read and to fix them, by group."""

from __future__ import annotations

from collections.abc import Iterator

from mooncache.cli.doctor.core import access, cache, host, network, pool, read_back, serving, versions
from mooncache.cli.doctor.core.facts import Facts
from mooncache.cli.doctor.core.result import CheckResult, failed, of_finding, skipped
from mooncache.topology.core import findings


def groups(facts: Facts) -> dict[str, list[CheckResult]]:
    """Every group with the results of its checks. A group without results has nothing to say here."""
    found = {
        "hosts": list(_hosts(facts)),
        "RDMA and GPUs": list(_devices(facts)),
        "access": list(_access(facts)),
        "network": list(_network(facts)),
        "pool": list(_pool(facts)),
        "serving": list(_serving(facts)),
        "cache": list(_cache(facts)),
    }
    return {name: results for name, results in found.items() if results}


def _hosts(facts: Facts) -> Iterator[CheckResult]:
    for subject, one in facts.hosts.items():
        # Where nodes run, what we would take here ourselves does not count.
        is_node = subject != "here" or facts.pool is None
        yield host.descriptors(subject, one)
        if is_node:
            yield host.memory(subject, one)
            yield host.huge_pages(subject, one)
            yield host.io_uring(subject, one)
            yield from host.disks(subject, one)
            yield host.numa(subject, one)
        if subject == "here":
            yield host.shared_memory(subject, one, needed=facts.uses_vllm)
    yield from pool.supervised(facts)


def _devices(facts: Facts) -> Iterator[CheckResult]:
    offering = (
        [node.node_id for node in facts.pool.nodes if node.offers_rdma] if facts.pool is not None else []
    )
    seen: set[str] = set()
    for subject, one in facts.hosts.items():
        if one.host_id in seen:
            continue  # nodes of one host see the same devices
        seen.add(one.host_id)
        if not one.host.devices and not one.host.gpus:
            yield skipped("RDMA", subject, "no RDMA device and no GPU")
            if offering and subject == "here":
                yield _unused(offering)
            continue
        for finding in findings.of_host(one.host):
            yield of_finding("RDMA", subject, finding)
    if facts.engine_problem:
        fix = "change vllm.extra_args or vllm.dtype here"
        yield failed("engine settings", "here", facts.engine_problem, fix)


def _unused(offering: list[str]) -> CheckResult:
    names = ", ".join(offering[:4])
    return skipped("RDMA", "here", f"{names} offer RDMA; this host has no device for it and uses TCP")


def _access(facts: Facts) -> Iterator[CheckResult]:
    yield access.token(facts)
    for subject, one in facts.hosts.items():
        yield from access.files(subject, one)
        yield from access.certificates(subject, one, facts.now_s)
        yield access.ports_beyond_loopback(subject, one)
    for node in facts.pool.nodes if facts.pool is not None else ():
        yield access.clock(node)
    nodes = {node.node_id for node in facts.pool.nodes if node.clock} if facts.pool is not None else set()
    yield from access.clocks_of_members(facts.members or (), nodes)


def _network(facts: Facts) -> Iterator[CheckResult]:
    yield network.local_ports(facts)
    if facts.pool is None:
        return
    yield from network.from_here(facts.pool, facts.here.host_id)
    yield from network.between_nodes(facts.pool)
    if not facts.pool.error:
        yield from network.far_nodes(facts.pool)


def _pool(facts: Facts) -> Iterator[CheckResult]:
    if facts.pool is None:
        why = "no cluster is known here; `mooncache up` starts one, --master names one"
        yield skipped("master", "pool", why)
        return
    yield pool.masters(facts.pool)
    if facts.pool.error:
        return
    yield pool.directory(facts.pool)
    yield from pool.nodes(facts.pool)
    yield from pool.probe_blocks(facts.pool)
    yield pool.repair(facts.pool)
    yield versions.software(facts)
    yield versions.wire(facts)


def _serving(facts: Facts) -> Iterator[CheckResult]:
    if facts.serving is None:
        return
    yield serving.conductor(facts.serving)
    yield from serving.processes(facts)
    yield from serving.gateways(facts.serving)
    yield from serving.engines(facts.serving)
    if not facts.serving.instances:
        return
    yield from serving.passports(facts.serving)
    yield from serving.agreement(facts)
    yield from read_back.read_back(facts.serving)
    yield from serving.overload(facts.serving)


def _cache(facts: Facts) -> Iterator[CheckResult]:
    if facts.pool is None or facts.pool.error:
        return
    yield cache.hot_node(facts.pool)
    yield from cache.hit_ratio(facts.pool, facts.serving)
    if facts.serving is not None and facts.serving.instances:
        yield from cache.prompts(facts.serving)
