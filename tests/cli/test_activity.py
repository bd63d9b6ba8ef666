"""What `mooncache top` works out of two looks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mooncache.cli.core.activity import (
    gateway_activity,
    gateway_samples,
    instance_activity,
    node_activity,
    summed_activity,
)
from mooncache.cli.core.samples import buckets, difference, increase, parse, quantile, total
from mooncache.cli.top_view import frame

TEXT = """\
# HELP mooncache_gateway_requests_total HTTP requests by endpoint and status.
# TYPE mooncache_gateway_requests_total counter
mooncache_gateway_requests_total{endpoint="chat",status="200"} 40.0
mooncache_gateway_requests_total{endpoint="chat",status="429"} 2.0
mooncache_gateway_prompt_tokens_total{model="a \\"quoted\\", name"} 1000.0
mooncache_gateway_cached_tokens_total{model="a"} 750.0
mooncache_gateway_ttft_seconds_bucket{model="a",le="0.1"} 5.0
mooncache_gateway_ttft_seconds_bucket{model="a",le="0.2"} 15.0
mooncache_gateway_ttft_seconds_bucket{model="a",le="+Inf"} 20.0
mooncache_gateway_requests_open 3.0
nonsense
mooncache_gateway_wrong value
"""


def test_parse_and_total() -> None:
    samples = parse(TEXT)
    assert total(samples, "mooncache_gateway_requests_total") == 42
    assert total(samples, "mooncache_gateway_requests_total", status="429") == 2
    assert total(samples, "mooncache_gateway_prompt_tokens_total") == 1000
    assert total(samples, "unknown") == 0


def test_quantile() -> None:
    bounds = buckets(parse(TEXT), "mooncache_gateway_ttft_seconds")
    assert quantile(bounds, 0.5) == pytest.approx(0.15)
    assert quantile(bounds, 0.99) == pytest.approx(0.2), "beyond the last finite bound"
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None
    assert difference(bounds, {0.1: 5.0}) == {0.1: 0.0, 0.2: 15.0, float("inf"): 20.0}
    assert difference(bounds, {0.1: 99.0}) == bounds, "a restarted process began at 0 again"


def test_a_restart_is_no_negative_rate() -> None:
    assert increase(5, 3) == 2
    assert increase(5, 100) == 5


def test_gateway() -> None:
    now = parse(TEXT)
    before = dict(now)
    key = ("mooncache_gateway_requests_total", frozenset({("endpoint", "chat"), ("status", "200")}))
    before[key] = 20.0
    row = gateway_activity(now, before, 2.0)
    assert row["requests_per_s"] == 10.0
    assert row["requests_open"] == 3
    assert row["cached_share"] == 0.75, "nothing in the interval: since the start"
    assert row["ttft_p50_ms"] == pytest.approx(150)
    assert gateway_activity({}, {}, 1.0)["ttft_p50_ms"] is None


def instance(**changes: float) -> dict[str, object]:
    names = ("prompt_tokens_total", "output_tokens_total", "local_hit_tokens_total", "pool_hit_tokens_total")
    return {"instance_id": "decode-1", **dict.fromkeys(names, 0), **changes}


def test_instances() -> None:
    now = [instance(prompt_tokens_total=100, output_tokens_total=50, pool_hit_tokens_total=300)]
    (row,) = instance_activity(now, [instance(prompt_tokens_total=80)], 4.0)
    assert row["prompt_tokens_per_s"] == 5
    assert row["hit_share"] == 0.75
    (new,) = instance_activity(now, [], 1.0)
    assert new["prompt_tokens_per_s"] == 0, "nothing is known about the time before"
    (idle,) = instance_activity([instance()], [], 1.0)
    assert idle["hit_share"] is None


def test_nodes() -> None:
    node = {
        "node_id": "n",
        "state": "active",
        "capacity_bytes": 10,
        "used_bytes": 5,
        "block_count": 1,
        "pinned_bytes": 0,
    }
    text = 'mooncache_store_node_hits_total 10.0\nmooncache_store_node_misses_total{reason="not_found"} 4.0\n'
    assert node_activity(node, parse(text), {}, 2.0)["hits_of_unlimited"] is None, "it was asked for no chain"
    text += "mooncache_store_node_store_sampled_found_total 30.0\n"
    text += "mooncache_store_node_store_sampled_unlimited_total 40.0\n"
    row = node_activity(node, parse(text), {}, 2.0)
    assert row["hits_per_s"] == 5
    assert row["misses_per_s"] == 2
    assert row["hits_of_unlimited"] == 0.75
    assert node_activity(node, {}, parse(text), 2.0)["hits_per_s"] == 0


def test_disks_of_nodes_are_a_part_of_the_frame() -> None:
    node = dict.fromkeys(("capacity_bytes", "used_bytes", "block_count", "pinned_bytes"), 10)
    node |= {"node_id": "n", "state": "active"}
    text = (
        "mooncache_store_node_ssd_capacity_bytes 2147483648.0\nmooncache_store_node_ssd_block_bytes 1073741824.0\n"
        "mooncache_store_node_ssd_blocks 4096.0\nmooncache_store_node_ssd_reads_total 50.0\n"
    )

    def shown(metrics: str) -> str:
        row = node_activity(node, parse(metrics), parse("mooncache_store_node_ssd_reads_total 10.0\n"), 2.0)
        document = {"gateway_url": "", "master": None, "gateway": None, "conductor": None, "instances": []}
        console = Console(width=160, file=io.StringIO())
        console.print(frame({**document, "nodes": [row], "problems": []}, 160))
        return console.file.getvalue()  # type: ignore[attr-defined]

    with_disks = shown(text)
    assert "on disk" in with_disks
    assert "1.0 GiB" in with_disks and "2.0 GiB" in with_disks and "20" in with_disks
    assert "on disk" not in shown("")


def test_gateways_of_all_hosts_count_together() -> None:
    now = parse(TEXT)
    key = ("mooncache_gateway_requests_total", frozenset({("endpoint", "chat"), ("status", "200")}))
    before = {**now, key: 20.0}
    looked = {"gateway": now, "https://b:8000": now, "node-1": parse("x 1")}
    gateways = gateway_samples(looked)
    assert set(gateways) == {"gateway", "https://b:8000"}
    row = summed_activity(gateways, {"gateway": before, "https://b:8000": before}, 2.0)
    assert row is not None and (row["requests_per_s"], row["requests_open"]) == (20.0, 6)
    row = summed_activity(gateways, {"gateway": before}, 2.0)
    assert row is not None and row["requests_per_s"] == 10.0, "one that was not seen before is no burst"
    assert summed_activity({}, {}, 2.0) is None
