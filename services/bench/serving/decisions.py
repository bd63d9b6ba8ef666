"""What the conductor recorded of one request: the legs' cache reports and the time line of `mooncache why`."""

from __future__ import annotations

import json
from typing import Any, Final

from mooncache.auth import load_cluster_token
from mooncache.client.conductor_link import ConductorLink
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.config import load
from mooncache.proto.v1 import conductor_pb2 as pb

_CALL_S: Final = 5.0


async def decision_of(cluster: EmbeddedCluster, name: str) -> dict[str, Any]:
    """The record of a decision or a request, by its id. Raises DecisionUnknown, ConductorUnavailable."""
    token = load_cluster_token(cluster.token_path).text
    target = cluster.layout.conductor_target
    channel = ConductorLink(target, token, load(env={}), listen=False)
    try:
        request = pb.GetDecisionRequest(id=name)
        answer = await channel.call("GetDecision", request, pb.GetDecisionResponse, _CALL_S)
    finally:
        await channel.close()
    found: dict[str, Any] = json.loads(answer.record_json)
    return found


def cache_reports(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The last cache report of each leg, by its role; a leg that reported nothing is left out."""
    return {
        leg["leg"]: leg["cache"] for event in record["events"] for leg in event["legs"] if leg.get("cache")
    }
