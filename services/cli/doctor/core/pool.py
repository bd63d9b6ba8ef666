"""Masters, store nodes, copies, and a block that goes to each node and comes back."""

from __future__ import annotations

from collections.abc import Iterator

from mooncache.cli.doctor.core.facts import Facts, PoolFacts
from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned
from mooncache.reporting.output import human_bytes

PINNED_SHARE_MAX = 0.8


def masters(pool: PoolFacts) -> CheckResult:
    """Whether one leads."""
    if pool.error:
        fix = "check that `mooncache master` runs, and cluster.master_targets (`mooncache config explain --set-only`)"
        return failed("master", "pool", pool.error, fix)
    others = pool.masters - 1
    return passed(
        "master", "pool", f"{pool.master_id} leads" + (f", {others} stand by" if others > 0 else "")
    )


def directory(pool: PoolFacts) -> CheckResult:
    """Whether the master knows all blocks."""
    if pool.error:
        return skipped("directory", "pool", "no master answers")
    if not pool.directory_complete:
        return warned("directory", "pool", "is being rebuilt", "wait: nodes report within seconds")
    return passed("directory", "pool", "is complete")


def nodes(pool: PoolFacts) -> Iterator[CheckResult]:
    """State and memory of each node, as the master sees them."""
    if pool.error:
        yield skipped("store nodes", "pool", "no master answers")
    elif not any(node.state == "active" for node in pool.nodes):
        yield failed("store nodes", "pool", "none is active", "start one: `mooncache store-node`")
    for node in pool.nodes:
        if node.arena_gone:
            text = "the memory of its blocks does not answer (a GPU that hangs): it takes no blocks"
            yield failed("store nodes", node.node_id, text, "`nvidia-smi` on its host; then restart the node")
        elif node.state == "draining":
            text = "is draining: it takes no new blocks"
            yield warned(
                "store nodes", node.node_id, text, f"`mooncache drain {node.node_id} --cancel` to keep it"
            )
        elif node.state != "active":
            text = f"is {node.state}, last heard of {node.heartbeat_age_s:.0f} s ago"
            yield failed(
                "store nodes", node.node_id, text, "see its log, and restart it; repair copies what is short"
            )
        elif node.capacity_bytes and node.pinned_bytes > node.capacity_bytes * PINNED_SHARE_MAX:
            pinned = f"{human_bytes(node.pinned_bytes)} of {human_bytes(node.capacity_bytes)}"
            text = f"{pinned} are pinned: puts find no space"
            yield warned(
                "store nodes",
                node.node_id,
                text,
                "`mooncache unpin`, or shorter pins; see `mooncache status`",
            )
        else:
            yield passed("store nodes", node.node_id, "is active")


def probe_blocks(pool: PoolFacts) -> Iterator[CheckResult]:
    """A block written to each node, read back, compared and removed, by the client that engines use."""
    for node in pool.nodes:
        if node.probe is None:
            yield skipped("probe block", node.node_id, f"the node is {node.state}")
        elif node.probe.error and node.error:
            yield skipped("probe block", node.node_id, "the node does not answer")
        elif node.probe.error:
            text = f"a block does not get there and back: {node.probe.error.rstrip('.')}"
            yield failed(
                "probe block", node.node_id, text, f"open the data port {node.data} to clients; see its log"
            )
        else:
            text = f"put {node.probe.put_ms:.1f} ms, get {node.probe.get_ms:.1f} ms, bytes equal, removed"
            yield passed("probe block", node.node_id, text)


def repair(pool: PoolFacts) -> CheckResult:
    """Whether blocks have their copies."""
    found = pool.repair
    if found is None:
        return skipped("copies", "pool", "the master did not say")
    if found["state"] == "off":
        return skipped("copies", "pool", "one copy of each block is wanted")
    if found["state"] == "blocked":
        text = f"{found['short_block_count']} blocks have too few copies; no more can be made: {found['resting_code']}"
        return failed("copies", "pool", text, "`mooncache repair status`; add a node, or free memory")
    if found["short_block_count"]:
        text = f"{found['short_block_count']} blocks have too few copies; repair is {found['state']}"
        return warned("copies", "pool", text, "`mooncache repair status --wait` follows it")
    return passed("copies", "pool", "every block has its copies")


def supervised(facts: Facts) -> Iterator[CheckResult]:
    """What the supervisor of `mooncache up` had to do on this machine."""
    for name, problem in facts.parts:
        yield warned("processes here", name, problem, f"see its log: logs/{name}.log in the state folder")
