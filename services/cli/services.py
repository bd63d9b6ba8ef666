"""Commands that are one service in the foreground: master, store-node, conductor, gateway, worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mooncache.errors import InvalidArgument

StateFolder = Annotated[Path | None, Parameter(help="State folder.")]
ConfigPath = Annotated[Path | None, Parameter(help="TOML file.")]
Masters = Annotated[str | None, Parameter(help="Masters, host:port[,host:port…].")]
ConductorTarget = Annotated[
    str | None, Parameter(help="Conductor, host:port; with standbys all of them, separated by commas.")
]
ListenHost = Annotated[str | None, Parameter(help="Address to listen on; default 127.0.0.1.")]


def size_bytes(text: str, name: str) -> int:
    """A size such as 8GiB in bytes. Raises InvalidArgument, which names the option."""
    from mooncache.config import parse_size_bytes

    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}.") from None


def is_url(place: str | None) -> bool:
    """Whether blocks that leave the node go to an object store, and not to a folder."""
    return place is not None and "://" in place


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
    host: ListenHost = None,
    port: Annotated[int | None, Parameter(help="Port of the control service; default 7700.")] = None,
    state_dir: StateFolder = None,
    config: ConfigPath = None,
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
    ssd: Annotated[str | None, Parameter(help="Space on disk for blocks that left memory.")] = None,
    shared: Annotated[
        str | None,
        Parameter(
            help="Folder or object store (s3://...) of all nodes, for blocks that left memory and disk."
        ),
    ] = None,
    keep_memory: Annotated[
        bool, Parameter(negative=(), help="Leave blocks in memory to the next start, also after kill -9.")
    ] = False,
    label: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Where the node is: zone=a, rack=r1. Can be repeated.")
    ] = (),
    host: Annotated[str | None, Parameter(help="Address to listen on, control and data.")] = None,
    port: Annotated[int | None, Parameter(help="Port of the control service.")] = None,
    data_port: Annotated[int | None, Parameter(help="Port for block bytes.")] = None,
    master: Masters = None,
    state_dir: StateFolder = None,
    config: ConfigPath = None,
) -> int:
    """Run a store node in the foreground. All other settings: `mooncache config explain`.

    For example:

        mooncache store-node --capacity 64GiB --master 10.0.0.5:7700 --host 10.0.0.6

        mooncache store-node --capacity 64GiB --label zone=a --label rack=r1
    """
    settings = {
        "store_node.node_id": node_id,
        "store_node.capacity_bytes": None if capacity is None else size_bytes(capacity, "--capacity"),
        "store_node.keep_memory": "true" if keep_memory else None,
        "store_node.labels": ",".join(label) or None,
        "store_node.ssd_bytes": None if ssd is None else size_bytes(ssd, "--ssd"),
        "store_node.shared_url" if is_url(shared) else "store_node.shared_path": shared,
        "store_node.host": host,
        "store_node.data_host": host,
        "store_node.port": port,
        "store_node.data_port": data_port,
        "cluster.master_targets": master,
        "cluster.state_dir": state_dir,
    }
    return _run_service("mooncache.store_node", settings, config)


def store_holder(*, state_dir: StateFolder = None, config: ConfigPath = None) -> int:
    """Hold the memory of this machine's store nodes between two starts, in the foreground.

    A node with `--keep-memory` starts a holder by itself where none answers. Run one as a service of its own where
    the end of a node's service ends all of its processes (systemd, a container).

    For example:

        mooncache store-holder --state-dir /var/lib/mooncache
    """
    from mooncache.config import load
    from mooncache.store_node import holder
    from mooncache.store_node.keeping import holder_path

    return holder.main([str(holder_path(load(config, overrides={"cluster.state_dir": state_dir})))])


def conductor(
    *,
    host: ListenHost = None,
    port: Annotated[int | None, Parameter(help="Port of the control service; default 7800.")] = None,
    conductors: Annotated[
        str | None, Parameter(help="All conductors, this one among them: host:port,host:port.")
    ] = None,
    master: Masters = None,
    state_dir: StateFolder = None,
    config: ConfigPath = None,
) -> int:
    """Run the conductor, the scheduler of requests, in the foreground. Other settings: `mooncache config explain`.

    Several conductors that name each other elect a leader; the others are standbys that know what it knows.

    For example:

        mooncache conductor --host 10.0.0.5 --master 10.0.0.5:7700

        mooncache conductor --host 10.0.0.6 --master 10.0.0.5:7700 --conductors 10.0.0.5:7800,10.0.0.6:7800
    """
    settings = {
        "conductor.host": host,
        "conductor.port": port,
        "cluster.conductor_target": conductors,
        "cluster.master_targets": master,
        "cluster.state_dir": state_dir,
    }
    return _run_service("mooncache.conductor", settings, config)


def gateway(
    *,
    host: ListenHost = None,
    port: Annotated[int | None, Parameter(help="HTTP port; default 8000.")] = None,
    conductor: ConductorTarget = None,
    state_dir: StateFolder = None,
    config: ConfigPath = None,
) -> int:
    """Run a gateway, the OpenAI-compatible HTTP service, in the foreground. Any number of gateways can run.

    For example:

        mooncache gateway --host 0.0.0.0 --conductor 10.0.0.5:7800
    """
    settings = {
        "gateway.host": host,
        "gateway.port": port,
        "cluster.conductor_target": conductor,
        "cluster.state_dir": state_dir,
    }
    return _run_service("mooncache.gateway", settings, config)


def endpoint_picker(
    *,
    host: ListenHost = None,
    port: Annotated[int | None, Parameter(help="Port that Envoy asks; default 9002.")] = None,
    conductor: ConductorTarget = None,
    state_dir: StateFolder = None,
    config: ConfigPath = None,
) -> int:
    """Run an endpoint picker in the foreground: Envoy asks it over ext_proc where a request goes.

    It takes a gateway's place behind the Gateway API Inference Extension, or an Envoy of your own. Envoy shows the key
    that `mooncache token --picker` prints. Keys of clients, limits and times are those of the gateway's settings.

    For example:

        mooncache endpoint-picker --host 0.0.0.0 --conductor 10.0.0.5:7800
    """
    settings = {
        "endpoint_picker.host": host,
        "endpoint_picker.port": port,
        "cluster.conductor_target": conductor,
        "cluster.state_dir": state_dir,
    }
    return _run_service("mooncache.gateway.picker", settings, config)


def worker(
    *,
    model: Annotated[str | None, Parameter(help="Folder of the model, or its id on a hub.")] = None,
    model_name: Annotated[str | None, Parameter(help="Name by which clients request the model.")] = None,
    engine: Annotated[str | None, Parameter(help="vllm, sglang or hf.")] = None,
    role: Annotated[str | None, Parameter(help="prefill, decode or both.")] = None,
    attach: Annotated[str | None, Parameter(help="URL of a running engine to attach to.")] = None,
    instance_id: Annotated[str | None, Parameter(help="Name of the instance, stable over restarts.")] = None,
    host: Annotated[str | None, Parameter(help="Address of the engine's server.")] = None,
    master: Masters = None,
    conductor: ConductorTarget = None,
    state_dir: StateFolder = None,
    config: ConfigPath = None,
) -> int:
    """Run a worker in the foreground: it starts an engine, or attaches to one, and looks after it.

    For example:

        mooncache worker --model ~/models/Qwen3-8B --role prefill --conductor 10.0.0.5:7800 --master 10.0.0.5:7700
    """
    settings = {
        "worker.model": model,
        "worker.model_name": model_name,
        "worker.engine": engine,
        "worker.role": role,
        "worker.attach_url": attach,
        "worker.instance_id": instance_id,
        "worker.engine_host": host,
        "cluster.master_targets": master,
        "cluster.conductor_target": conductor,
        "cluster.state_dir": state_dir,
    }
    return _run_service("mooncache.worker", settings, config)
