"""The object store that nodes share (S3, GCS, ...): calls of the native server on it, made by fsspec.

The native server asks (`_native.ObjectRequests`); threads here answer. Every call has a deadline, is tried again only
by who asked, and ends with an errno when it fails. Credentials come from where fsspec's file system looks for them,
environment and configuration files; none is read, kept or logged here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import struct
import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from mooncache.errors import ConfigInvalid
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from mooncache._native import ObjectRequests

LIST, READ, WRITE, DELETE = range(4)  # kinds of native requests
_TAKE_MS: Final = 200
_PROBE: Final = ".probe-"
_PROBE_S: Final = 10.0
_LIST_TIMES: Final = 10  # how many times as long as a read a listing may take
_WRITE_TIMES: Final = 30
_JOIN_S: Final = 2.0
_OBJECTS_MAX: Final = 1_000_000

log = get_logger(__name__)


class ObjectStore:
    """Objects below one URL, by names relative to it.

    Every method raises FileNotFoundError for what is not there, TimeoutError after its deadline, and OSError or an
    error of the library for everything else.
    """

    def __init__(self, filesystem: Any, root: str, timeout_s: float) -> None:
        self._fs, self._root, self._timeout_s = filesystem, root.rstrip("/"), timeout_s

    def list(self, prefix: str) -> list[tuple[str, int, int]]:
        """Name, size in bytes, and a number that changes with the bytes, of all objects whose names begin so."""
        path = f"{self._root}/{prefix}".rstrip("/")
        found = self._call(_LIST_TIMES * self._timeout_s, "find", path, detail=True)
        if len(found) > _OBJECTS_MAX:
            raise OSError(errno.E2BIG, "more than a million objects")
        begin = len(self._root) + 1
        return [
            (
                name.strip("/")[begin:] if name.startswith("/") else name[begin:],
                int(info["size"] or 0),
                version_of(info),
            )
            for name, info in found.items()
            if info.get("type") == "file"
        ]

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A range; shorter where the object ends."""
        try:
            found = self._call(self._timeout_s, "cat_file", self._path(name), start=offset, end=offset + size)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the range begins behind the object's end
                return b""
            raise
        return bytes(found)

    def write(self, name: str, data: bytes) -> None:
        """The whole object: others see all of it or nothing."""
        self._call(_WRITE_TIMES * self._timeout_s, "pipe_file", self._path(name), data)

    def delete(self, name: str) -> None:
        """Gone afterwards, also when it was not there."""
        with contextlib.suppress(FileNotFoundError):
            self._call(4 * self._timeout_s, "rm_file", self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, timeout_s: float, method: str, *args: object, **kwargs: object) -> Any:
        if getattr(self._fs, "async_impl", False):
            from fsspec.asyn import sync

            return sync(self._fs.loop, getattr(self._fs, f"_{method}"), *args, timeout=timeout_s, **kwargs)
        return getattr(self._fs, method)(*args, **kwargs)


def version_of(info: dict[str, Any]) -> int:
    """From an object's tag, or its time, as the store lists them."""
    tag = (
        info.get("ETag")
        or info.get("etag")
        or info.get("generation")
        or info.get("mtime")
        or info.get("created")
    )
    text = f"{tag} {info.get('LastModified', '')} {info['size']}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


def check_url(url: str) -> None:
    """Refuse what cannot be the place of objects.

    Raises:
        ConfigInvalid: no bucket, or credentials where they would be logged.
    """
    parts = urlsplit(url)
    if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
        raise ConfigInvalid(f"store_node.shared_url needs a bucket, like s3://bucket/prefix; it is {url}.")
    if "@" in parts.netloc or parts.query:
        raise ConfigInvalid(
            "store_node.shared_url has credentials or options in it. Set them where fsspec looks for them: the "
            "environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, FSSPEC_S3_ENDPOINT_URL) or its configuration files."
        )


def open_store(url: str, timeout_s: float, calls: int) -> ObjectStore:
    """The store at `url`, after a write, a read and a delete there; blocking.

    A store that does not answer now is no error: the node goes on without it.

    Raises:
        ConfigInvalid: what only a person can mend: a package, credentials, permissions, the bucket.
    """
    check_url(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigInvalid(
            "store_node.shared_url needs the extra object-store: pip install 'mooncache[object-store]'."
        ) from None
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if urlsplit(url).scheme in {"s3", "s3a"}:
        options["config_kwargs"] = {
            "connect_timeout": timeout_s,
            "read_timeout": timeout_s,
            "retries": {"max_attempts": 1},
            "max_pool_connections": max(10, 2 * calls),
        }
    try:
        filesystem, root = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise ConfigInvalid(f"fsspec cannot open {url}: {error}") from None
    store = ObjectStore(filesystem, root, timeout_s)
    _probe(url, ObjectStore(filesystem, root, max(timeout_s, _PROBE_S / _WRITE_TIMES)))
    return store


def _probe(url: str, store: ObjectStore) -> None:
    name, data = _PROBE + secrets.token_hex(8), secrets.token_bytes(16)
    try:
        store.write(name, data)
        found = store.read(name, 0, len(data))
        store.delete(name)
    except FileNotFoundError:
        raise ConfigInvalid(f"{url}: the bucket does not exist. Create it, or name another one.") from None
    except PermissionError:
        raise ConfigInvalid(
            f"{url}: the credentials do not allow to write, read and delete objects there. Every node needs all three."
        ) from None
    except Exception as error:  # noqa: BLE001  (every library has its own)
        if "credentials" in type(error).__name__.lower() or "credentials" in str(error).lower():
            raise ConfigInvalid(
                f"{url}: there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
                "or what else this store's fsspec file system reads."
            ) from None
        log.warning(Event.NODE_OBJECT_STORE_FAILS, call="probe", error=type(error).__name__)
        return
    if found != data:
        raise ConfigInvalid(f"{url}: an object that was written reads back as something else.")


def packed(objects: list[tuple[str, int, int]]) -> bytes:
    """A listing as the native server reads it."""
    pieces = []
    for name, size, version in objects:
        encoded = name.encode()[:65535]
        pieces += [struct.pack("<H", len(encoded)), encoded, struct.pack("<QQ", size, version)]
    return b"".join(pieces)


class ObjectWorkers:
    """Threads that carry out what the native server asks, until close()."""

    def __init__(self, requests: ObjectRequests, store: ObjectStore, threads: int) -> None:
        self._requests, self._store = requests, store
        self._lock = threading.Lock()
        self._failing = False
        self.counters = {
            f"object_store_{name}": 0 for name in ("calls", "errors", "read_bytes", "written_bytes")
        }
        self._threads = [
            threading.Thread(target=self._serve, name=f"object-store-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End every call; waits a moment for the threads. One whose call hangs is left behind."""
        self._requests.close()
        for thread in self._threads:
            thread.join(_JOIN_S / len(self._threads))

    def _serve(self) -> None:
        while not self._requests.closed:
            taken = self._requests.take(_TAKE_MS)
            if taken is not None:
                number, kind, name, offset, size, data = taken
                result, answer = self._answer(kind, name, offset, size, data)
                self._requests.complete(number, result, answer)

    def _answer(self, kind: int, name: str, offset: int, size: int, data: bytes) -> tuple[int, bytes]:
        """0 or a negative errno, and the bytes."""
        try:
            answer = self._carry_out(kind, name, offset, size, data)
        except FileNotFoundError:
            self._count("calls")
            return -errno.ENOENT, b""
        except Exception as error:  # noqa: BLE001  (every library has its own; the native server hears of each)
            self._failed(kind, error)
            return -errno_of(error), b""
        self._count("calls", read=len(answer) if kind == READ else 0, written=len(data))
        if self._failing:
            with self._lock:
                answers, self._failing = self._failing, False
            if answers:
                log.info(Event.NODE_OBJECT_STORE_ANSWERS)
        return 0, answer

    def _carry_out(self, kind: int, name: str, offset: int, size: int, data: bytes) -> bytes:
        if kind == LIST:
            return packed(self._store.list(name))
        if kind == READ:
            return self._store.read(name, offset, size)
        if kind == WRITE:
            self._store.write(name, data)
        elif kind == DELETE:
            self._store.delete(name)
        return b""

    def _failed(self, kind: int, error: Exception) -> None:
        self._count("calls", "errors")
        with self._lock:
            fails, self._failing = not self._failing, True
        if fails:  # its text could repeat what it was configured with
            call = ("list", "read", "write", "delete")[kind]
            log.warning(Event.NODE_OBJECT_STORE_FAILS, call=call, error=type(error).__name__)

    def _count(self, *names: str, read: int = 0, written: int = 0) -> None:
        with self._lock:
            for name in names:
                self.counters[f"object_store_{name}"] += 1
            self.counters["object_store_read_bytes"] += read
            self.counters["object_store_written_bytes"] += written


def errno_of(error: Exception) -> int:
    """What the native server calls it."""
    if isinstance(error, PermissionError):
        return errno.EACCES
    if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
        return errno.ETIMEDOUT
    found = error.errno if isinstance(error, OSError) else None
    return found or errno.EIO
