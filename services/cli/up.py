"""`mooncache up` and `mooncache down`: the whole system on this machine, in the foreground or behind it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from mooncache.cli.common import AsJson, seconds_of
from mooncache.cli.detach import run_detached
from mooncache.cli.watch import LOOK_S, Stop, watch
from mooncache.errors import Cancelled
from mooncache.reporting.output import (
    EXIT_INTERRUPTED,
    EXIT_MISS,
    EXIT_OK,
    console,
    print_json,
)

if TYPE_CHECKING:
    from mooncache.client.state_dir import ClusterFile
    from mooncache.cluster.embedded import ClusterSettings

ENGINES = Group("Engines", sort_key=11)
POOL = Group("Pool", sort_key=12)
PORTS = Group("Ports", sort_key=13)
DOWN_S = 60.0
_POLL_S = 0.05


Model = Annotated[
    str,
    Parameter(
        group=ENGINES, help="Folder of a model, or its id on a hub. Default: a small one with random weights."
    ),
]
ModelName = Annotated[str, Parameter(group=ENGINES, help="Name by which clients request the model.")]
Prefill = Annotated[
    int | None,
    Parameter(
        group=ENGINES,
        help="Number of prefill engines; 0: decode engines do both. Default 1, or 0 with --role.",
    ),
]
Decode = Annotated[int, Parameter(group=ENGINES, help="Number of decode engines.")]
Capacity = Annotated[str, Parameter(group=POOL, help="Memory of each store node for blocks.")]
Host = Annotated[
    str | None,
    Parameter(group=PORTS, help="Address to listen on; default 127.0.0.1, or that of `mooncache join`."),
]
LogLevel = Annotated[str, Parameter(help="Log level: debug, info, warning or error.")]
EngineName = Annotated[
    str,
    Parameter(group=ENGINES, help="auto, vllm, hf (a small engine on transformers) or none (a pool alone)."),
]
DiskSpace = Annotated[
    str, Parameter(group=POOL, help="Space of each store node on disk, for blocks that left its memory.")
]
Shared = Annotated[
    str | None,
    Parameter(
        group=POOL,
        help="Folder or object store (s3://...) of all nodes, for blocks that left memory and disk.",
    ),
]
KeepMemory = Annotated[
    bool,
    Parameter(
        group=POOL, negative=(), help="Store nodes that end are started again with the blocks that they had."
    ),
]
HttpPort = Annotated[
    int | None, Parameter(group=PORTS, help="HTTP port; default 8000 when free. 0: any free port.")
]
ConductorPort = Annotated[
    int | None, Parameter(group=PORTS, help="Port of the conductor; default 7800 when free.")
]
ConductorCount = Annotated[
    int, Parameter(group=ENGINES, help="Number of conductors: one leads, the others are its standbys.")
]
MasterPort = Annotated[int | None, Parameter(group=PORTS, help="Port of the master; default 7700 when free.")]
NodeCount = Annotated[
    int | None, Parameter(group=POOL, help="Number of store nodes; default 1, or 2 for a pool alone.")
]
StateDir = Annotated[
    Path | None,
    Parameter(help="Folder for token, sockets and logs; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
]
Timeout = Annotated[
    str | None, Parameter(help="Time limit for the start; default 10min, or 30s for a pool alone.")
]
Roles = Annotated[
    tuple[str, ...],
    Parameter(
        name="--role",
        negative=(),
        help="Start only this for the cluster that this machine joined: store, engine or gateway. Can be repeated.",
    ),
]
Tls = Annotated[
    bool,
    Parameter(
        negative=(),
        group=PORTS,
        help="Turn TLS on, now and from then on; makes an authority and a certificate for --host. Needed for "
        "`mooncache invite`.",
    ),
]
Detach = Annotated[
    bool, Parameter(negative=(), help="Run in the background and return when everything is ready.")
]


def up(
    *,
    model: Model = "",
    model_name: ModelName = "",
    engine: EngineName = "auto",
    prefill: Prefill = None,
    decode: Decode = 1,
    conductors: ConductorCount = 1,
    nodes: NodeCount = None,
    capacity: Capacity = "1GiB",
    ssd: DiskSpace = "0",
    shared: Shared = None,
    keep_memory: KeepMemory = False,
    host: Host = None,
    tls: Tls = False,
    role: Roles = (),
    port: HttpPort = None,
    conductor_port: ConductorPort = None,
    master_port: MasterPort = None,
    state_dir: StateDir = None,
    log_level: LogLevel = "info",
    timeout: Timeout = None,
    detach: Detach = False,
    json: AsJson = False,
) -> int:
    """Start everything on this machine: gateway, conductor, engines, master, store nodes. Ctrl-C stops it.

    A process that ends or hangs is started again while the others continue. One that keeps ending stays
    stopped; `mooncache status` shows it.

    For example:

        mooncache up

        mooncache up --model ~/models/Qwen3-0.6B --prefill 1 --decode 2

        mooncache up --engine none --nodes 4 --capacity 256MiB

        mooncache up --tls --host 10.0.0.5   # then `mooncache invite`, and on a second machine `mooncache join`
    """
    from mooncache.cli.roles import choose
    from mooncache.cli.services import is_url, size_bytes
    from mooncache.cluster.embedded import ClusterSettings
    from mooncache.cluster.settings import resolve_model
    from mooncache.config import load

    config = load(overrides={"cluster.state_dir": state_dir})
    chosen = choose(config, role, engine, prefill, host, model, model_name, tls=tls)
    settings = ClusterSettings(
        state_dir=config.cluster.state_dir,
        nodes=nodes,
        capacity_bytes=size_bytes(capacity, "--capacity"),
        ssd_bytes=size_bytes(ssd, "--ssd"),
        shared_path=None if shared is None or is_url(shared) else Path(shared),
        shared_url=shared if shared is not None and is_url(shared) else "",
        keep_memory=keep_memory,
        host=chosen.host,
        port=master_port,
        log_level=log_level,
        engine=chosen.engine,
        model=resolve_model(model),
        model_name=chosen.model_name,
        prefill=chosen.prefill,
        decode=decode,
        conductors=conductors,
        conductor_port=conductor_port,
        gateway_port=port,
        roles=chosen.roles,
    )
    return _start(settings, chosen.why, timeout, detach=detach, as_json=json)


def _start(settings: ClusterSettings, why: str, timeout: str | None, *, detach: bool, as_json: bool) -> int:
    """`why`: a sentence about the engine that was chosen, or ""."""
    ready_s = None if timeout is None else seconds_of(timeout, "--timeout")
    if why and not as_json:
        console.print(why, style="yellow", markup=False)
    return (run_detached if detach else _in_foreground)(settings, ready_s, as_json=as_json)


def _in_foreground(settings: ClusterSettings, ready_s: float | None, *, as_json: bool) -> int:
    from mooncache.cli.announce import document_of, show
    from mooncache.cli.progress import StartView
    from mooncache.cluster.embedded import EmbeddedCluster

    cluster = EmbeddedCluster(settings)
    stop = Stop()
    try:
        with contextlib.ExitStack() as stack:
            tell = None if as_json else stack.enter_context(StartView(console)).tell
            cluster.start(ready_s, tell, lambda: stop.asked)
        document = document_of(cluster, cluster.wait_ready(LOOK_S))
        if as_json:
            print_json(document)
            sys.stdout.flush()
        else:
            show(document, token_created=cluster.token_created)
        return watch(cluster, stop, as_json=as_json)
    except (KeyboardInterrupt, Cancelled):
        return EXIT_OK if stop.asked else EXIT_INTERRUPTED
    finally:
        if not as_json:
            console.print("stopping…", style="dim")
        cluster.stop()
        if not as_json:
            console.print("stopped", style="dim")


def down(
    *,
    state_dir: Annotated[
        Path | None,
        Parameter(help="State folder of the cluster; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
    ] = None,
    json: AsJson = False,
) -> int:
    """Stop the cluster that `mooncache up` started on this machine, and every process that it left behind.

    For example:

        mooncache up --detach && mooncache down
    """
    from mooncache.client.state_dir import read_cluster_file, remove_cluster_file
    from mooncache.cluster.processes import end_leftovers
    from mooncache.config import load

    folder = load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir
    found = read_cluster_file(folder)
    if found is None:
        return _say_down(
            {"stopped": False, "pid": 0, "killed": []}, f"no cluster runs in {folder}", as_json=json
        )
    # A number alone proves nothing: another process may have got it after a crash.
    ours = _is_up(found.pid)
    if ours:
        with contextlib.suppress(ProcessLookupError):  # it may end by itself at this moment
            os.kill(found.pid, signal.SIGTERM)
            if not _wait(lambda: not _is_up(found.pid), DOWN_S):
                os.kill(found.pid, signal.SIGKILL)
    killed: list[int] = []
    if found.run_id:
        _wait(lambda: _has_ended(found), 10.0 if not ours or found.holder else 0.0)
        killed = end_leftovers(found.run_id)
    remove_cluster_file(folder, found.pid)
    text = (
        f"stopped the cluster in {folder}"
        if ours
        else f"the cluster in {folder} had already ended; cleaned up"
    )
    if killed:
        text += f"; {len(killed)} processes had to be killed"
    return _say_down({"stopped": True, "pid": found.pid, "killed": killed}, text, as_json=json)


def _say_down(document: dict[str, object], text: str, *, as_json: bool) -> int:
    if as_json:
        print_json(document)
    else:
        console.print(text, markup=False, soft_wrap=True)
    return EXIT_OK if document["stopped"] else EXIT_MISS


def _has_ended(cluster: ClusterFile) -> bool:
    """Whether no process of a run is left. A holder ends when it is asked to: what it holds is no longer wanted."""
    from mooncache.cluster.processes import processes_of_run
    from mooncache.store_node.keeping import end_holder

    left = processes_of_run(cluster.run_id)
    if left and cluster.holder:
        end_holder(Path(cluster.holder))
    return not left


def _is_up(pid: int) -> bool:
    """Whether this process is a running `mooncache up`."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"up" in words and any(b"mooncache" in word for word in words)


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
