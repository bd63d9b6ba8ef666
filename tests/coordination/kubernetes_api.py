"""The Leases of a Kubernetes API server, over real HTTPS on loopback, with faults on order.

What it accepts and refuses follows the API server: optimistic updates by resourceVersion and uid, PUT of a missing
Lease, validation of times and counts, RBAC, bearer tokens, Status objects as refusals. Its objects stay while it is
stopped.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import re
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from mooncache.coordination.lease_object import API_VERSION, TERM
from mooncache.runtime.certificates import make_certificates
from tests.conditions import wait_until
from tests.ports import own_port

NAMESPACE: Final = "models"
_PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/]+))?")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_FIELDS = {
    "holderIdentity": str,
    "leaseDurationSeconds": int,
    "acquireTime": str,
    "renewTime": str,
    "leaseTransitions": int,
}
_ANNOTATION = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
Fault = Callable[["_Handler"], bool]  # True: the request has been answered, or never will be


class KubernetesApi:
    """One API server. `folder` has the files of a service account that it accepts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, own_port()
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.tokens = {"first"}
        self.verbs = {"get", "create", "update"}
        self.calls: list[tuple[str, str]] = []
        self.faults: list[Fault] = []  # one for each request, in this order
        self.every: Fault | None = None  # for all of them
        self.version = 100
        self.lock = threading.RLock()
        self._server: _Server | None = None
        self.write_token("first")
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "ca.crt").write_bytes((folder / "ca.pem").read_bytes())

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def write_token(self, token: str) -> None:
        """As the kubelet does: another file takes the place of the old one."""
        made = self.folder / "token.new"
        made.write_text(token + "\n")
        made.rename(self.folder / "token")

    def start(self) -> None:
        self.every = None
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.api = self
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nothing listens any more, and connections break."""
        if self._server is not None:
            server, self._server = self._server, None
            self.every = lambda handler: handler.cut()
            server.shutdown()
            server.server_close()

    def pause(self) -> None:
        """It takes requests in and answers none."""
        self.every = lambda handler: handler.hang()

    def resume(self) -> None:
        self.every = None

    def lease(self, name: str = "mooncache-masters") -> dict[str, Any]:
        with self.lock:
            return copy.deepcopy(self.leases[NAMESPACE, name])

    def edit(self, change: Callable[[dict[str, Any]], object], name: str = "mooncache-masters") -> None:
        """As somebody with kubectl does."""
        with self.lock:
            change(self.leases[NAMESPACE, name])
            self.version += 1
            self.leases[NAMESPACE, name]["metadata"]["resourceVersion"] = str(self.version)

    def delete(self, name: str = "mooncache-masters") -> None:
        with self.lock:
            del self.leases[NAMESPACE, name]

    def create(self, namespace: str, made: dict[str, Any]) -> dict[str, Any]:
        name = made["metadata"]["name"]
        if made["metadata"].get("resourceVersion"):
            raise _RefusedError(
                500, "InternalError", "resourceVersion should not be set on objects to be created"
            )
        made["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        return self._keep(namespace, name, made)

    def update(self, namespace: str, name: str, made: dict[str, Any]) -> dict[str, Any]:
        there, metadata = self.leases.get((namespace, name)), made["metadata"]
        uid, version = metadata.get("uid", ""), metadata.get("resourceVersion", "")
        if there is None and not uid:
            return self.create(namespace, made)
        if there is None or (uid and uid != there["metadata"]["uid"]):
            raise _RefusedError(
                409, "Conflict", f'Operation cannot be fulfilled on leases "{name}": Precondition failed'
            )
        if not version:
            raise _RefusedError(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
        if version != there["metadata"]["resourceVersion"]:
            raise _RefusedError(
                409, "Conflict", f'Operation cannot be fulfilled on leases "{name}": it has been modified'
            )
        return self._keep(namespace, name, made)

    def _keep(self, namespace: str, name: str, made: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        made["metadata"] |= {"resourceVersion": str(self.version), "namespace": namespace}
        made["metadata"]["managedFields"] = [{"manager": "python-aiohttp", "operation": "Update"}]
        self.leases[namespace, name] = made
        return made


@contextlib.contextmanager
def running_api(folder: Path) -> Iterator[KubernetesApi]:
    """An API server in `folder` until the block ends. Its Leases were held once, and given back."""
    server = KubernetesApi(make_certificates(folder, ["127.0.0.1"])[0])
    for name in ("mooncache-masters", "mooncache-conductors"):
        metadata = {"name": name, "annotations": {TERM: "1"}}
        server.create(
            NAMESPACE, {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": {}}
        )
    server.start()
    try:
        yield server
    finally:
        server.stop()


class _RefusedError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    api: KubernetesApi

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are what the tests do."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._serve("get")

    def do_PUT(self) -> None:
        self._serve("update")

    def do_POST(self) -> None:
        self._serve("create")

    def _serve(self, verb: str) -> None:
        api = self.server.api
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with api.lock:
            api.calls.append((verb, self.path))
            fault = api.every or (api.faults.pop(0) if api.faults else None)
        if fault is not None and fault(self):
            return
        try:
            with api.lock:
                found = self._carry_out(verb, body)
                text = json.dumps(found).encode()
            self.reply(201 if verb == "create" else 200, text)
        except _RefusedError as refused:
            self.refuse(refused.code, refused.reason, refused.message)

    def _carry_out(self, verb: str, body: bytes) -> dict[str, Any]:
        api, kind, _, token = self.server.api, *self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or token not in api.tokens:
            raise _RefusedError(401, "Unauthorized", "Unauthorized")
        path = _PATH.fullmatch(self.path)
        if path is None:
            raise _RefusedError(404, "NotFound", "the server could not find the requested resource")
        if verb not in api.verbs:
            raise _RefusedError(403, "Forbidden", f"leases.coordination.k8s.io is forbidden: cannot {verb}")
        namespace, name = path[1], path[2]
        there = api.leases.get((namespace, name))
        if verb == "get":
            if there is None:
                raise _RefusedError(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
            return there
        made = _validated(json.loads(body), namespace, name)
        if verb == "update":
            return api.update(namespace, name, made)
        if (namespace, made["metadata"]["name"]) in api.leases:
            raise _RefusedError(409, "AlreadyExists", "leases.coordination.k8s.io already exists")
        return api.create(namespace, made)

    def reply(self, status: int, body: bytes, **headers: str) -> bool:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        return True

    def refuse(self, status: int, reason: str = "", message: str = "") -> bool:
        found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
        return self.reply(status, json.dumps(found | {"reason": reason, "message": message}).encode())

    def hang(self) -> bool:
        """Answer nothing until the server is well again; then break the connection, as nobody waits any more."""
        wait_until(lambda: self.server.api.every is None, timeout_s=600)
        return self.cut()

    def cut(self) -> bool:
        self.close_connection = True
        self.connection.close()
        return True

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _validated(made: dict[str, Any], namespace: str, name: str | None) -> dict[str, Any]:
    metadata, spec = made["metadata"], made.get("spec") or {}
    if made.get("apiVersion") != "coordination.k8s.io/v1" or made.get("kind") != "Lease":
        raise _RefusedError(400, "BadRequest", "the object provided is unrecognized")
    if (name or metadata["name"]) != metadata["name"] or metadata.get("namespace", namespace) != namespace:
        raise _RefusedError(400, "BadRequest", "the name of the object does not match the name on the URL")
    for field, kind in _FIELDS.items():
        value = spec.get(field)
        if value is not None and (
            type(value) is not kind or (kind is int and not -(1 << 31) <= value < 1 << 31)
        ):
            raise _RefusedError(400, "BadRequest", f"json: cannot unmarshal spec.{field}")
        if field.endswith("Time") and value is not None and not _MICRO_TIME.fullmatch(value):
            raise _RefusedError(400, "BadRequest", f"parsing time of spec.{field}")
    if (spec.get("leaseDurationSeconds") or 1) <= 0 or spec.get("leaseDurationSeconds") == 0:
        raise _RefusedError(422, "Invalid", "spec.leaseDurationSeconds: must be greater than 0")
    if (spec.get("leaseTransitions") or 0) < 0:
        raise _RefusedError(422, "Invalid", "spec.leaseTransitions: must be greater than or equal to 0")
    notes = metadata.get("annotations") or {}
    if not all(isinstance(value, str) and _ANNOTATION.fullmatch(key) for key, value in notes.items()):
        raise _RefusedError(
            422, "Invalid", "metadata.annotations: name part must consist of alphanumeric characters"
        )
    if sum(len(key) + len(value) for key, value in notes.items()) > 256 << 10:
        raise _RefusedError(
            422, "Invalid", "metadata.annotations: Too long: may not be more than 262144 bytes"
        )
    made["spec"] = {field: spec[field] for field in _FIELDS if spec.get(field) is not None}
    return made
