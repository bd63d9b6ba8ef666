"""`mooncache doctor`: is everything there, does it work together, and what to do where it does not.

The findings are a pure function of one snapshot of the cluster, so that every sentence can be tested.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mooncache.cli.common import AsJson, Where
from mooncache.cli.findings import report
from mooncache.cli.snapshot import ClusterPoller, ClusterSnapshot
from mooncache.conductor.core.registry import InstanceState
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.v1 import common_pb2
from mooncache.topology import machine
from mooncache.topology.core import choose
from mooncache.topology.core.findings import BAD, OK, WARN, Finding
from mooncache.worker.adapters.vllm import why_refused


def findings(
    snapshot: ClusterSnapshot,
    *,
    conductor_target: str,
    gateway_url: str,
    rdma_reason: str | None = None,
    engine_problem: str = "",
) -> list[Finding]:
    """What one snapshot says, the pool first.

    Args:
        snapshot: what answered.
        conductor_target, gateway_url: where they should be; "" when there are none.
        rdma_reason: why this host does without RDMA, "" when it does not.
        engine_problem: why an engine, as this host is configured, must not be started; "" when nothing is wrong.
    """
    found = [*_pool(snapshot), *_rdma(snapshot, rdma_reason)]
    if engine_problem:
        found.append(
            Finding(BAD, "vLLM's settings", engine_problem, "change vllm.extra_args or vllm.dtype here")
        )
    if not conductor_target:
        return [*found, Finding(OK, "serving", "a pool alone: no conductor is configured here")]
    if snapshot.conductor_error:
        advice = "check that `mooncache conductor` runs and that cluster.conductor_target is its address"
        return [*found, Finding(BAD, "conductor", snapshot.conductor_error, advice)]
    found.append(Finding(OK, "conductor", f"answers at {conductor_target}"))
    if gateway_url:
        reason = snapshot.gateway_reason
        found.append(
            Finding(BAD, "gateway", reason, "see its log; it is ready once its engines are")
            if reason
            else Finding(OK, "gateway", f"ready at {gateway_url}/v1")
        )
    return [*found, *_instances(snapshot.instances or [])]


def _pool(snapshot: ClusterSnapshot) -> list[Finding]:
    if snapshot.status is None:
        message = snapshot.master_error.message if snapshot.master_error is not None else "did not answer"
        return [
            Finding(BAD, "master", message, "check that `mooncache master` runs and cluster.master_targets")
        ]
    found = [Finding(OK, "master", "a leader answers")]
    if not snapshot.status.directory_complete:
        found.append(Finding(WARN, "directory", "is being rebuilt", "wait: nodes report within seconds"))
    nodes = list(snapshot.status.nodes)
    active = [node for node in nodes if node.node.state == common_pb2.NODE_STATE_ACTIVE]
    if not active:
        found.append(Finding(BAD, "store nodes", "none is active", "start one: `mooncache store-node`"))
    elif len(active) < len(nodes):
        names = ", ".join(
            node.node.node_id for node in nodes if node.node.state != common_pb2.NODE_STATE_ACTIVE
        )
        found.append(Finding(WARN, "store nodes", f"not active: {names}", "see their logs"))
    else:
        found.append(Finding(OK, "store nodes", f"{len(active)} active"))
    return found


def _rdma(snapshot: ClusterSnapshot, reason: str | None) -> list[Finding]:
    """Whether the RDMA that nodes offer is used from here; nothing where none offers it."""
    nodes = [] if snapshot.status is None or reason is None else snapshot.status.nodes
    offering = [node.node.node_id for node in nodes if any(rail.up for rail in node.node.rails)]
    if not offering:
        return []
    offer = f"offered by {len(offering)} of {len(nodes)} nodes"
    if not reason:
        return [Finding(OK, "RDMA", f"{offer}, and this host has a port for it")]
    advice = "`mooncache doctor rdma` on each host says what to fix"
    return [Finding(WARN, "RDMA", f"{offer}, but not used from this host: {reason}", advice)]


def _instances(rows: list[dict[str, Any]]) -> list[Finding]:
    if not rows:
        return [Finding(BAD, "engines", "none is registered", "start one: `mooncache worker`")]
    found = []
    for row in rows:
        name = f"engine {row['instance_id']}"
        if row["state"] != InstanceState.READY:
            advice = (
                "see its worker's log"
                if row["state"] != InstanceState.STARTING
                else "wait until it has loaded"
            )
            found.append(
                Finding(WARN, name, f"is {row['state']}: {row['reason'] or 'no reason given'}", advice)
            )
        elif not row["pool"]:
            advice = "set connector.enabled, or give an attached vLLM the connector (docs/vllm-connector.md)"
            found.append(Finding(WARN, name, "does not use the pool", advice))
        elif row["apart"]:
            advice = "start both with equal model, type, block size and engine version, or name the models differently"
            found.append(Finding(BAD, name, row["apart"], advice))
        else:
            found.append(Finding(OK, name, f"{row['role']}, {row['engine']} serves {row['model']}"))
    for model in sorted({row["model"] for row in rows}):
        roles = {row["role"] for row in rows if row["model"] == model and row["state"] == InstanceState.READY}
        if roles == {InstanceRole.PREFILL}:
            found.append(
                Finding(
                    BAD, f"model {model}", "has no engine that decodes", "start one with worker.role decode"
                )
            )
    return found


def doctor(*, where: Where = Where(), json: AsJson = False) -> int:  # noqa: B008  (frozen, shared on purpose)
    """Look at everything once and say what is wrong and what to do. Exit code 1 when something is.

    For example:

        mooncache doctor
    """

    async def poll() -> list[Finding]:
        poller = ClusterPoller(where)
        try:
            seen = await poller.poll(with_metrics=False)
        finally:
            await poller.close()
        return findings(
            seen,
            conductor_target=poller.conductor_target,
            gateway_url=poller.gateway_url,
            rdma_reason=choose.why_none(machine.look()),
            engine_problem=why_refused(poller.config) if poller.config.worker.engine == "vllm" else "",
        )

    return report(asyncio.run(poll()), as_json=json)
