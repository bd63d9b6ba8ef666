"""A real S3 server on loopback (moto's), whose answers a test may refuse or hold back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

BUCKET = "kv-blocks"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "mooncache",
    "AWS_SECRET_ACCESS_KEY": "no-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_HELD_S = 60.0


class S3Server:
    """Requests pass `status` (an HTTP status that is answered in place of the true one) and `held`."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *args: Any) -> None:
                """Nothing: a line for each request would hide what failed."""

        self.status = 0
        self.held = False
        self._go_on = threading.Event()
        self._app: Callable[..., Iterable[bytes]] = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}"}

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self.held:
            self._go_on.wait(_HELD_S)
        if self.status:
            start_response(f"{self.status} Refused", [("Content-Length", "0")])
            return [b""]
        return self._app(environ, start_response)

    def hold(self) -> None:
        """Answer nothing until go_on()."""
        self._go_on.clear()
        self.held = True

    def go_on(self) -> None:
        self.held = False
        self._go_on.set()

    def stop(self) -> None:
        self.go_on()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def client(self) -> Any:
        """A client of another library."""
        import boto3

        env = self.env
        return boto3.client(
            "s3",
            endpoint_url=env["AWS_ENDPOINT_URL"],
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
            region_name=env["AWS_DEFAULT_REGION"],
        )


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """With one empty bucket. Servers of one process share their buckets."""
    import requests

    server = S3Server()
    try:
        requests.post(f"{server.env['AWS_ENDPOINT_URL']}/moto-api/reset", timeout=30)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.stop()
