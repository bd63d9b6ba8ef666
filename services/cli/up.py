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
EngineName = Annotated[
    str,
    Parameter(group=ENGINES, help="auto, vllm, hf (a small engine on transformers) or none (a pool alone)."),
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
Detach = Annotated[
    bool, Parameter(negative=(), help="Run in the background and return when everything is ready.")
]


def up(
    *,
    model: Model = "",
    model_name: Annotated[
        str, Parameter(group=ENGINES, help="Name by which clients request the model.")
    ] = "",
    engine: EngineName = "auto",
    prefill: Annotated[
        int, Parameter(group=ENGINES, help="Number of prefill engines; 0: decode engines do both.")
    ] = 1,
    decode: Annotated[int, Parameter(group=ENGINES, help="Number of decode engines.")] = 1,
    nodes: NodeCount = None,
    capacity: Annotated[str, Parameter(group=POOL, help="Memory of each store node for blocks.")] = "1GiB",
    ssd: Annotated[
        str, Parameter(group=POOL, help="Space of each store node on disk, for blocks that left its memory.")
    ] = "0",
    keep_memory: KeepMemory = False,
    host: Annotated[str, Parameter(group=PORTS, help="Address to listen on.")] = "127.0.0.1",
    port: HttpPort = None,
    conductor_port: ConductorPort = None,
    master_port: MasterPort = None,
    state_dir: StateDir = None,
    log_level: Annotated[str, Parameter(help="Log level: debug, info, warning or error.")] = "info",
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
    """
    from mooncache.cli.services import size_bytes
    from mooncache.cluster.embedded import ClusterSettings
    from mooncache.cluster.settings import choose_engine, resolve_model
    from mooncache.config import load

    chosen, why = choose_engine(engine)
    settings = ClusterSettings(
        state_dir=load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir,
        nodes=nodes,
        capacity_bytes=size_bytes(capacity, "--capacity"),
        ssd_bytes=size_bytes(ssd, "--ssd"),
        keep_memory=keep_memory,
        host=host,
        port=master_port,
        log_level=log_level,
        engine=chosen,
        model=resolve_model(model),
        model_name=model_name,
        prefill=prefill,
        decode=decode,
        conductor_port=conductor_port,
        gateway_port=port,
    )
    ready_s = None if timeout is None else seconds_of(timeout, "--timeout")
    if why and not json:
        console.print(why, style="yellow", markup=False)
    if detach:
        return run_detached(settings, ready_s, as_json=json)
    return _in_foreground(settings, ready_s, as_json=json)


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
    from mooncache.cluster.processes import end_leftovers, processes_of_run
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
        _wait(lambda: not processes_of_run(found.run_id), 10.0 if not ours else 0.0)
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
