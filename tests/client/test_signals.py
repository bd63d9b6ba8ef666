"""Signals while a call waits for a node that is stopped: Ctrl-C ends the call long before its deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from tests.client.conftest import make_cluster
from tests.processes import freeze

pytestmark = pytest.mark.slow

_TIMEOUT_S = 600
_SOON_S = 90

# Its thread sends the signal once the main thread has been inside of the native call for a while: always in
# the same frame, which is the one that calls it.
_SCRIPT = """
    import mooncache, os, signal, sys, threading, time

    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it

    def send(number):
        same, before = 0, None
        while same < 20:
            time.sleep(0.02)
            frame = sys._current_frames()[threading.main_thread().ident]
            now = (id(frame), frame.f_lasti, frame.f_code.co_name)
            same = same + 1 if now == before and now[2] == "call_native" else 0
            before = now
        os.kill(os.getpid(), number)

    pool = mooncache.connect(**SETTINGS, timeout_s=TIMEOUT_S, shm=False)
    pool.put("a", b"x" * 1000)
    block = pool.reserve("held", 1 << 20)
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """A cluster of one node, so that no other is asked when it says nothing."""
    cluster = make_cluster(tmp_path, nodes=1)
    cluster.start()
    yield cluster
    cluster.stop()


def run_beside_a_stopped_node(cluster: EmbeddedCluster, body: str) -> list[str]:
    """The lines that a client prints whose node is stopped before `body` runs."""
    settings = cluster.client_settings()
    with mooncache.connect(**settings) as pool:
        (store,) = pool.nodes()
    # without a master, which would take the node out of the map after a while
    where = {"nodes": [f"{store.tcp_host}:{store.tcp_port}"], "token_file": settings["token_file"]}
    script = textwrap.dedent(_SCRIPT).replace("SETTINGS", repr(where))
    script = script.replace("TIMEOUT_S", str(_TIMEOUT_S)) + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    node = next(part for name, part in cluster.parts.items() if name.startswith("node"))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        freeze(node.pid)
        out, _ = process.communicate("\n", timeout=_SOON_S)
        assert process.returncode == 0
        return out.splitlines()
    finally:
        node.send(signal.SIGCONT)
        process.kill()
        process.wait(60)


@pytest.mark.parametrize(
    "call",
    [
        'pool.get("a")',
        'pool.match(["a"])',
        'pool.put("b", bytes(1000))',
        'pool.reserve("c", 1000)',
        "block.write(0, bytes(1 << 20))",
        "block.abort()",
    ],
)
def test_ctrl_c_ends_a_call_that_waits(lonely: EmbeddedCluster, call: str) -> None:
    lines = run_beside_a_stopped_node(
        lonely,
        f"""
        threading.Thread(target=send, args=[signal.SIGINT], daemon=True).start()
        try:
            {call}
        except KeyboardInterrupt:
            print("interrupted")
        sys.stdout.flush()
        os._exit(0)
        """,
    )
    assert lines == ["interrupted"]


def test_a_handler_that_does_not_raise_leaves_the_call_alone(lonely: EmbeddedCluster) -> None:
    lines = run_beside_a_stopped_node(
        lonely,
        """
        signal.signal(signal.SIGUSR1, lambda *_: print("seen"))
        def send_and_end():
            send(signal.SIGUSR1)
            send(signal.SIGUSR1)
            pool.close()
        threading.Thread(target=send_and_end, daemon=True).start()
        try:
            pool.get("a")
        except Exception as error:
            print(type(error).__name__)
        sys.stdout.flush()
        os._exit(0)
        """,
    )
    assert lines[:2] == ["seen", "seen"]
    assert lines[2:] == ["Closed"]
