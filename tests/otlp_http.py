"""An OTLP receiver over HTTP: decodes each protobuf that is posted to its path, and refuses all else."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY_BYTES_MAX = 1 << 24


class OtlpHttpReceiver:
    """Listens on loopback until `stop`. `address` has no path; `headers` are those of the last message taken."""

    def __init__(self, path: str, message: type[Any], take: Callable[[Any], object]) -> None:
        """path: "/v1/traces" or "/v1/metrics". message: what a body is. take: gets each one decoded."""
        self.headers: dict[str, str] = {}
        receiver = self

        class Posted(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                assert length <= BODY_BYTES_MAX
                body = self.rfile.read(length)
                known = self.path == path and self.headers["content-type"] == "application/x-protobuf"
                if known:
                    if self.headers["content-encoding"] == "gzip":
                        body = gzip.decompress(body)
                    receiver.headers = {name.lower(): value for name, value in self.headers.items()}
                    take(message.FromString(body))
                self.send_response(200 if known else 404)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing: a test's output is its own."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Posted)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
