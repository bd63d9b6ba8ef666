"""The tenant of a request reaches the store nodes: its blocks, hits and moves are the tenant's, and of no other."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from openai import OpenAI

import mooncache
from mooncache.auth import load_cluster_token, session_token, tenant_token
from mooncache.cli.app import run as cli
from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import wait_until

PROMPT = "The tides follow the moon, and the sun adds its part. " * 40


def figures_of(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], tenant: str) -> dict[str, int]:
    capsys.readouterr()
    assert cli(["tenant", "ls", "--state-dir", str(cluster.state_dir), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["tenants"].get(tenant, {})
    return dict(found.get("figures", {}))


def ask(base_url: str, key: str, model: str) -> Any:
    with OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=100) as client:
        messages: Any = [{"role": "user", "content": PROMPT}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=4, temperature=0, seed=1
        )


def test_blocks_of_a_request_are_its_tenants(
    cluster: EmbeddedCluster, base_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    token = load_cluster_token(cluster.state_dir / "cluster.token")
    keys = {name: tenant_token(token, name).text for name in ("moon", "sun")}
    before = figures_of(cluster, capsys, "default").get("stored_blocks", 0)
    first = ask(base_url, keys["moon"], model)
    wait_until(
        lambda: figures_of(cluster, capsys, "moon").get("stored_blocks", 0) > 0, "its blocks are stored"
    )
    again = ask(base_url, keys["moon"], model)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    moon = figures_of(cluster, capsys, "moon")
    assert moon["bytes"] > 0
    wait_until(
        lambda: figures_of(cluster, capsys, "moon")["hits"] > 0,
        "the decode engine has loaded what the prefill engine has stored",
    )
    assert figures_of(cluster, capsys, "default").get("stored_blocks", 0) == before

    other = ask(base_url, keys["sun"], model)
    assert other.usage.prompt_tokens_details.cached_tokens == 0, "nothing of another tenant is used"
    assert other.choices[0].message.content == first.choices[0].message.content
    with mooncache.connect(state_dir=str(cluster.state_dir)) as own:
        with own.for_tenant(session_token(token, "moon", time.time()).text) as one:
            stored = {entry.key for entry in one.list()}
        assert stored
        with own.for_tenant(session_token(token, "sun", time.time()).text) as another:
            assert stored.isdisjoint(entry.key for entry in another.list())
            assert not any(another.exists_many(sorted(stored)))


def test_a_purged_tenant_computes_again(
    cluster: EmbeddedCluster, base_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tenant_token(load_cluster_token(cluster.state_dir / "cluster.token"), "stars").text
    first = ask(base_url, key, model)
    wait_until(lambda: figures_of(cluster, capsys, "stars").get("blocks", 0) > 0, "its blocks are stored")
    where = ["--state-dir", str(cluster.state_dir)]
    assert cli(["tenant", "purge", "stars", "--yes", *where]) == 0
    assert figures_of(cluster, capsys, "stars")["bytes"] == 0
    assert ask(base_url, key, model).choices[0].message.content == first.choices[0].message.content
