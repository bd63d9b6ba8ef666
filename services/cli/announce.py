"""What `mooncache up` says once everything works: a document for programs, endpoints and lines to paste for people."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from mooncache.cli.announce_roles import document_of_roles, show_roles
from mooncache.client.results import NodeView
from mooncache.cluster.embedded import DEMO_TENANT, EmbeddedCluster
from mooncache.cluster.processes import ServiceKind
from mooncache.config import load
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.reporting.output import console, human_bytes, print_table

_PROMPT = "Tell me about the moon."
_ANSWER_TOKENS = 32


def document_of(cluster: EmbeddedCluster, views: tuple[NodeView, ...]) -> dict[str, object]:
    """Everything about a running cluster. `serving` is there when the cluster has engines.

    On a machine with a role it is about the parts here.
    """
    if cluster.settings.roles:
        return document_of_roles(cluster)
    document: dict[str, object] = {
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
                "ssd_bytes": cluster.settings.ssd_bytes,
            }
            for node in sorted(views, key=lambda view: view.node_id)
        ],
    }
    if cluster.settings.serves:
        tls = load(overrides={"cluster.state_dir": str(cluster.state_dir)}).tls
        instances = cluster.describe_instances()
        document["serving"] = {
            "base_url": f"{cluster.layout.gateway_url}/v1",
            "gateway_pid": cluster.parts["gateway"].pid,
            "conductor_target": cluster.layout.conductor_target,
            "conductor_pid": cluster.parts["conductor"].pid,
            "conductors": {
                part.control: part.pid
                for part in cluster.parts.values()
                if part.service == ServiceKind.CONDUCTOR
            },
            "api_key_file": str(cluster.demo_key_path),
            "tenant": DEMO_TENANT,
            "model": instances[0]["model"] if instances else "",
            "ca_file": str(tls.ca_file) if tls.enabled and tls.ca_file else "",
            "random_weights": not cluster.settings.model,
            "instances": instances,
        }
    return document


def curl_line(serving: dict[str, Any]) -> str:
    """A command that works as it stands in any POSIX shell."""
    head = json.dumps({"model": serving["model"], "max_tokens": _ANSWER_TOKENS})
    messages = json.dumps([{"role": "user", "content": _PROMPT}])
    body = f'{head[:-1]},\n      "messages": {messages}}}'
    key = (
        shlex.quote(_short(serving["api_key_file"]))
        if " " in serving["api_key_file"]
        else _short(serving["api_key_file"])
    )
    return (
        f"curl {_ca_option(serving)}{serving['base_url']}/chat/completions \\\n"
        f'  -H "Authorization: Bearer $(cat {key})" -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(body)}"
    )


def _ca_option(serving: dict[str, Any]) -> str:
    return f"--cacert {shlex.quote(serving['ca_file'])} " if serving["ca_file"] else ""


def python_lines(serving: dict[str, object]) -> str:
    """A program that works as it stands with the unmodified `openai` package."""
    with_ca = (
        "import ssl",
        "from pathlib import Path",
        "from openai import DefaultHttpxClient, OpenAI",
        f"http_client = DefaultHttpxClient(verify=ssl.create_default_context(cafile={serving['ca_file']!r}))",
        f"client = OpenAI(base_url={serving['base_url']!r}, http_client=http_client,",
    )
    plain = (
        "from pathlib import Path",
        "from openai import OpenAI",
        f"client = OpenAI(base_url={serving['base_url']!r},",
    )
    return "\n".join(
        (
            *(with_ca if serving["ca_file"] else plain),
            f"                api_key=Path({serving['api_key_file']!r}).read_text().strip())",
            f"answer = client.chat.completions.create(model={serving['model']!r}, max_tokens={_ANSWER_TOKENS},",
            f"    messages=[{{'role': 'user', 'content': {_PROMPT!r}}}])",
            "print(answer.choices[0].message.content, answer.usage)",
        )
    )


def show(document: dict[str, Any], *, token_created: bool, detached: bool = False) -> None:
    """Print the endpoints and what to do with them."""
    if "roles" in document:
        show_roles(document, detached=detached)
        return
    console.print()
    serving = document.get("serving")
    if serving:
        _show_parts(document, serving)
        _show_lines(document, serving)
    else:
        _show_pool(document)
    created = " (new)" if token_created else ""
    folder = document["state_dir"]
    console.print(
        f"\ntoken  {document['token_file']}{created}\nlogs   {folder}/logs", style="dim", soft_wrap=True
    )
    if detached:
        console.print(f"\n`{command()} down` stops everything.\n", soft_wrap=True)
    else:
        console.print("\nCtrl-C stops everything.\n")


def _show_parts(document: dict[str, Any], serving: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = [
        ("gateway", serving["gateway_pid"], "OpenAI-compatible HTTP", serving["base_url"]),
    ]
    rows += [
        ("conductor", pid, "scheduler" if number == 0 else "scheduler, standby or leader", target)
        for number, (target, pid) in enumerate(serving["conductors"].items())
    ]
    rows += [
        (
            item["instance_id"],
            item["pid"],
            f"{item['role'] if item['role'] != InstanceRole.BOTH else 'prefill and decode'}, {item['engine']}"
            + ("" if item["pool"] else ", without the pool"),
            item["url"],
        )
        for item in serving["instances"]
    ]
    rows.append(("master", document["master_pid"], "metadata of the pool", document["master_targets"][0]))
    rows += [
        (node["node_id"], node["pid"], f"store node, {_room(node)}", node["tcp"])
        for node in document["nodes"]
    ]
    print_table("", ("part", "pid", "what", "endpoint"), rows)
    console.print(f"\nmodel  [bold]{serving['model']}[/]", end="")
    if serving["random_weights"]:
        console.print("  (random weights: the text is gibberish, the machinery is real; yours: --model)")
    else:
        console.print()
    key = _short(serving["api_key_file"])
    console.print(
        f"key    {key}, tenant {serving['tenant']}; more: {command()} token --tenant NAME", soft_wrap=True
    )


def _show_lines(document: dict[str, Any], serving: dict[str, Any]) -> None:
    console.print("\nask it, in another terminal:\n")
    console.print(curl_line(serving), style="bold", markup=False, soft_wrap=True)
    console.print("\nor from Python, with the package openai:\n")
    console.print(python_lines(serving), style="bold", markup=False, soft_wrap=True)
    console.print("\nlook at it:\n")
    for text in (
        *_export(document["state_dir"]),
        *(f"{command()} {verb}" for verb in ("top", "status", "why REQUEST-ID")),
    ):
        console.print(text, style="bold", markup=False, soft_wrap=True)


def _show_pool(document: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = [("master", document["master_pid"], document["master_targets"][0], "", "")]
    rows += [
        (node["node_id"], node["pid"], node["grpc_target"], node["tcp"], _room(node))
        for node in document["nodes"]
    ]
    print_table("Mooncache pool", ("part", "pid", "control", "data", "capacity"), rows)
    console.print("\ntry this in another terminal:\n")
    for text in (
        *_export(document["state_dir"]),
        f"{command()} put greeting hello && {command()} get greeting",
    ):
        console.print(text, style="bold", markup=False, soft_wrap=True)


def _room(node: dict[str, Any]) -> str:
    memory = human_bytes(node["capacity_bytes"])
    return f"{memory}, SSD {human_bytes(node['ssd_bytes'])}" if node["ssd_bytes"] else memory


def command() -> str:
    """How this command is called from where the user is: its name when the shell finds it, else its path."""
    mine = Path(sys.argv[0]).absolute()
    found = shutil.which("mooncache")
    if mine.name != "mooncache" or (found and Path(found).resolve() == mine.resolve()):
        return "mooncache"
    return str(mine.relative_to(Path.cwd())) if mine.is_relative_to(Path.cwd()) else str(mine)


def _export(state_dir: str) -> list[str]:
    """What has to be said first so that commands find this cluster."""
    default = Path("~/.mooncache").expanduser()
    return [] if Path(state_dir) == default else [f"export MOONCACHE_STATE_DIR={shlex.quote(state_dir)}"]


def _short(path: str) -> str:
    """A path under the home folder with ~, which every shell expands outside of quotes."""
    home = str(Path.home())
    return "~" + path[len(home) :] if path.startswith(home + "/") and " " not in path else path
