"""Commands that run services: up, master, store-node."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from mooncache.cli.common import AsJson
from mooncache.cli.output import (
    EXIT_MISS,
    EXIT_OK,
    console,
    error_console,
    human_bytes,
    print_json,
    print_table,
)
from mooncache.errors import InvalidArgument

if TYPE_CHECKING:
    from mooncache.client.results import NodeView
    from mooncache.cluster.embedded import EmbeddedCluster

_WATCH_S = 0.2
SERVICE = Group("Service", sort_key=10)


def _size_bytes(text: str, name: str) -> int:
    from mooncache.config import parse_size_bytes

    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}.") from None


class _Stop:
    """Remembers that somebody asked the cluster to end."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:  # the second Ctrl-C does not wait
            raise KeyboardInterrupt
        self.asked = True


def up(
    *,
    nodes: Annotated[int, Parameter(help="Number of store nodes.")] = 2,
    capacity: Annotated[str, Parameter(help="Memory of each node for blocks.")] = "1GiB",
    state_dir: Annotated[
        Path | None,
        Parameter(help="Folder for token, sockets and logs; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
    ] = None,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, Parameter(help="Port of the master; default 7700 when free. 0: any free port.")
    ] = None,
    log_level: Annotated[str, Parameter(help="debug, info, warning or error.")] = "info",
    timeout: Annotated[str, Parameter(help="Time to become ready.")] = "30s",
    json: AsJson = False,
) -> int:
    """Start a whole pool on this machine: a master and store nodes. Ctrl-C stops it.

    For example:

        mooncache up

        mooncache up --nodes 4 --capacity 256MiB
    """
    from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
    from mooncache.config import load, parse_duration_s

    folder = load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir
    try:
        ready_s = parse_duration_s(timeout)
    except ValueError as error:
        raise InvalidArgument(f"--timeout: {error}.") from None
    settings = ClusterSettings(
        state_dir=folder,
        nodes=nodes,
        capacity_bytes=_size_bytes(capacity, "--capacity"),
        host=host,
        port=port,
        log_level=log_level,
    )
    cluster = EmbeddedCluster(settings)
    stop = _Stop()
    try:
        _start(cluster, ready_s, quiet=json)
        views = cluster.wait_ready(ready_s)
        _show(cluster, views, as_json=json)
        return _watch(cluster, stop, as_json=json)
    except KeyboardInterrupt:
        return EXIT_OK
    finally:
        cluster.stop()
        if not json:
            console.print("stopped", style="dim")


def _start(cluster: EmbeddedCluster, ready_s: float, *, quiet: bool) -> None:
    if quiet:
        cluster.start(ready_s)
        return
    with console.status("starting…") as shown:

        def tell(name: str, what: str) -> None:
            shown.update(f"{name} {what}")
            if what == "ready":
                console.print(f"[green]✓[/] {name}")

        cluster.start(ready_s, tell)


def _show(cluster: EmbeddedCluster, views: tuple[NodeView, ...], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "master_targets": [cluster.master_target],
                "state_dir": str(cluster.state_dir),
                "token_file": str(cluster.token_path),
                "pid": os.getpid(),
                "master_pid": cluster.parts["master"].pid,
                "nodes": [
                    {
                        "node_id": node.node_id,
                        "pid": cluster.parts[node.node_id].pid,
                        "grpc_target": node.grpc_target,
                        "tcp": f"{node.tcp_host}:{node.tcp_port}",
                        "unix_path": node.unix_path,
                        "capacity_bytes": node.capacity_bytes,
                    }
                    for node in views
                ],
            }
        )
        import sys

        sys.stdout.flush()
        return
    rows: list[tuple[Any, ...]] = [("master", cluster.parts["master"].pid, cluster.master_target, "", "")]
    rows += [
        (
            node.node_id,
            cluster.parts[node.node_id].pid,
            node.grpc_target,
            f"{node.tcp_host}:{node.tcp_port}",
            human_bytes(node.capacity_bytes),
        )
        for node in sorted(views, key=lambda view: view.node_id)
    ]
    console.print()
    print_table("Mooncache pool", ("part", "pid", "control", "data", "capacity"), rows)
    created = " (new)" if cluster.token_created else ""
    console.print(f"\ntoken  {cluster.token_path}{created}\nlogs   {cluster.state_dir}/logs", style="dim")
    default = Path("~/.mooncache").expanduser()
    prefix = "" if cluster.state_dir == default else f"MOONCACHE_STATE_DIR={cluster.state_dir} "
    console.print("\ntry this in another terminal:\n", end="")
    console.print(
        f"  {prefix}mooncache put greeting hello && {prefix}mooncache get greeting",
        style="bold",
        markup=False,
        soft_wrap=True,
    )
    console.print("Ctrl-C stops everything.\n")


def _watch(cluster: EmbeddedCluster, stop: _Stop, *, as_json: bool) -> int:
    """Until somebody asks for the end (0) or a part ends by itself (1, with its name and last lines)."""
    from mooncache.cluster.processes import describe_exit

    while not stop.asked:
        part = cluster.crashed()
        if part is not None and part.exit_code is not None:
            how = describe_exit(part.exit_code)
            if as_json:
                print_json(
                    {"crashed": {"part": part.name, "exit_code": part.exit_code, "log": str(part.log_path)}}
                )
            else:
                error_console.print(f"[bold red]{part.name}[/] ended with {how}; stopping the rest.")
                error_console.print(part.log_tail(), markup=False, style="dim")
                error_console.print(f"Its log is {part.log_path}", markup=False)
            return EXIT_MISS
        time.sleep(_WATCH_S)
    return EXIT_OK


def _run_service(module: str, settings: dict[str, Any], config: Path | None) -> int:
    """Become the service: its settings travel as environment, so that `config explain` shows them."""
    import importlib

    for name, value in settings.items():
        if value is not None:
            section, field = name.split(".", 1)
            os.environ[f"MOONCACHE_{section}_{field}".upper()] = str(value)
    if config is not None:
        os.environ["MOONCACHE_CONFIG"] = str(config)
    main = importlib.import_module(f"{module}.__main__").main
    return int(main() or 0)


def master(
    *,
    host: Annotated[str | None, Parameter(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="Port of the control service; default 7700.")] = None,
    state_dir: Annotated[Path | None, Parameter(help="State folder.")] = None,
    config: Annotated[Path | None, Parameter(help="TOML file.")] = None,
) -> int:
    """Run a metadata master in the foreground. All other settings: `mooncache config explain`.

    For example:

        mooncache master --host 10.0.0.5 --port 7700
    """
    settings = {"master.host": host, "master.port": port, "cluster.state_dir": state_dir}
    return _run_service("mooncache.master", settings, config)


def store_node(
    *,
    node_id: Annotated[str | None, Parameter(help="Name of the node, stable over restarts.")] = None,
    capacity: Annotated[str | None, Parameter(help="Memory for blocks, for example 64GiB.")] = None,
    host: Annotated[str | None, Parameter(help="Address to listen on, control and data.")] = None,
    port: Annotated[int | None, Parameter(help="Port of the control service.")] = None,
    data_port: Annotated[int | None, Parameter(help="Port for block bytes.")] = None,
    master: Annotated[str | None, Parameter(help="Masters, host:port[,host:port…].")] = None,
    state_dir: Annotated[Path | None, Parameter(help="State folder.")] = None,
    config: Annotated[Path | None, Parameter(help="TOML file.")] = None,
) -> int:
    """Run a store node in the foreground. All other settings: `mooncache config explain`.

    For example:

        mooncache store-node --capacity 64GiB --master 10.0.0.5:7700 --host 10.0.0.6
    """
    settings = {
        "store_node.node_id": node_id,
        "store_node.capacity_bytes": None if capacity is None else _size_bytes(capacity, "--capacity"),
        "store_node.host": host,
        "store_node.data_host": host,
        "store_node.port": port,
        "store_node.data_port": data_port,
        "cluster.master_targets": master,
        "cluster.state_dir": state_dir,
    }
    return _run_service("mooncache.store_node", settings, config)
