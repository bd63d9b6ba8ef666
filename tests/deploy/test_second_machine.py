"""The tutorial's second machine, word for word, in network namespaces: invite, join, up --role, and a question to both.

At the end the second machine loses its power, and comes back.

What the page says is run as it stands, by root, in namespaces inside of a namespace. Changed are the folders of the
model (two copies of a small one, in different places), the memory of the nodes, the engine (the small one), the code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
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
A, B = 5, 6
LONG = '"stream": true, "max_tokens": 3000, "ignore_eos": true, "messages"'


@dataclass
class Machines:
    """Machines on one bridge, named by the last number of their address, each with a home folder."""

    folder: Path
    enter: tuple[str, ...]
    opened: list[Terminal] = field(default_factory=list)

    def home(self, number: int) -> Path:
        return self.folder / "moon" / f"host-{number}"

    def on(self, number: int) -> tuple[str, ...]:
        return (*self.enter, "ip", "netns", "exec", f"host-{number}")

    def run(self, number: int, text: str) -> str:
        return run_script(text, self.folder, environment(HOME=str(self.home(number))), before=self.on(number))

    def open(self, number: int, one: Block, swaps: dict[str, str]) -> Terminal:
        """The page's command in a terminal of its own on that machine."""
        text = changed(one.text.strip(), swaps)
        # A busy machine may load slower than so small a model computes; what is loaded is tested here.
        # A stream whose engine is silent ends soon.
        more = {"MOONCACHE_CONNECTOR_BREAK_EVEN": "false", "MOONCACHE_GATEWAY_STALL_TIMEOUT_S": "20"}
        env = environment(HOME=str(self.home(number)), **more)
        return open_terminal(self.opened, text, self.folder, env, self.on(number))

    def status(self, number: int) -> dict[str, Any]:
        return dict(json.loads(self.run(number, "mooncache status --json")))


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    with own_network(folder) as enter:
        env = environment(HOME=str(folder))
        run_script(block(PAGE, "ip link add moon").text, folder, env, before=enter)
        run_script(
            "python -m mooncache.tiny_model models/Qwen3-8B && mkdir srv && cp -r models/Qwen3-8B srv/qwen",
            folder,
            env,
        )
        made = Machines(folder, enter)
        with terminals() as made.opened:
            yield made
        run_script(block(PAGE, "for number in 5 6 7; do ip netns delete").text, folder, env, before=enter)


def join(machines: Machines) -> None:
    """B joins by the code that A prints."""
    inviting = machines.open(A, block(PAGE, "mooncache invite"), {})
    inviting.wait_for("Ctrl-C takes the code back")
    found = re.search(r"mooncache join 10\.0\.0\.5 --code ([0-9A-Z-]{24})\n", inviting.said())
    assert found, inviting.said()
    said = machines.run(
        B, changed(block(PAGE, "mooncache join").text, {"K7QM-2F9X-W4TB-0HND-5VZC": found[1]})
    )
    assert "This machine, 10.0.0.6, has joined the cluster of 10.0.0.5:7700." in said
    inviting.wait_for("10.0.0.6 has joined")
    assert inviting.process.wait(60) == 0
    files = [
        path
        for path in (machines.home(B) / ".mooncache").rglob("*")
        if path.suffix in {".pem", ".token", ".toml"}
    ]
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@pytest.mark.timeout(900)
def test_a_second_machine(machines: Machines) -> None:
    small = {"mooncache up": "mooncache up --engine hf --capacity 64MiB"}
    first = machines.open(
        A,
        block(PAGE, "mooncache up --tls --host"),
        {**small, "/models/Qwen3-8B": f"{machines.folder}/models/Qwen3-8B"},
    )
    first.wait_for("Ctrl-C stops everything")
    join(machines)
    # B is not asked for an engine: it knows from A which one the cluster has.
    second = machines.open(
        B, block(PAGE, "mooncache up --role"), {"/srv/qwen": f"{machines.folder}/srv/qwen --capacity 64MiB"}
    )
    second.wait_for("Ctrl-C stops what runs on this machine")

    ask = block(PAGE, "curl --cacert ~/.mooncache/authority").text
    before = json.loads(machines.run(A, ask))
    saved = (before["usage"]["prompt_tokens"] - 64) // 32
    wait_until(
        lambda: sum(node["block_count"] for node in machines.status(A)["nodes"]) >= saved,
        "blocks in the pool",
    )
    machines.run(A, block(PAGE, "mooncache instance drain").text)
    with_head = changed(ask, {"curl ": "curl --silent --show-error --include "})
    head, _, body = machines.run(A, with_head).replace("\r\n", "\n").partition("\n\n")
    after = json.loads(body)
    assert after["choices"][0]["message"]["content"] == before["choices"][0]["message"]["content"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > after["usage"]["prompt_tokens"] - 64
    request_id = re.search(r"^x-request-id: (\S+)$", head, re.MULTILINE)
    assert request_id
    why = json.loads(machines.run(B, f"mooncache why {request_id[1]} --json"))
    assert why["chosen"]["decode"] == "10.0.0.6-decode-1", why

    machines.run(
        A, changed(ask, {"moon and its tides": "sun and its seasons"})
    )  # B alone computes and stores this
    known: dict[str, Any] = {}

    def stored_on_b() -> bool:
        known.update(machines.status(B))
        return {node["node_id"]: node["block_count"] for node in known["nodes"]}["10.0.0.6-node-1"] > 0

    wait_until(stored_on_b, lambda: f"blocks on B's node: {json.dumps(known, indent=1)}")
    assert {node["node_id"]: node["state"] for node in known["nodes"]} == {
        "node-1": "active",
        "10.0.0.6-node-1": "active",
    }
    urls = {row["instance_id"]: row["url"] for row in known["serving"]["instances"]}
    assert set(urls) == {"decode-1", "10.0.0.6-decode-1"}
    assert urls["10.0.0.6-decode-1"].startswith("https://10.0.0.6:")
    assert urls["decode-1"].startswith("https://10.0.0.5:")
    lose_power(machines, ask)
    come_back(machines)
    assert first.ctrl_c() == 0


def lose_power(machines: Machines, ask: str) -> None:
    """B is gone without a word, as without its power: its link first, then all of its processes, with a stream on them.

    The stream ends with an error, and who asks again is served by A, with the same answer.
    """
    question = {"moon and its tides": "sun and its seasons"}
    right = json.loads(machines.run(A, changed(ask, question)))["choices"][0]["message"]["content"]
    begins = changed(ask, {"curl ": "curl --silent --no-buffer ", '"messages"': LONG})
    stream = open_terminal(
        machines.opened,
        begins.strip(),
        machines.folder,
        environment(HOME=str(machines.home(A))),
        machines.on(A),
    )
    stream.wait_for("data:")
    machines.run(A, "mooncache instance undrain decode-1")
    env = environment(HOME=str(machines.folder))
    run_script("ip link set to-host-6 down", machines.folder, env, before=machines.enter)
    pids = run_script("ip netns pids host-6", machines.folder, env, before=machines.enter).split()
    assert len(pids) >= 3, "supervisor, node, worker, engine"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    again = json.loads(machines.run(A, changed(ask, question)))
    assert again["choices"][0]["message"]["content"] == right
    wait_until(lambda: stream.process.poll() is not None, lambda: f"the stream ends: {stream.said()[-2000:]}")
    assert '"error"' in stream.said()
    assert '"finish_reason":"length"' not in stream.said().replace(" ", "")
    wait_until(lambda: states(machines) == {"node-1": "active"}, "B's node has left the map")


def come_back(machines: Machines) -> None:
    """B has its power again: what is started there is in the cluster, and leaves it by Ctrl-C."""
    env = environment(HOME=str(machines.folder))
    run_script("ip link set to-host-6 up", machines.folder, env, before=machines.enter)
    store_alone = {" --role engine --model /srv/qwen": " --capacity 64MiB"}
    store = machines.open(B, block(PAGE, "mooncache up --role"), store_alone)
    store.wait_for("Ctrl-C stops what runs on this machine")
    both = {"node-1": "active", "10.0.0.6-node-1": "active"}
    wait_until(lambda: states(machines) == both, "B's node is back")
    assert store.ctrl_c() == 0
    wait_until(lambda: states(machines) == {"node-1": "active"}, "B's node has left")


def states(machines: Machines) -> dict[str, str]:
    """Of the nodes in the map."""
    known = machines.status(A)["nodes"]
    return {node["node_id"]: node["state"] for node in known if node["state"] == "active"}
