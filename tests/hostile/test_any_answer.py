"""What other processes answer: each answer becomes plain values, or is refused by the error that is meant."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncache.cli.core import samples
from mooncache.client.map_keeper import carry_over, view_of_map
from mooncache.cluster.processes import readable
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.shell.conductor import plan_of
from mooncache.gateway.shell.instance_list import engine_instance_of
from mooncache.gateway.tokens.loading import read_json
from mooncache.proto.v1 import common_pb2, conductor_pb2
from tests.hostile.any_json import DEEP, texts
from tests.hostile.any_message import any_message

# --- conductor and master ---------------------------------------------------------------------------------------------

RESPONSES = any_message(
    conductor_pb2.ScheduleResponse, {"admitted": [True], "instance_id": ["a", "b"], "retry_after_ms": [1500]}
)


@given(RESPONSES, st.booleans())
def test_the_plan_of_a_conductor(response: Any, no_prefill: bool) -> None:
    if not response.admitted:
        with pytest.raises(Refusal) as refused:
            plan_of(response, "m", no_prefill=no_prefill)
        assert refused.value.fault.status in {400, 404, 429, 503}
        return
    plan = plan_of(response, "m", no_prefill=no_prefill)
    assert plan.decode.instance_id == response.decode.instance_id
    assert plan.prefill is None or plan.prefill.instance_id not in {"", plan.decode.instance_id}
    assert not (no_prefill and plan.prefill)


@given(any_message(conductor_pb2.InstanceView, {}))
def test_an_instance_that_a_conductor_lists(view: Any) -> None:
    assert engine_instance_of(view).instance_id == view.instance.instance_id


MAPS = any_message(common_pb2.ClusterMap, {"node_id": ["a", "b"], "state": [1, 2, 3, 4]})


@given(MAPS, MAPS)
def test_a_cluster_map(before: Any, after: Any) -> None:
    carried, fresh = view_of_map(before).nodes, view_of_map(after)
    assert len(fresh.nodes) == len(after.nodes)
    whole = carry_over(fresh, carried)
    assert whole.nodes[: len(fresh.nodes)] == fresh.nodes
    added = whole.nodes[len(fresh.nodes) :]
    assert {node.node_id for node in added}.isdisjoint(node.node_id for node in fresh.nodes)
    assert len({node.index for node in added} | {node.index for node in fresh.nodes}) >= len(added)


# --- metrics pages and log lines --------------------------------------------------------------------------------------

NAMES = st.sampled_from(["t_bucket", "t", "mooncache_requests_total"])
LABELS = st.sampled_from(
    ["", '{le="0.5"}', '{le="+Inf"}', '{le="nan"}', '{le="x"}', '{le="0.5",le="1"}', "{", '{a="\\""}']
)
VALUES = st.sampled_from(["1", "-3", "nan", "+Inf", "1e400", "0x1", ""])
LINES = st.tuples(NAMES, LABELS, VALUES).map(lambda parts: f"{parts[0]}{parts[1]} {parts[2]}")
PAGES = st.lists(LINES | st.text(max_size=40), max_size=8).map("\n".join)


@given(PAGES, PAGES)
@example('t_bucket{le="x"} 1\nt_bucket{le="1"} 2', "")
def test_the_metrics_page_of_a_service(page: str, earlier: str) -> None:
    now, before = samples.parse(page), samples.parse(earlier)
    assert isinstance(samples.total(now, "t"), float | int)
    bounds = samples.buckets(now, "t")
    assert not any(math.isnan(bound) for bound in bounds)
    found = samples.quantile(samples.difference(bounds, samples.buckets(before, "t")), 0.5)
    assert found is None or isinstance(found, float)


@given(texts("timestamp", "level", "event", "reason") | st.text(max_size=60))
def test_a_log_line_of_a_service(line: str) -> None:
    assert isinstance(readable(line), str)


# --- a model's folder -------------------------------------------------------------------------------------------------


@given(st.binary(max_size=60) | texts("chat_template", "bos_token").map(str.encode))
@example(DEEP.encode())
@example(b"\xff\xfe")
def test_a_file_of_a_tokenizer(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "tokenizer_config.json"
    path.write_bytes(content)
    try:
        found = read_json(path)
    except ValueError:
        return
    assert repr(json.loads(content)) == repr(found)
