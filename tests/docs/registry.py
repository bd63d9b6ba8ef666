"""What happens to each command block of the pages: which test runs it, or why none can.

A block that is not here fails tests/docs/test_blocks.py. So does an entry whose block is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Runs:
    """tests/docs/test_blocks.py runs it in a folder with traces, by itself ("alone") or on a pool of its own ("pool").

    swaps: what is changed in its text. left_out: beginnings of commands that are not run, each with the reason.
    prints: regular expressions that what it prints matches.
    """

    where: str
    swaps: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    prints: tuple[str, ...] = ()


@dataclass(frozen=True)
class By:
    """A test that takes the block from its page with `block(page, begins)` and runs it: `path::name`."""

    test: str


@dataclass(frozen=True)
class Cannot:
    """Why no test runs it. `instead`: tests that do the same in another way, files or `path::name`."""

    why: str
    instead: tuple[str, ...] = ()


Plan = Runs | By | Cannot

CLUSTER = "tests/cluster/test_docs.py::test_command_blocks_run"
HOSTS = "tests/deploy/test_three_hosts.py::test_three_hosts"
SECOND = "tests/deploy/test_second_machine.py::test_a_second_machine"
QUIET = "takes minutes of a quiet machine"
REGISTRY: dict[tuple[str, str], Plan] = {
    ("README.md", "make up"): By("tests/docs/test_blocks.py::test_make_blocks"),
    ("README.md", "✓ master"): By("tests/docs/test_blocks.py::test_what_up_prints"),
    ("README.md", "mooncache simulate --generate"): Runs(
        "alone",
        left_out={"mooncache reproduce": "all scenarios take minutes; docs/reproduction.md runs two"},
        prints=(
            r"goodput: requests per second",
            r"wrote report\.html",
            r"mooncache up --prefill \d+ --decode",
        ),
    ),
    ("docs/batches.md", "mooncache batch submit"): Cannot(
        "takes as long as the batch",
        instead=("tests/openai_client/test_batches.py", "tests/gateway/test_batches.py"),
    ),
    ("docs/storage.md", 'make up UP_ARGS="--ssd'): Cannot(
        "needs disks of that size",
        instead=("tests/store_node/test_ssd_tier.py", "tests/cli/test_up_serving.py::test_detached_and_down"),
    ),
    ("docs/storage.md", "mooncache tenant new-key"): Cannot(
        "needs disks of that size", instead=("tests/store_node/test_encryption.py",)
    ),
    ("docs/storage.md", "mooncache up --engine none --nodes 2 --shared"): Cannot(
        "needs a shared file system", instead=("tests/store_node/test_shared_tier.py",)
    ),
    ("docs/storage.md", "pip install 'mooncache[object-store]'"): Cannot(
        "needs a bucket", instead=("tests/store_node/test_object_store.py",)
    ),
    ("docs/storage.md", "mooncache up --engine none --keep-memory"): Cannot(
        "runs a cluster in the foreground", instead=("tests/store_node/test_kept_memory.py",)
    ),
    ("docs/cpp.md", "cmake -S native"): Cannot(
        "compiles everything, which takes minutes",
        instead=(
            "tests/native/test_installed_package.py",
            "tests/native/test_cluster_client.py",
            "tests/data_plane/test_example.py",
        ),
    ),
    ("docs/grpc.md", "PROTOS=$(python -c"): By(
        "tests/conductor/test_grpc_for_others.py::test_a_plan_its_report_and_its_record_in_plain_grpcio"
    ),
    ("docs/grpc.md", "grpc_health_probe"): Cannot(
        "needs that program", instead=("tests/runtime/service/test_health.py", "tests/master/test_health.py")
    ),
    ("docs/grpc.md", "grpcurl"): Cannot(
        "needs that program",
        instead=("tests/runtime/service/test_reflection.py", "tests/runtime/service/test_bearer.py"),
    ),
    ("docs/grpc.md", 'M=""'): Cannot(
        "needs Go and its plugins", instead=("tests/proto/test_lint.py::test_generated_code_is_up_to_date",)
    ),
    ("docs/kubernetes.md", "docker build -f deploy/Dockerfile"): Cannot(
        "needs a Kubernetes cluster and a registry",
        instead=("tests/deploy/test_helm.py", "tests/deploy/test_helm_processes.py"),
    ),
    ("docs/kubernetes.md", "kubectl -n llm create secret generic kv-token"): Cannot(
        "needs a Kubernetes cluster", instead=("tests/deploy/test_helm_processes.py",)
    ),
    ("docs/kubernetes.md", "kubectl -n llm get leases"): Cannot(
        "needs a Kubernetes cluster",
        instead=("tests/coordination/test_lease.py", "tests/deploy/test_helm_lease.py"),
    ),
    ("docs/kubernetes.md", "KEY=$(kubectl -n llm exec"): Cannot(
        "needs a Kubernetes cluster", instead=("tests/cli/test_offline.py",)
    ),
    ("docs/kubernetes.md", "mooncache endpoint-picker"): Cannot(
        "needs Envoy, and services in the foreground",
        instead=("tests/openai_client/test_endpoint_picker.py", "tests/gateway/test_endpoint_picker.py"),
    ),
    ("docs/upgrades.md", "python3 -m venv"): Cannot(
        "installs a release that is not there yet", instead=("tests/cli/test_upgrade_live.py",)
    ),
    ("docs/upgrades.md", "make upgrade-test"): Cannot(
        "builds the native code of an older revision: ten minutes, and a checkout with its history",
        instead=("tests/cli/test_upgrade_live.py", "tests/bench/test_other_version.py"),
    ),
    ("docs/upgrades.md", "MOONCACHE_RECORD_FRAMES"): Cannot(
        "writes files of a release into the repository", instead=("tests/proto/test_recorded.py",)
    ),
    ("docs/upgrades.md", "MOONCACHE_CONFIG=/etc/mooncache.toml"): Cannot(
        "needs a configuration there", instead=("tests/cli/test_reload.py",)
    ),
    ("docs/operations.md", "MOONCACHE_MASTER_REPLICAS=2"): Cannot(
        "runs services in the foreground", instead=("tests/client/test_repair.py",)
    ),
    ("docs/operations.md", "mooncache up --conductors 2"): Cannot(
        "runs until it is stopped", instead=("tests/cluster/test_layout.py",)
    ),
    ("docs/operations.md", "mooncache conductor --host 10.0.0.5"): Cannot(
        "needs several hosts", instead=("tests/conductor/test_standby_processes.py",)
    ),
    ("docs/operations.md", "mooncache tenant set"): Cannot(
        "needs a running cluster with a tenant of that name", instead=("tests/store_node/test_tenants.py",)
    ),
    ("docs/operations.md", "mooncache token status"): Cannot(
        "replaces the token of a running cluster", instead=("tests/cli/test_token_rotation.py",)
    ),
    ("docs/operations.md", "mooncache writers"): Cannot(
        "recalls what an engine of that name wrote", instead=("tests/store_node/test_writers.py",)
    ),
    ("docs/operations.md", "mooncache quarantine"): Cannot(
        "removes what an engine of that name wrote", instead=("tests/store_node/test_quarantine.py",)
    ),
    ("docs/tenants.md", "mooncache key create"): Cannot(
        "revokes a key by an id that is drawn", instead=("tests/accounts/test_keys.py",)
    ),
    ("docs/tenants.md", "mooncache tenant set"): Cannot(
        "sets limits of a key whose id is drawn", instead=("tests/accounts/test_request_limits.py",)
    ),
    ("docs/tenants.md", "mooncache usage"): Cannot(
        "needs usage that gateways have metered", instead=("tests/cli/test_usage.py",)
    ),
    ("docs/tenants.md", "mooncache accounts copy"): Cannot(
        "copies from a folder that another host had", instead=("tests/accounts/test_copying.py",)
    ),
    ("docs/tenants.md", "createuser mooncache"): Cannot(
        "needs a PostgreSQL server of its own", instead=("tests/accounts/test_postgres.py",)
    ),
    ("docs/tenants.md", "mooncache audit"): Runs("alone", prints=(r"each line follows",)),
    ("docs/tutorial.md", "make up"): By("tests/docs/test_blocks.py::test_make_blocks"),
    ("docs/tutorial.md", "curl http://127.0.0.1:8000"): By(CLUSTER),
    ("docs/tutorial.md", "mooncache why"): By(CLUSTER),
    ("docs/tutorial.md", "mooncache top"): By(CLUSTER),
    ("docs/tutorial.md", "pkill"): By(CLUSTER),
    ("docs/tutorial.md", "mooncache put"): By(CLUSTER),
    ("docs/tutorial.md", "mooncache master\n"): By("tests/docs/test_blocks.py::test_a_pool_by_hand"),
    ("docs/tutorial.md", "ip link add moon"): By(HOSTS),
    ("docs/tutorial.md", "mooncache tls init"): By(HOSTS),
    ("docs/tutorial.md", "for number in 5 6 7; do\n  install"): By(HOSTS),
    ("docs/tutorial.md", "export MOONCACHE_TLS_ENABLED"): By(HOSTS),
    ("docs/tutorial.md", "mooncache master --host"): By(HOSTS),
    ("docs/tutorial.md", "install -m 600"): By(HOSTS),
    ("docs/tutorial.md", "mooncache store-node --host 10.0.0.6"): By(HOSTS),
    ("docs/tutorial.md", "mooncache store-node --host 10.0.0.7"): By(HOSTS),
    ("docs/tutorial.md", "mooncache status --master"): By(HOSTS),
    ("docs/tutorial.md", "curl --cacert ~/.mooncache/tls"): By(HOSTS),
    ("docs/tutorial.md", "mooncache up --tls --host"): By(SECOND),
    ("docs/tutorial.md", "mooncache invite"): By(SECOND),
    ("docs/tutorial.md", "mooncache join"): By(SECOND),
    ("docs/tutorial.md", "mooncache up --role"): By(SECOND),
    ("docs/tutorial.md", "curl --cacert ~/.mooncache/authority"): By(SECOND),
    ("docs/tutorial.md", "mooncache instance drain"): By(SECOND),
    ("docs/tutorial.md", "for number in 5 6 7; do ip netns delete"): By(HOSTS),
    ("docs/http-api.md", "curl"): By(CLUSTER),
    ("docs/operations.md", "mooncache instance drain"): By(CLUSTER),
    ("docs/operations.md", "$ mooncache doctor"): Cannot(
        "shows a stopped node", instead=("tests/cli/test_doctor_live.py", "tests/cli/test_doctor.py")
    ),
    ("docs/operations.md", "fallocate"): By("tests/docs/test_blocks.py::test_a_pool_by_hand"),
    ("docs/custom-engine.md", "python -m mooncache.tiny_model"): By(
        "tests/docs/test_blocks.py::test_an_engine_by_itself"
    ),
    ("docs/vllm-connector.md", "pip install"): By("tests/docs/test_blocks.py::test_a_pool_alone"),
    ("docs/vllm-connector.md", "vllm serve"): By("tests/connectors/test_vllm_engine.py::__init__"),
    ("docs/sglang.md", "mooncache up --engine none"): Cannot(
        "SGLang's server needs a GPU", ("tests/sglang/test_controller.py", "tests/sglang/test_round_trip.py")
    ),
    (
        "docs/sglang.md",
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --disaggregation-mode",
    ): Cannot(
        "SGLang's server needs a GPU",
        ("tests/sglang/test_handover_processes.py", "tests/sglang/test_handover_plugin.py"),
    ),
    ("docs/sglang.md", "mooncache worker --engine sglang"): Cannot(
        "SGLang's server needs a GPU",
        ("tests/sglang/test_worker_reads.py", "tests/worker/test_sglang_adapter.py"),
    ),
    ("docs/sglang.md", "python3 -m venv sglang-env"): Cannot(
        "downloads gigabytes; its tests run where the package is", ("tests/sglang/test_controller.py",)
    ),
    ("docs/lmcache.md", "mooncache up --engine none"): Cannot(
        "engine and server take minutes; a test starts both", ("tests/lmcache/test_server.py",)
    ),
    ("docs/lmcache.md", "python3 -m venv lmcache-env"): Cannot(
        "downloads packages; its tests run where LMCache is", ("tests/lmcache/test_connector.py",)
    ),
    ("docs/worker.md", "mooncache worker --model"): By("tests/docs/test_blocks.py::test_workers"),
    ("docs/worker.md", "export VLLM_API_KEY"): Cannot(
        "an engine takes half a minute to start",
        ("tests/worker/test_worker.py::test_attaching_to_a_running_engine",),
    ),
    ("docs/worker.md", "MOONCACHE_WORKER_ATTACH_PASSPORT"): Cannot(
        "an engine takes half a minute to start",
        ("tests/worker/test_worker.py::test_attaching_to_a_running_engine",),
    ),
    ("docs/observability.md", "MOONCACHE_TRACING_ENDPOINT="): By(
        "tests/runtime/tracing/test_request.py::cluster"
    ),
    ("docs/cost.md", "mooncache cost prices"): Cannot(
        "a conductor with records is needed", ("tests/conductor/test_cost.py", "tests/plan/test_cost.py")
    ),
    ("docs/cost.md", "mooncache cost what-if"): Runs("alone", prints=(r"hit ratio", r"\n2x ")),
    ("docs/planning.md", "mooncache plan"): Runs("alone", prints=(r"mooncache up --prefill \d+ --decode",)),
    ("docs/traces.md", "mooncache trace generate"): Runs(
        "alone", swaps={"day.jsonl": "made.jsonl"}, prints=(r"20,000 requests", r"hits \d+\.\d% of blocks")
    ),
    ("docs/traces.md", "cat gateway-"): Runs("alone", prints=(r"✓ \d+ requests",)),
    ("docs/traces.md", "mooncache bench replay"): Cannot(
        "takes minutes: it measures the engine first", ("tests/bench/test_replay.py",)
    ),
    ("docs/simulator.md", "mooncache simulate --trace"): Runs(
        "alone", swaps={"--generate 20000": "--generate 500"}, prints=(r"goodput", r'"algorithm1"')
    ),
    ("docs/simulator.md", "mooncache simulate --generate 1000000"): Runs(
        "alone", swaps={"1000000": "400"}, prints=(r"goodput",)
    ),
    ("docs/reproduction.md", "mooncache reproduce --list"): Runs(
        "alone",
        left_out={
            "mooncache reproduce --trace": "all scenarios take minutes; tests/reproduce runs each",
            "mooncache reproduce --quick": "all scenarios take half a minute; tests/reproduce/test_scenarios_run.py",
            "mooncache reproduce fig5": "takes ten seconds; tests/reproduce/test_scenarios_run.py",
        },
        prints=(r"fig5-scheduling", r"break-even"),
    ),
    ("docs/deployment.md", "docker compose -f deploy/docker-compose.yml up"): Cannot(
        "needs a Docker engine", ("tests/deploy/test_compose.py", "tests/deploy/test_files.py")
    ),
    ("docs/deployment.md", "docker compose -f deploy/docker-compose.yml --profile"): Cannot(
        "needs a Docker engine", ("tests/deploy/test_compose_ssd.py", "tests/deploy/test_overlays.py")
    ),
    ("docs/deployment.md", "docker compose -f deploy/docker-compose.yml -f deploy/compose/ssd.yml"): Cannot(
        "needs a Docker engine",
        (
            "tests/deploy/test_compose_ssd.py",
            "tests/deploy/test_compose_tls.py",
            "tests/deploy/test_overlays.py",
        ),
    ),
    ("docs/deployment.md", "TORCH_INDEX_URL"): Cannot(
        "needs a Docker engine and collects gigabytes of wheels", ("tests/deploy/test_compose.py",)
    ),
    ("docs/deployment.md", "MOONCACHE_MASTER_HOST"): Cannot(
        "needs an etcd on three hosts",
        ("tests/deploy/test_three_hosts.py", "tests/coordination/test_etcd.py"),
    ),
    ("docs/mooncake-store.md", "pip uninstall"): Cannot(
        "changes the environment that runs it",
        ("tests/dropin/test_setup.py::test_the_distribution_holds_the_names", "tests/dropin/test_store.py"),
    ),
    ("docs/mooncake-store.md", "MOONCACHE_TEST_MOONCAKE"): Cannot(
        "needs a checkout of the original", ("tests/dropin/test_originals.py",)
    ),
    ("docs/gpu.md", "MOONCACHE_STORE_NODE_ARENA_DEVICE"): Cannot(
        "needs a GPU", ("tests/store_node/test_gpu_arena.py", "tests/store_node/test_vram_tier.py")
    ),
    ("docs/gpu.md", "mooncache bench transfer"): Cannot(
        "needs a GPU", ("tests/bench/test_gpu_bench.py", "tests/gpu/test_real_gpu.py")
    ),
    ("docs/benchmarks/store.md", "make bench"): Cannot(QUIET, ("tests/bench/test_store_bench.py",)),
    ("docs/benchmarks/sound.md", "mooncache bench sound"): Cannot(QUIET, ("tests/bench/test_sound.py",)),
    ("docs/benchmarks/survival.md", "mooncache bench survival"): Cannot(
        QUIET, ("tests/bench/test_survival.py",)
    ),
    ("docs/benchmarks/tiers.md", "mooncache bench tiers"): Cannot(QUIET, ("tests/bench/test_tiers.py",)),
    ("docs/benchmarks/operate.md", "mooncache bench operate"): Cannot(
        QUIET, ("tests/bench/test_operate_bench.py",)
    ),
    ("docs/benchmarks/handover.md", "mooncache bench handover"): Cannot(
        QUIET, ("tests/bench/test_handover.py",)
    ),
    ("docs/transfer-engine.md", "mooncache bench transfer --engines"): Cannot(
        QUIET, ("tests/bench/test_transfer.py::test_engines_beside_each_other",)
    ),
    ("docs/benchmarks/transfer.md", "mooncache bench transfer"): Cannot(
        QUIET, ("tests/bench/test_transfer.py",)
    ),
    ("docs/benchmarks/serving.md", "mooncache bench gateway"): Cannot(
        QUIET, ("tests/bench/test_gateway_bench.py",)
    ),
    ("docs/benchmarks/serving.md", "mooncache bench conductor"): Cannot(
        QUIET, ("tests/conductor/test_bench.py",)
    ),
    ("docs/benchmarks/serving.md", "mooncache bench serving turns"): Cannot(
        QUIET + " with two vLLM engines", ("tests/serving/test_vllm.py",)
    ),
    ("docs/benchmarks/serving.md", "mooncache bench serving soak"): Cannot(
        "takes minutes", ("tests/bench/test_soak.py",)
    ),
    ("docs/simulation.md", "python -m tests.simulation"): Cannot(
        "needs the sources, not the installed package", ("tests/simulation/test_simulation.py",)
    ),
    ("docs/conformance.md", "mooncache conformance --store pool"): Cannot(
        "takes a minute", ("tests/conformance/test_own_stores.py::test_the_pool_keeps_every_promise",)
    ),
    ("docs/conformance.md", "mooncache conformance --engine http"): Cannot(
        "takes a minute", ("tests/conformance/test_own_engine.py::test_our_engines_keep_every_promise",)
    ),
    ("docs/conformance.md", "mooncache conformance --connector mooncache"): Cannot(
        "takes minutes", ("tests/conformance/test_connector_kit.py::test_our_connector_keeps_every_promise",)
    ),
    ("docs/conformance.md", "mooncache conformance --set connector"): Cannot(
        "takes minutes",
        ("tests/conformance/test_connector_kit.py::test_a_connector_that_keys_by_tokens_alone_is_found",),
    ),
    ("docs/conformance.md", "mooncache conformance --only broken-cache"): Cannot(
        "stops a process", ("tests/conformance/test_own_engine.py::test_our_engines_keep_every_promise",)
    ),
    ("docs/conformance.md", "mooncache conformance --store mypackage.kv:Store"): Cannot(
        "a store of the reader's",
        ("tests/conformance/test_own_stores.py::test_a_class_of_the_users_is_tried",),
    ),
    ("docs/chaos.md", "mooncache chaos run --own"): Cannot(
        "takes minutes", ("tests/chaos/test_run.py::test_three_minutes_of_every_fault",)
    ),
    ("docs/chaos.md", "sudo mooncache chaos run --compose"): Cannot(
        "takes minutes", ("tests/deploy/test_compose.py::test_chaos_keeps_every_promise",)
    ),
    ("docs/chaos.md", "mooncache chaos list"): Runs("alone", prints=("kill-store-node +N1",)),
}
