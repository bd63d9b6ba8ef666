"""A process that looks like an engine and misbehaves on request: health, metrics, models, cache events, ends.

`python fake_engine.py SETTINGS_JSON`. It reads its orders from a file again and again, so that a test can
change them while it runs: {"health": 200 | 503 | "hang", "exit": code, "metrics": text, "batches": [hex],
"swallow": [numbers that are not sent], "oldest": number of the oldest batch that can be had again}.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zmq

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])


def orders() -> dict[str, Any]:
    try:
        stat = os.stat(SETTINGS["orders"])
    except FileNotFoundError:
        return {}
    return read_orders((stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=1)
def read_orders(_version: tuple[int, int, int]) -> dict[str, Any]:
    """Orders of megabytes are read once; reading them for each question would make health late."""
    return dict(json.loads(Path(SETTINGS["orders"]).read_text()))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        now = orders()
        if self.path == "/health":
            if now.get("health") == "hang":
                time.sleep(60)
            self.answer(now.get("health", 200), "")
        elif self.headers.get("Authorization") != f"Bearer {os.environ['FAKE_ENGINE_KEY']}":
            self.answer(401, "")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": SETTINGS["model_name"], "max_model_len": 4096}]}))
        elif self.path == "/version":
            self.answer(200, json.dumps({"version": "9.9"}))
        elif self.path == "/metrics":
            self.answer(200, now.get("metrics", "fake_running 0\nfake_waiting 0\n"))
        else:
            self.answer(404, "")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def publish() -> None:
    """Send the batches of the orders' file "batches" (list of hex payloads) as they are added; serve replays."""
    context = zmq.Context.instance()
    events, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    events.bind(SETTINGS["events"])
    router.bind(SETTINGS["replay"])
    sent: list[bytes] = []
    while True:
        now = orders()
        while router.poll(20):
            client, _, start = router.recv_multipart()
            first = max(int.from_bytes(start, "big"), now.get("oldest", 0))
            for number in range(first, len(sent)):
                router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), sent[number]])
            router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
        for payload in now.get("batches", [])[len(sent) :]:
            number = len(sent)
            sent.append(bytes.fromhex(payload))
            if number not in now.get("swallow", []):
                events.send_multipart([b"", number.to_bytes(8, "big"), sent[-1]])


def main() -> None:
    if SETTINGS.get("grandchild"):
        # A child of its own in another session, as engines have them.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if "exit" in orders():
        sys.stderr.write("the fake engine was told to end\n")
        sys.exit(orders()["exit"])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if SETTINGS.get("events"):
        threading.Thread(target=publish, daemon=True).start()
    if SETTINGS.get("passport"):
        path = Path(SETTINGS["passport_path"])
        path.with_suffix(".part").write_text(SETTINGS["passport"])
        path.with_suffix(".part").replace(path)
    server = ThreadingHTTPServer(("127.0.0.1", SETTINGS["port"]), Handler)
    if SETTINGS.get("cert"):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(SETTINGS["cert"], SETTINGS["key"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
