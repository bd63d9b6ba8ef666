"""What one engine answers by itself: the tokens that every other way has to give."""

from __future__ import annotations

import json
import urllib.request

from mooncache.auth import engine_key, load_cluster_token
from mooncache.cluster.embedded import EmbeddedCluster


def alone(cluster: EmbeddedCluster, text: str, tokens: int) -> str:
    """One engine's own answer, without gateway, keys of a tenant, or anything cached."""
    row = next(row for row in cluster.describe_instances() if row["instance_id"] == "prefill-1")
    body = {
        "model": row["model"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "cache_salt": f"apart {text[:16]}",
    }
    request = urllib.request.Request(
        f"{row['url']}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {engine_key(load_cluster_token(cluster.token_path))}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])
