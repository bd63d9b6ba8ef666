"""What tests of tiers and of kept memory ask while nodes come and go: no answer yet is an answer, too."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from typing import Any

import pytest

import mooncache
from mooncache.cli.app import run as cli
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MooncacheError


def counter(cluster: EmbeddedCluster, node: str, name: str) -> int:
    """A metric of a node, without the beginning that all of them have."""
    with urllib.request.urlopen(f"http://{cluster.parts[node].metrics}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(rf"^mooncache_store_node_{name}(?:_total)? ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return int(float(found[1]))


def reaches(cluster: EmbeddedCluster, node: str, name: str, least: int) -> bool:
    """Whether the counter is so high; False while the node starts."""
    with contextlib.suppress(OSError):
        return counter(cluster, node, name) >= least
    return False


def tier_of(client: mooncache.Client, key: str) -> str:
    """The tier of a block; "" for a miss or while its node does not answer."""
    with contextlib.suppress(MooncacheError):
        found = client.stat(key)
        return found.tier if found else ""
    return ""


def read(client: mooncache.Client, key: str) -> bytes | None:
    """The bytes of a block; None for a miss or while its node does not answer."""
    with contextlib.suppress(MooncacheError):
        found = client.get(key)
        return None if found is None else bytes(found)
    return None


def value_of(number: int, size: int = 64 << 10) -> bytes:
    """The bytes of a block that has this number."""
    return number.to_bytes(4, "little") * (size // 4)


def found(client: mooncache.Client, key: str) -> bool | None:
    """Whether a block is there; None while its node cannot be asked."""
    try:
        return client.exists(key)
    except MooncacheError:
        return None


def known(client: mooncache.Client, keys: list[str]) -> set[str]:
    """Those of the blocks that are there, as far as their nodes can be asked."""
    return {key for key in keys if found(client, key)}


def stored(client: mooncache.Client, key: str, value: bytes) -> bool:
    """Whether a put has succeeded."""
    try:
        client.put(key, value)
    except MooncacheError:
        return False
    return True


def writer(cluster: EmbeddedCluster, name: str, **settings: Any) -> mooncache.Client:
    return mooncache.connect(**cluster.client_settings(), client_name=name, build=f"{name} 1.0", **settings)


def asked(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = cli([*words, "--state-dir", str(cluster.settings.state_dir), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out.strip() else None
