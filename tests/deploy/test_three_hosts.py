"""The tutorial's three hosts, word for word, in network namespaces: one decides, one computes prompts, one generates.

What the page says is run as it stands, by root, in namespaces inside of a namespace: its names and addresses meet no
others, and all of it goes with the process that holds it. Changed are the memory of the nodes, the folder of the model
(a small one with random weights) and the engine (the small one). Each host is told to be a machine of its own, so that
blocks go over the network and not through shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import wait_until
from tests.deploy.own_network import MARKS, own_network
from tests.docs.blocks import (
    Block,
    Terminal,
    block,
    changed,
    environment,
    open_terminal,
    run_script,
    terminals,
)

pytestmark = MARKS
PAGE = "docs/tutorial.md"


@dataclass
class Hosts:
    """Three hosts on one bridge, named by the last number of their address."""

    folder: Path
    enter: tuple[str, ...]
    opened: list[Terminal] = field(default_factory=list)

    def env(self, number: int) -> dict[str, str]:
        """Of a terminal on that host: the settings that the page exports, and a machine of its own."""
        settings = block(PAGE, "export MOONCACHE_TLS_ENABLED").text
        home = str(self.folder / "moon" / f"host-{number}")
        reported = run_script(f"{settings}\nenv -0", self.folder, environment(HOME=home)).split("\0")
        exported = dict(line.split("=", 1) for line in reported if line.startswith("MOONCACHE_"))
        assert len(exported) == 5
        name = f"host-{number}"
        more = {"HOME": home, "MOONCACHE_STORE_NODE_HOST_ID": name, "MOONCACHE_CLIENT_HOST_ID": name}
        return environment(**exported, **more, MOONCACHE_WORKER_ENGINE="hf")

    def on(self, number: int) -> tuple[str, ...]:
        return (*self.enter, "ip", "netns", "exec", f"host-{number}")

    def run(self, number: int, text: str) -> str:
        return run_script(text, self.folder, self.env(number), before=self.on(number))

    def open(self, number: int, one: Block) -> list[Terminal]:
        """Each command of the block in a terminal of its own on that host; returns when all are ready."""
        swaps = {"64GiB": "64MiB", "/models/": f"{self.folder}/models/"}
        made = []
        for command in one.commands():
            text = changed(command, {old: new for old, new in swaps.items() if old in command})
            made.append(open_terminal(self.opened, text, self.folder, self.env(number), self.on(number)))
        return made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with own_network(folder) as enter:
        made = Hosts(folder, enter)
        env = environment(HOME=str(folder))
        for one in (block(PAGE, "ip link add moon"), block(PAGE, "mooncache tls init")):
            run_script(one.text, folder, env, before=enter)
        run_script(block(PAGE, "for number in 5 6 7; do\n  install").text, folder, env, before=enter)
        run_script("python -m mooncache.tiny_model models/Qwen3-8B", folder, env)
        with terminals() as made.opened:
            yield made
        run_script(block(PAGE, "for number in 5 6 7; do ip netns delete").text, folder, env, before=enter)


def test_three_hosts(hosts: Hosts) -> None:
    master, conductor, gateway = hosts.open(5, block(PAGE, "mooncache master --host"))
    master.wait_for('"service.ready"')
    run_script(block(PAGE, "install -m 600").text, hosts.folder, environment(), before=hosts.enter)
    workers = []
    computing = block(PAGE, "mooncache store-node --host 10.0.0.6")
    generating = block(PAGE, "mooncache store-node --host 10.0.0.7")
    for number, commands in ((6, computing), (7, generating)):
        node, worker = hosts.open(number, commands)
        workers.append(worker)
        node.wait_for('"service.ready"')
    for worker in workers:
        worker.wait_for('"worker.engine_ready"')
        worker.wait_for('"worker.registered"')
    conductor.wait_for('"service.ready"')
    gateway.wait_for('"service.ready"')

    status = block(PAGE, "mooncache status --master").text.strip()
    known = wait_for_instances(hosts, f"{status} --json")
    assert {node["state"] for node in known["nodes"]} == {"active"}
    assert len(known["nodes"]) == 2
    assert known["serving"]["conductor"]["reason"] == ""
    gateways = known["serving"]["conductor"]["gateways"]
    assert [gateway["url"] for gateway in gateways] == ["https://10.0.0.5:8000"]
    rows = {row["role"]: row for row in known["serving"]["instances"]}
    assert set(rows) == {"prefill", "decode"}
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert rows["prefill"]["url"].startswith("https://10.0.0.6:")
    assert rows["decode"]["url"].startswith("https://10.0.0.7:")

    ask = block(PAGE, "curl --cacert ~/.mooncache/tls").text
    first, second = (json.loads(hosts.run(5, ask)) for _ in range(2))
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > prompt_tokens - 64
    decided = hosts.run(5, changed(ask, {"curl ": "curl --silent --dump-header - --output /dev/null "}))
    assert "x-mooncache-decision: " in decided
    assert {terminal.ctrl_c() for terminal in reversed(hosts.opened)} == {0}


def wait_for_instances(hosts: Hosts, command: str) -> dict[str, Any]:
    """What status says on host C once both engines are ready to the conductor."""
    known: dict[str, Any] = {}

    def both_ready() -> bool:
        known.update(json.loads(hosts.run(7, command)))
        return [row["state"] for row in known["serving"]["instances"]] == ["ready", "ready"]

    wait_until(both_ready, lambda: f"both engines to be ready: {json.dumps(known, indent=1)}")
    return known
