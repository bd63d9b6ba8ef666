"""Names of the package and of the native code: each means one thing, and each is used."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_tidy import NATIVE, ROOT, files, relative, report, tree

# Names that code of others calls: engines, asyncio, pydantic; a field that is given by its place; a list that a test
# compares with the settings; members of enums that come as values from other programs.
CALLED_BY_OTHERS = {
    "services/bench/null_engine.py": {"pause_writing", "resume_writing"},
    "services/bench/transfer/cases.py": {"STREAM"},
    "services/client/figures.py": {"RAIL"},
    "services/config/audience.py": {"NAMED"},
    "services/connectors/lmcache/l2_adapter.py": {
        "get_load_event_fd",
        "get_lookup_and_lock_event_fd",
        "get_store_event_fd",
        "pop_completed_store_tasks",
        "query_load_result",
        "query_lookup_and_lock_result",
        "report_status",
        "submit_load_task",
        "submit_lookup_and_lock_task",
        "submit_store_task",
        "submit_unlock",
    },
    "services/connectors/lmcache/remote_connector.py": {
        "batched_async_contains",
        "batched_get_non_blocking",
        "create_connector",
        "exists_sync",
        "remove_sync",
        "support_batched_contains",
        "support_batched_get",
        "support_batched_put",
    },
    "services/connectors/sglang/backend.py": {
        "batch_exists_v2",
        "batch_get",
        "batch_get_v2",
        "batch_set",
        "batch_set_v2",
        "get_stats",
        "register_mem_host_pool_v2",
    },
    "services/connectors/sglang/handover/backend.py": {
        "add_transfer_request",
        "build_receiver_metadata_message",
        "build_receiver_registration_message",
        "deregister_buffer_to_engine",
        "kv_status_msg_carries_reason",
        "kv_status_msg_tag",
        "register_buffer_to_engine",
        "reports_transfer_latency",
        "teardown",
    },
    "services/connectors/vllm/connector.py": {
        "_cache_hit_source",
        "bind_gpu_block_pool",
        "build_connector_worker_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_block_ids_with_load_errors",
        "get_handshake_metadata",
        "get_kv_connector_stats",
        "handle_preemptions",
        "has_pending_push_work",
        "requires_kv_delivery",
        "requires_piecewise_for_cudagraph",
        "get_required_kvcache_layout",
        "reset_cache",
        "restore_kv_caches",
        "set_xfer_handshake_metadata",
        "unregister_kv_caches",
    },
    "services/dropin/transfer_engine.py": {
        "batch_transfer_async_read",
        "batch_unregister_memory",
        "transfer_sync_read",
        "transfer_sync_write",
    },
    "services/dropin/values.py": {
        "ACTIVATION",
        "DISABLE",
        "GENERAL",
        "GRADIENT",
        "INITIALIZED",
        "KVCACHE",
        "OPTIMIZER_STATE",
        "PROCESSING",
        "SAMPLE",
        "TENSOR",
        "UNDEFINED",
        "WEIGHT",
        "get_disk_descriptor",
        "get_memory_descriptor",
        "is_disk_replica",
        "is_local_disk_replica",
        "is_memory_replica",
    },
    "services/store_node/arena_kind.py": {"FSDAX", "HUGETLBFS", "TMPFS"},
    "services/prices/core/price_book.py": {"_rules_name_machines"},
    "services/prices/core/hardware.py": {"_priced"},
    "services/plan/core/spec.py": {"_consistent"},
    "services/topology/core/model.py": {"board"},
    "services/testing/virtual_time.py": {"_process_events", "_write_to_self"},
}


def aliases(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """(name, line, meaning) of the types that a module gives a name, as `Steps = dict[str, int]`.

    Not those of type variables, which mean something inside of one definition only, and of the options of a command.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation) and node.value:
            target, value = node.target, node.value
        else:
            continue
        meaning = ast.unparse(value)
        if (
            node.col_offset == 0
            and isinstance(target, ast.Name)
            and re.fullmatch(r"_?[A-Z]+[a-z]\w*", target.id)
            and not re.search(r"TypeVar\(|ParamSpec\(|Parameter\(", meaning)
        ):
            yield target.id, node.lineno, meaning


def test_types_have_names_of_their_own() -> None:
    """Who searches for a name finds one class. A short alias may be spelt again where it means the same."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in files("services", ".py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                place = f"{relative(path)}:{node.lineno}"
                found.setdefault(node.name, []).append((place, f"class at {place}"))
        for name, line, meaning in aliases(tree(path)):
            found.setdefault(name, []).append((f"{relative(path)}:{line}", meaning))
    assert {"RequestDriver", "BlockParts", "_Phase"} <= found.keys()
    offenders = [
        f"{name}: {', '.join(place for place, _ in uses)}"
        for name, uses in found.items()
        if len({meaning for _, meaning in uses}) > 1
    ]
    assert not offenders, report(offenders)


def test_native_classes_have_names_of_their_own() -> None:
    """The same for native headers, which put what a namespace holds at the beginning of a line."""
    definition = re.compile(
        r"^(?:template <[^>]*>\s+)?(?:class|struct|enum class)\s+(?:alignas\([^)]*\)\s+)?(\w+)\b(?!::|\s*[;*&])",
        re.MULTILINE,
    )
    found: dict[str, list[str]] = {}
    for path in files("native", ".h"):
        if path.is_relative_to(NATIVE / "tests"):
            continue
        for name in definition.findall(path.read_text()):
            found.setdefault(name, []).append(relative(path))
    assert {"PeerSession", "Session", "Link", "Store"} <= found.keys()
    twice = [f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1]
    assert not twice, report(twice)


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and assigned names, at whatever depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (inner for target in targets for inner in ast.walk(target)):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id


def test_every_name_is_used() -> None:
    """A name that is mentioned once is its own definition: nothing uses it. Tests do not count, and neither do pages
    that are made from the code."""
    mentioned: Counter[str] = Counter()
    sources = [*files("services", ".py"), *files("scripts", ".py")]
    others = [
        *(page for page in files("docs", ".md") if not page.name.startswith("reference-")),
        *files("native/python", ".cpp"),
        *files("compat", ".py"),
        *files("deploy", ".py", ".yml", ".json", ".sh"),
    ]
    for path in (*sources, *others, ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "setup.py"):
        if path != Path(__file__).resolve():
            mentioned.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    unused = {
        relative(path): {
            name
            for name in defined_names(ast.parse(path.read_text(encoding="utf-8")))
            if mentioned[name] == 1 and not name.startswith("__")
        }
        for path in files("services", ".py")
    }
    found = {path: names for path, names in unused.items() if names}
    assert found == CALLED_BY_OTHERS, "not used anywhere, or not listed truly in CALLED_BY_OTHERS"
