"""What `mooncache up --role` says once its parts work: what runs on this machine, and whose cluster it belongs to."""

from __future__ import annotations

import os
from typing import Any

from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import ServiceKind
from mooncache.reporting.output import console, print_table

_WHAT = {
    ServiceKind.STORE_NODE: "store node",
    ServiceKind.WORKER: "engine",
    ServiceKind.GATEWAY: "OpenAI-compatible HTTP",
}


def document_of_roles(cluster: EmbeddedCluster) -> dict[str, object]:
    """Everything about the parts on this machine."""
    return {
        "roles": list(cluster.settings.roles),
        "master_targets": cluster.master_target.split(","),
        "conductor_target": cluster.layout.conductor_target,
        "base_url": f"{cluster.layout.gateway_url}/v1" if cluster.layout.gateway_url else "",
        "state_dir": str(cluster.state_dir),
        "pid": os.getpid(),
        "parts": [
            {"name": name, "service": part.service, "pid": part.pid, "control": part.control}
            for name, part in cluster.parts.items()
        ],
    }


def show_roles(document: dict[str, Any], *, detached: bool) -> None:
    """Print what runs here, and what to do next."""
    rows = [
        (part["name"], part["pid"], _WHAT[ServiceKind(part["service"])], part["control"])
        for part in document["parts"]
    ]
    console.print()
    print_table("", ("part", "pid", "what", "endpoint"), rows)
    masters = ", ".join(document["master_targets"])
    console.print(f"\nfor the cluster of {masters}", markup=False, soft_wrap=True)
    if document["base_url"]:
        console.print(f"requests: {document['base_url']}", markup=False, soft_wrap=True)
    console.print(
        "\nlook at it: `mooncache status`, here or on any other machine of the cluster", soft_wrap=True
    )
    console.print(f"logs   {document['state_dir']}/logs", style="dim", markup=False, soft_wrap=True)
    end = "`mooncache down` stops" if detached else "Ctrl-C stops"
    console.print(f"\n{end} what runs on this machine.\n")
