"""The commands `mooncache batch ...`: offline work through the gateway's HTTP API."""

from __future__ import annotations

import json as json_module
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from mooncache.cli.common import HERE, WHERE, AsJson, Where
from mooncache.errors import (
    ConfigInvalid,
    ConnectionLost,
    EngineUnavailable,
    InvalidArgument,
    MooncacheError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from mooncache.reporting.output import EXIT_OK, console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.config import Config

_PIECE_BYTES: Final = 1 << 20
_ANSWER_BYTES_MAX: Final = 64 << 20
_ERRORS: Final[dict[int, type[MooncacheError]]] = {
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
}

Name = Annotated[str, Parameter(help="Id of the batch, as `mooncache batch submit` printed it.")]
Gateway = Annotated[
    str | None, Parameter(group=WHERE, help="Base URL of the gateway; default: the one that runs here.")
]


def submit(
    file: Annotated[Path, Parameter(help="File of requests: one JSON object a line.")],
    /,
    *,
    endpoint: Annotated[
        str, Parameter(help="Where all requests go: /v1/chat/completions or /v1/completions.")
    ] = "/v1/chat/completions",
    gateway: Gateway = None,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Send a file of requests to be answered when something is idle, within 24 hours; print the batch's id.

    A line is {"custom_id": "1", "method": "POST", "url": ENDPOINT, "body": {...}}. Online requests always come first. A
    line that is no request fails by itself.

    For example:

        mooncache batch submit prompts.jsonl

        mooncache batch submit prompts.jsonl --endpoint /v1/completions --tenant team-a
    """
    target = _target(gateway, where)
    uploaded = target.upload(file)
    asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = target.call("POST", "/v1/batches", json_module.dumps(asked).encode())
    if json:
        print_json(batch)
    else:
        console.print(batch["id"], markup=False, highlight=False)
    return EXIT_OK


def ls(*, gateway: Gateway = None, where: Where = HERE, json: AsJson = False) -> int:
    """List your batches, the newest first.

    For example:

        mooncache batch ls
    """
    target = _target(gateway, where)
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        query = urllib.parse.urlencode({"limit": 100, **({"after": after} if after else {})})
        page = target.call("GET", f"/v1/batches?{query}")
        found += page["data"]
        if not page["has_more"] or not page["data"]:
            break
        after = page["last_id"]
    if json:
        print_json(found)
        return EXIT_OK
    rows = []
    for each in found:
        counts = each["request_counts"]
        begun = datetime.fromtimestamp(each["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
        done = f"{counts['completed']} of {counts['total']}"
        rows.append([each["id"], each["status"], done, str(counts["failed"]), begun])
    print_table("batches", ["id", "status", "answered", "failed", "begun (UTC)"], rows)
    return EXIT_OK


def status(name: Name, /, *, gateway: Gateway = None, where: Where = HERE, json: AsJson = False) -> int:
    """Show how far a batch is, what it took so far, and why lines failed.

    For example:

        mooncache batch status batch_0658f1c2a9be0a14a63
    """
    batch = _target(gateway, where).call("GET", _path(name))
    if json:
        print_json(batch)
        return EXIT_OK
    counts, usage = batch["request_counts"], batch["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    lines = [
        f"{batch['id']}: {batch['status']}",
        f"{counts['completed']} of {counts['total']} requests are answered, {counts['failed']} failed",
        f"tokens: {usage['input_tokens']} input, {cached} of them cached; {usage['output_tokens']} output",
    ]
    lines += [f"  {each['code']}: {each['message']}" for each in (batch["errors"] or {}).get("data", ())]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK


def cancel(name: Name, /, *, gateway: Gateway = None, where: Where = HERE, json: AsJson = False) -> int:
    """Send nothing further of a batch. What is answered stays, and can be fetched.

    For example:

        mooncache batch cancel batch_0658f1c2a9be0a14a63
    """
    batch = _target(gateway, where).call("POST", f"{_path(name)}/cancel", b"")
    if json:
        print_json(batch)
    else:
        console.print(f"{batch['id']}: {batch['status']}", markup=False, highlight=False)
    return EXIT_OK


def fetch(
    name: Name,
    /,
    *,
    output: Annotated[Path | None, Parameter(help="File for the answers; default: they are printed.")] = None,
    errors: Annotated[
        bool, Parameter(negative=(), help="The lines of requests that failed instead of the answers.")
    ] = False,
    gateway: Gateway = None,
    where: Where = HERE,
) -> int:
    """Fetch the answers of a batch that has ended: one JSON object a line, with its custom_id. The order is any.

    For example:

        mooncache batch fetch batch_0658f1c2a9be0a14a63 --output answers.jsonl

        mooncache batch fetch batch_0658f1c2a9be0a14a63 --errors
    """
    target = _target(gateway, where)
    batch = target.call("GET", _path(name))
    found = batch["error_file_id" if errors else "output_file_id"]
    if not found:
        what = "failed requests" if errors else "answers"
        raise NotFound(f"The batch has no {what}; its status is {batch['status']}.")
    pieces = target.download(f"/v1/files/{found}/content")
    if output is None:
        for piece in pieces:
            console.file.write(piece.decode("utf-8", "replace"))
        return EXIT_OK
    try:
        with output.expanduser().open("wb") as opened:
            opened.writelines(pieces)
    except OSError as error:
        raise ConfigInvalid(f"{output} cannot be written: {error.strerror}.") from None
    return EXIT_OK


@dataclass(frozen=True)
class _Target:
    """A gateway and the key for it."""

    url: str
    key: str
    timeout_s: float
    config: Config

    def call(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """Ask, and read the answer's JSON. Raises MooncacheError."""
        data = b"".join(self._pieces(method, path, body, content_type))
        try:
            found: dict[str, Any] = json_module.loads(data)
        except ValueError:
            raise EngineUnavailable(f"{self.url} answered with something that is no JSON.") from None
        return found

    def download(self, path: str) -> Iterator[bytes]:
        """A file, piece by piece. Raises MooncacheError."""
        return self._pieces("GET", path, None, "")

    def upload(self, path: Path) -> dict[str, Any]:
        """Send a file for a batch. Raises MooncacheError."""
        try:
            content = path.expanduser().read_bytes()
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}.") from None
        mark = secrets.token_hex(16)
        name = path.name.replace('"', "")
        head = (
            f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        )
        body = b"".join((head.encode(), content, f"\r\n--{mark}--\r\n".encode()))
        return self.call("POST", "/v1/files", body, f"multipart/form-data; boundary={mark}")

    def _pieces(self, method: str, path: str, body: bytes | None, content_type: str) -> Iterator[bytes]:
        from mooncache.runtime.tls import http_opener

        request = urllib.request.Request(  # noqa: S310  (checked to be http or https)
            self.url + path, data=body, method=method, headers={"Authorization": f"Bearer {self.key}"}
        )
        if body is not None:
            request.add_header("Content-Type", content_type)
        try:
            with http_opener(self.url, self.config.tls).open(request, timeout=self.timeout_s) as answer:
                while piece := answer.read(_PIECE_BYTES):
                    yield piece
        except urllib.error.HTTPError as error:
            raise _error(error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ConnectionLost(f"The gateway at {self.url} does not answer ({reason}).") from None


def _target(gateway: str | None, where: Where) -> _Target:
    """Raises ConfigInvalid when no gateway is known here."""
    from mooncache.client.options import ClientOptions
    from mooncache.client.state_dir import read_cluster_file
    from mooncache.config import load

    config = load(overrides={"cluster.state_dir": where.state_dir})
    cluster = None if gateway else read_cluster_file(config.cluster.state_dir)
    url = gateway or (cluster.gateway_url if cluster is not None else "")
    if not url.startswith(("http://", "https://")):
        raise ConfigInvalid(
            "No gateway is known here: start one with `mooncache up`, or name it with --gateway URL."
        )
    options = ClientOptions.gather(**{**where.settings(), "master": where.master or "127.0.0.1:1"})
    return _Target(url.rstrip("/"), options.token, where.timeout_s, config)


def _path(name: str) -> str:
    return f"/v1/batches/{urllib.parse.quote(name, safe='')}"


def _error(error: urllib.error.HTTPError) -> MooncacheError:
    """What the gateway said, as an error of the catalogue."""
    try:
        text = str(json_module.loads(error.read(_ANSWER_BYTES_MAX))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        text = f"The gateway answered {error.code}."
    default = InvalidArgument if error.code < 500 else EngineUnavailable
    return _ERRORS.get(error.code, default)(text)
