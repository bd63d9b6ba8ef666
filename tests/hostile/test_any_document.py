"""Documents from people, clients and other processes: each is understood, or refused by the error that is meant."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mooncache.cli import announce, detach
from mooncache.cli.topology import _document, _read_peer
from mooncache.errors import ClusterInvalid, InvalidArgument, ModelTooLarge, MooncacheError, ProfileInvalid
from mooncache.gateway.tokens.template import Unreadable, conversation, tool_schemas
from mooncache.simulate import description
from mooncache.simulate.cluster import ClusterSpec
from mooncache.topology.core import findings
from mooncache.topology.core.model import Gid, GidKind, Host, Port, RdmaDevice
from tests.hostile.any_json import DEEP, JSON, objects, texts

# --- tool calls of a chat request, in the gateway ---------------------------------------------------------------------

ARGUMENTS = texts("a", "b") | JSON | st.just('{"a":' * 900 + "1" + "}" * 900) | st.just("9" * 5000)
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": JSON, "arguments": ARGUMENTS}) | JSON},
    optional={"type": st.just("function") | JSON, "id": JSON},
)


@given(st.lists(CALLS, max_size=3) | JSON, st.booleans())
@example([{"function": {"name": "f", "arguments": DEEP}}], True)
@example([{"function": {"name": "f", "arguments": '{"a": NaN, "b": 1e999}'}}], True)
def test_the_tool_calls_of_a_message(calls: Any, structured: bool) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    before = repr(message)
    try:
        found = conversation([message], structured=structured)
    except Unreadable:
        found = []
    for call in found[0].get("tool_calls", []) if found else []:
        assert set(call) == {"id", "type", "function"}
        assert isinstance(call["function"]["arguments"], dict), "a template walks it"
    assert repr(message) == before, "the client's body goes on to the engine as it came"


@given(st.lists(objects("function", "name", "type", "defer_loading"), max_size=3) | JSON)
def test_the_tools_of_a_request(tools: Any) -> None:
    try:
        found = tool_schemas(tools)
    except Unreadable:
        return
    assert found is None or all(isinstance(tool["function"]["name"], str) for tool in found)


# --- what another host printed ----------------------------------------------------------------------------------------

ADDRESS = Gid.read(1, "10.9.0.1", GidKind.ROCE_V2)
HERE = Host("here", devices=(RdmaDevice("mlx5_0", (Port(1, "ACTIVE", "Ethernet", 100.0, gids=(ADDRESS,)),)),))
WORDS = (
    "ACTIVE",
    "Ethernet",
    "InfiniBand",
    GidKind.IB,
    GidKind.ROCE_V2,
    ADDRESS.value,
    "fe80:0000:0000:0000:0000:0000:0000:0001",
)
NUMBERS = st.sampled_from([0, 1, -1, 255, 1 << 31, 1 << 64, 10**400])
RATES = st.sampled_from([0.0, -1.0, 100.0, 1.7e308]) | NUMBERS
TEXT = st.sampled_from(WORDS) | st.text(max_size=8)
GIDS = st.fixed_dictionaries({"index": NUMBERS, "value": TEXT, "kind": TEXT})
VERDICTS = st.fixed_dictionaries(
    {"usable": st.booleans()}, optional={"gid": GIDS | st.none(), "reason": TEXT, "megabits_per_s": NUMBERS}
)
PORTS = st.fixed_dictionaries(
    {"number": NUMBERS, "state": TEXT, "link_layer": TEXT, "rate_gbps": RATES},
    optional={"gids": st.lists(GIDS, max_size=2), "verdict": VERDICTS | st.none(), "mtu_bytes": NUMBERS},
)
DEVICES = st.fixed_dictionaries(
    {"name": TEXT, "ports": st.lists(PORTS, max_size=2)}, optional={"usable": st.booleans()}
)
HOSTS = st.fixed_dictionaries(
    {"name": TEXT}, optional={"devices": st.lists(DEVICES, max_size=2), "rails_max": NUMBERS}
)
PRINTED = HOSTS.map(lambda host: json.dumps({"host": host})) | texts("host", "name", "devices")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(PRINTED.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=100))
@example(f'{{"host": {{"name": "n"}}, "unknown": {DEEP}'.encode())
def test_what_another_host_printed(tmp_path: Path, data: bytes) -> None:
    saved = tmp_path / "there.json"
    saved.write_bytes(data)
    try:
        there = _read_peer(saved)
    except InvalidArgument:
        return
    assert all(finding.grade in ("ok", "warn", "bad") for finding in findings.between_hosts(HERE, there))
    assert json.loads(msgspec.json.encode(_document(HERE, there)))["peer"]["transport"] in (
        "shm",
        "tcp",
        "rdma",
    )


# --- descriptions of clusters -----------------------------------------------------------------------------------------

VALUES = JSON | st.sampled_from(
    ["prefill", "decode", "both", "lru", "fail", "decode-0", 10**400, -1, 0, 1e308, 512]
)
POINTS = st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=3, max_size=4) | VALUES
COSTS = st.dictionaries(
    st.sampled_from(["points", "a_s", "b_s_per_token", "c_s_per_token2", "base_s", "per_sequence_s"]),
    POINTS | VALUES,
    max_size=3,
)
PROFILES = (
    st.just("llama3-70b-8xa800")
    | st.dictionaries(
        st.sampled_from(["base", "name", "prefill", "decode", "gpus", "weights_bytes", "kv_bytes_per_token"]),
        st.just("llama3-70b-8xa800") | COSTS | VALUES,
    )
    | VALUES
)
FIELDS = (
    *(
        "role",
        "count",
        "name",
        "dram_blocks",
        "nic_in_gbps",
        "eviction",
        "ssd_write_gbytes_per_s",
        "pipeline_size",
    ),
    *(
        "kv_capacity_tokens",
        "inline",
        "chunk_tokens",
        "ttft_s",
        "tbt_s",
        "enabled",
        "every_s",
        "at_s",
        "kind",
        "instance",
    ),
)
ROWS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
GROUPS = st.tuples(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["both", "decode", "prefill"]), "count": st.integers(1, 3)}
    ),
    ROWS,
).map(lambda parts: {**parts[0], **parts[1]})
TABLES = st.fixed_dictionaries(
    {"instances": st.lists(GROUPS, min_size=1, max_size=2) | VALUES},
    optional={
        **dict.fromkeys(("slo", "roles", "replication"), ROWS | VALUES),
        **dict.fromkeys(("name", "pool", "block_tokens", "first_token", "nonsense"), VALUES),
        "events": st.lists(ROWS, max_size=2) | VALUES,
        "profile": PROFILES,
    },
)


def toml(value: Any) -> str:
    """A value as TOML writes it inline. Nothing is no value there."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps("nothing" if value is None else value)


@settings(max_examples=300)
@given(TABLES)
@example({"instances": [{"role": "both", "count": 10**400}]})
@example(
    {"instances": [{"role": "both", "count": 1}], "profile": {"base": "llama3-70b-8xa800", "gpus": 10**400}}
)
def test_a_description_of_a_cluster(tables: dict[str, Any]) -> None:
    """The syntax of TOML is tried in tests/config/test_small_files.py; here are the values."""
    text = "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in tables.items())
    try:
        spec = description.parse(text)
    except (ClusterInvalid, ProfileInvalid, ModelTooLarge):
        return
    assert isinstance(spec, ClusterSpec)
    assert description.parse(description.to_toml(spec)) == spec


# --- the pipe from a cluster that starts behind the terminal ----------------------------------------------------------

LINES = texts("tell", "document", "error", "token_created", "code", "message") | st.sampled_from(
    ['{"tell": ["master", "ready"]}', '{"error": {"code": 200, "message": "gone"}}', '{"document": {}}', "{"]
)


@given(st.lists(LINES, max_size=3), st.booleans())
def test_the_words_of_a_start_behind_the_terminal(lines: list[str], as_json: bool) -> None:
    """The document itself comes from the same program; what may happen is that the child is killed while it writes."""
    pipe = io.StringIO("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detach, "print_json", lambda document: None)
        patch.setattr(announce, "show", lambda document, **options: None)
        with contextlib.suppress(MooncacheError):
            assert detach._show(pipe, as_json=as_json) == 0
