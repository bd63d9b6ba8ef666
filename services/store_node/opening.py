"""The native server of a node is opened by a thread while the process imports the rest of itself.

Clients of a node that was killed wait for its next process. Most of what they wait for is kept memory, which native
code adopts without the interpreter, and imports, which only the interpreter does. So the thread begins as soon as
the configuration is known. For that reason neither this module nor what it imports needs gRPC or logs: what has to be
said is said by the service, which opens the data port when both are done.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mooncache import _native, auth
from mooncache._version import __version__
from mooncache.client.host import host_id, host_name
from mooncache.client.native_call import call_native
from mooncache.config import Config
from mooncache.config.labels import labels_of
from mooncache.errors import MooncacheError
from mooncache.store_node.holder import HolderError
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.keeping import close_all, keeping_of
from mooncache.store_node.native_settings import kept_node_id, server_settings, wanted_bytes

if TYPE_CHECKING:
    from mooncache._native import StoreServer
    from mooncache.store_node.object_store import ObjectWorkers
    from mooncache.store_node.tenant_keys import TenantKeys

_TENANTS_FILE: Final = "tenants.json"


class ServerOpening:
    """One native server, from its settings until the service has it.

    Args:
        config: the whole configuration.
        key: secret of the cluster's token.

    Raises:
        ConfigInvalid: settings that contradict each other, or files that they name and that cannot be read.
    """

    def __init__(self, config: Config, key: bytes) -> None:
        node = config.store_node
        self.identity = NodeIdentity(
            node_id=node.node_id or kept_node_id(config.cluster.state_dir),
            host_id=node.host_id or host_id(),
            incarnation=secrets.randbits(63) | 1,
            software_version=__version__,
            started_wall_ms=int(time.time() * 1e3),
            labels=labels_of(node.labels),
            host_name=host_name(),
            pid=os.getpid(),
        )
        self._settings: dict[str, Any] = server_settings(config, self.identity, wanted_bytes(node), key)
        self.keys: TenantKeys | None = None
        self._settings |= self._disk_keys(config)
        self.keeping = keeping_of(config, self.identity.node_id)
        self.objects: ObjectWorkers | None = None
        if node.shared_url:
            self._settings["shared_objects"] = self._object_store(config)
        self.why_not_kept = ""
        """Why the memory of this process is not kept, when it should be."""
        self._server: StoreServer | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.phases_s: dict[str, float] = {"configured": time.monotonic()}
        """When each step of the opening had ended, on the host's monotonic clock."""

    def begin(self) -> None:
        """Open the server in a thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="open-memory")
            self._thread.start()

    def take(self) -> StoreServer:
        """The server, which is the caller's now; waits for it.

        Raises:
            MooncacheError: it cannot be opened.
        """
        self.begin()
        assert self._thread is not None, "begin has run"
        self._thread.join()
        if self._error is not None:
            raise self._error
        server, self._server = self._server, None
        assert server is not None, "a server is taken once"
        return server

    def close(self) -> None:
        """Let go of a server that was not taken, and of the calls on the object store; may be called more than once."""
        if self._thread is not None:
            self._thread.join()
        self._server = None
        if self.objects is not None:
            objects, self.objects = self.objects, None
            objects.close()

    def _run(self) -> None:
        try:
            self._server = self._open()
            self._reached("kept")
        except BaseException as error:  # noqa: BLE001 - raised where the server is taken
            self._error = error

    def _reached(self, phase: str) -> None:
        self.phases_s[phase] = time.monotonic()

    def _open(self) -> StoreServer:
        """The native server, with the memory that a former process left where this node keeps its own.

        What was not adopted is given back before the new memory is filled.
        """
        if self.keeping is None:
            return call_native(_native.StoreServer, self._settings)
        files = self.keeping.take()
        self._reached("lent")
        try:
            server = call_native(
                _native.StoreServer, {**self._settings, "keep_memory": True, "kept_fds": files}
            )
        finally:
            close_all(files)
        self._reached("adopted")
        try:
            self.keeping.keep(server.kept()["fds"])
        except HolderError as why:
            self.why_not_kept = str(why)
        return server

    def _disk_keys(self, config: Config) -> dict[str, object]:
        """What the native server has to know of keys before its first block can go to a disk."""
        folder, file = config.store_node.tenant_keys_path, tenants_file(config)
        found: dict[str, object] = {"disk_keys": {}, "encrypted_tenants": []}
        if folder is not None:
            from mooncache.store_node.tenant_keys import TenantKeys

            self.keys = TenantKeys(folder)
            found["disk_keys"] = self.keys.first()
        if file.exists():
            from mooncache.store_node.tenants import encrypted_tenants

            found["encrypted_tenants"] = encrypted_tenants(file)
        return found

    def _object_store(self, config: Config) -> _native.ObjectRequests:
        """The queue of the native server's calls on the object store, with threads that carry them out."""
        from mooncache.store_node.object_store import ObjectWorkers, open_store

        node = config.store_node
        store = open_store(node.shared_url, node.shared_timeout_s, node.shared_calls)
        requests = _native.ObjectRequests()
        self.objects = ObjectWorkers(requests, store, node.shared_calls)
        return requests


def tenants_file(config: Config) -> Path:
    """Where the limits of tenants stand."""
    return config.store_node.tenants_file or config.cluster.state_dir / _TENANTS_FILE


def early_opening(config: Config) -> ServerOpening | None:
    """The opening of a node that may have memory to adopt, under way; None for another node.

    What is wrong with the settings is not said here: the service finds it again, and has a log.
    """
    if not config.store_node.keep_memory:
        return None
    with contextlib.suppress(MooncacheError):
        opening = ServerOpening(config, auth.load_cluster_token(config.cluster.token_path).key)
        opening.begin()
        return opening
    return None
