"""What the adapter tells vLLM, as vLLM itself reads it, and which engines it does not start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.config import load
from mooncache.errors import ConfigInvalid
from mooncache.gateway.core import body
from mooncache.gateway.core.queue_place import queue_place
from mooncache.kvcache.leg_hint import LegHint, LegRole
from mooncache.worker.adapters import vllm
from mooncache.worker.adapters.base import option
from mooncache.worker.adapters.vllm import VllmAdapter, why_refused
from mooncache.worker.core.facts import facts_from_file, merged
from tests.worker.test_engine_guard import launch

DIGESTS = ("weights_digest", "config_digest", "tokenizer_digest", "engine", "kv_dtype", "kv_layout")


def arguments_of(folder: Path, **settings: Any) -> list[str]:
    config = load(env={}, overrides={f"vllm.{name}": value for name, value in settings.items()})
    return list(VllmAdapter(config).command(launch(folder)).arguments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), ""),
        (("--chat-template", "/a.jinja", "--port", "1"), "/a.jinja"),
        (("--chat-template=/a_b.jinja",), "/a_b.jinja"),
        (("--chat_template", "x_y"), "x_y"),
        (("--chat-template", "a", "--chat-template", "b"), "b"),
        (("--chat-template",), ""),
    ],
)
def test_the_connector_hears_of_the_servers_chat_template(
    tmp_path: Path, arguments: tuple[str, ...], wanted: str
) -> None:
    command = arguments_of(tmp_path, extra_args=arguments)
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"]["mooncache.chat_template"] == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("domains", [(), ("images.example",)])
def test_vllm_fetches_nothing_from_hosts_that_are_not_allowed(
    tmp_path: Path, domains: tuple[str, ...]
) -> None:
    """Clients name images by URL: without this vLLM asks whatever its host reaches, metadata services too."""
    pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.multimodal.media import MediaConnector
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = arguments_of(tmp_path, media_domains=domains, enforce_eager=True)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given[given.index("serve") + 1 :])
    assert args.enforce_eager
    connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
    for host in ("169.254.169.254", "127.0.0.1:1", "localhost:1", "[::1]:1", "other.example"):
        with pytest.raises(ValueError, match="allowed domains"):
            connector.load_from_url(f"http://{host}/latest", None)
    assert args.allowed_media_domains == [*(domains or ["none.invalid"])]
    env = VllmAdapter(load(env={}, overrides={})).command(launch(tmp_path)).env
    assert env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


@pytest.mark.parametrize(
    ("endpoint", "address", "protocol"),
    [
        ("http://collector:4317", "http://collector:4317", "grpc"),
        ("http://collector:4318", "http://collector:4318/v1/traces", "http/protobuf"),
    ],
)
def test_engines_send_their_spans_where_ours_go(
    tmp_path: Path, endpoint: str, address: str, protocol: str
) -> None:
    config = load(env={}, overrides={"tracing.endpoint": endpoint})
    command = VllmAdapter(config).command(launch(tmp_path))
    assert command.arguments[command.arguments.index("--otlp-traces-endpoint") + 1] == address
    assert command.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == protocol


@pytest.mark.parametrize(
    ("arguments", "orders"),
    [
        ((), True),
        (("--scheduling-policy=fcfs",), False),
        (("--scheduling-policy", "priority"), True),
        (("--scheduling_policy=priority",), True),
        (("--scheduling-policy", "priority", "--scheduling-policy", "fcfs"), False),
    ],
)
def test_vllm_orders_by_priority_unless_its_operator_says_otherwise(
    tmp_path: Path, arguments: tuple[str, ...], orders: bool
) -> None:
    config = load(env={}, overrides={"vllm.extra_args": arguments})
    adapter = VllmAdapter(config)
    assert adapter.orders_by_priority == orders
    command = adapter.command(launch(tmp_path)).arguments
    assert (option(command, "--scheduling-policy") == "priority") == orders, "vLLM takes the last one"


@pytest.mark.parametrize(("arguments", "orders"), [((), False), (("--scheduling-policy=priority",), True)])
def test_an_attached_vllm_orders_by_priority_only_where_its_operator_says_so(
    arguments: tuple[str, ...], orders: bool
) -> None:
    """It was started by another hand, and refuses a place when its queue is first come, first served."""
    url = "http://127.0.0.1:8100"
    config = load(env={}, overrides={"worker.attach_url": url, "vllm.extra_args": arguments})
    assert VllmAdapter(config).orders_by_priority == orders


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((), (1, 1, 1)),
        (("--tensor-parallel-size", "4", "--pipeline_parallel_size=2"), (2, 4, 1)),
        (("-tp", "2", "-pp", "3", "-dp", "4"), (3, 2, 4)),
        (("-tp", "2", "-pcp", "2"), (1, 4, 1)),
        (("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"), (1, 2, 1)),
        (("-dp", "4", "--data-parallel-rank", "1"), (1, 1, 1)),
        (("-dp", "8", "--data-parallel-hybrid-lb", "-dpl=2"), (1, 1, 2)),
        (("-tp", "two"), (1, 1, 1)),
    ],
)
def test_the_size_of_an_engine_is_that_of_its_command_line(
    arguments: tuple[str, ...], size: tuple[int, int, int]
) -> None:
    facts = VllmAdapter(load(env={}, overrides={"vllm.extra_args": arguments})).facts({}, {}, "")
    assert (facts.stages, facts.ranks, facts.replicas) == size


def test_what_the_engine_says_of_its_size_counts_more_than_the_command_line() -> None:
    """An attached engine has a command line that is not known here."""
    overrides = {"worker.attach_url": "http://127.0.0.1:8100"}
    by_command = VllmAdapter(load(env={}, overrides=overrides)).facts({}, {}, "")
    assert (by_command.stages, by_command.ranks, by_command.replicas) == (0, 0, 0)
    passport = dict.fromkeys(DIGESTS, "x") | {"block_tokens": 32, "tp_size": 8}
    said = facts_from_file(json.dumps({"passport": passport, "stages": 2, "ranks": 4}))
    found = merged(said, by_command)
    assert (found.stages, found.ranks, found.replicas) == (2, 4, 0)


@pytest.mark.filterwarnings("ignore")
def test_vllm_reads_the_place_that_gateways_name() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.request import Request

    place = queue_place(1.8e9, offline=True)
    hint = LegHint(role=LegRole.PREFILL)
    prefill = json.loads(body.prefill_body("m", body.prompt_json([[1, 2]]), "", hint, place))
    decode = json.loads(body.decode_body(b'{"model":"m","messages":[]}', "s", hint, place))
    assert CompletionRequest.model_validate(prefill | {"cache_salt": "s"}).priority == place
    assert ChatCompletionRequest.model_validate(decode).priority == place
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    for n in range(3):
        place = queue_place(1.8e9 + n, offline=n == 0)
        sampling = SamplingParams(max_tokens=1)
        queue.add_request(Request(f"{n}", [1], sampling, None, arrival_time=float(n), priority=place))
    assert [queue.pop_request().request_id for _ in range(3)] == ["1", "2", "0"], "offline work is last"


@pytest.mark.parametrize(
    ("dtype", "arguments", "words"),
    [
        ("float32", ("--kv-cache-dtype", "bfloat16"), "bfloat16 under a model of type float32"),
        ("auto", ("--dtype=float", "--kv_cache_dtype=float16"), "float16 under a model of type float32"),
        ("auto", ("--kv-cache-dtype", "int8_per_token_head"), "int8_per_token_head"),
        ("bfloat16", ("--kv-cache-dtype", "something_new"), "something_new"),
        ("float32", (), ""),
        ("bfloat16", ("--kv-cache-dtype", "bfloat16"), ""),
        ("float32", ("--kv-cache-dtype", "fp8_e5m2"), ""),
        ("auto", ("--kv-cache-dtype", "bfloat16"), ""),
    ],
)
def test_an_engine_that_would_answer_garbage_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: False)
    config = load(env={}, overrides={"vllm.dtype": dtype, "vllm.extra_args": arguments})
    assert words in why_refused(config)
    assert bool(words) == bool(why_refused(config))
    if words:
        with pytest.raises(ConfigInvalid, match="garbage"):
            VllmAdapter(config).command(launch(tmp_path))
    monkeypatch.setattr(vllm, "has_gpu", lambda: True)
    assert why_refused(config) == ""


@pytest.mark.parametrize(
    ("given", "cores", "gpu", "wanted"),
    [
        ({}, 2, False, "0"),
        ({}, 64, False, None),
        ({"OMP_NUM_THREADS": "1"}, 64, False, "0"),
        ({"OMP_NUM_THREADS": "2"}, 2, False, None),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, 2, False, "1"),
        ({}, 2, True, None),
    ],
)
def test_an_engine_of_one_thread_computes_in_the_process_of_its_scheduler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    cores: int,
    gpu: bool,
    wanted: str | None,
) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vllm.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(vllm, "has_gpu", lambda: gpu)
    env = VllmAdapter(load(env={}, overrides={})).command(launch(tmp_path)).env
    assert env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), True),
        (("--data-parallel-size", "1"), True),
        (("--data-parallel-size", "2"), False),
        (("--data_parallel_size=4",), False),
        (("-dp", "2", "--data-parallel-rank", "1"), False),
    ],
)
def test_several_ranks_publish_no_events_and_the_reason_is_said(
    arguments: tuple[str, ...], wanted: bool
) -> None:
    adapter = VllmAdapter(load(env={}, overrides={"vllm.extra_args": arguments}))
    assert adapter.publishes_events is wanted
    assert ("TCP ports" in adapter.why_no_events) is not wanted
    silent = load(env={}, overrides={"vllm.extra_args": arguments, "vllm.kv_events": False})
    assert not VllmAdapter(silent).publishes_events
    assert VllmAdapter(silent).why_no_events == ""
