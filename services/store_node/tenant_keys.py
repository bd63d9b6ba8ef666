"""Keys that tenants' blocks are encrypted with on disks: the operator's files, given to the native server.

A folder has one file for each tenant, `NAME.key`, with a key of 64 hexadecimal digits on each line: the first one
writes, all of them read. Files are read again when they change. A file that others may read, or that is no key file, is
refused; its tenant's blocks then go to no disk, rather than there as they are.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from mooncache.auth import check_tenant_name, keyed_hash, tenant_id
from mooncache.client.native_call import call_native
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.runtime.logs import Event, get_logger

KEY_BYTES: Final = 32
KEYS_MAX: Final = 16
KEY_FILE_SUFFIX: Final = ".key"
_FILE_BYTES_MAX: Final = 16 << 10
_FILES_MAX: Final = 4096
_ID_TEXT: Final = b"mooncache record key id"
_Look = tuple[int, int, int, int, int]

log = get_logger(__name__)


class KeyCore(Protocol):
    """The part of the native StoreServer that this needs."""

    def set_keys(self, tenant: str, keys: list[bytes]) -> None: ...


def key_id(key: bytes) -> str:
    """What records and logs name a key by, eight hexadecimal digits; it tells nothing of the key."""
    return keyed_hash(key, _ID_TEXT)[:4][::-1].hex()


def parse_keys(text: str) -> list[bytes]:
    """Keys of a file. Raises ConfigInvalid; its message never holds a part of a key."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    keys: list[bytes] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            key = bytes.fromhex(line)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigInvalid(f"Line {number} is no key: a key has 64 hexadecimal digits.") from None
        keys.append(key)
    if not keys or len(keys) > KEYS_MAX:
        raise ConfigInvalid(f"A key file has 1 to {KEYS_MAX} keys; this one has {len(keys)}.")
    return keys


def read_key_file(path: Path) -> list[bytes]:
    """The keys in a file that its owner alone may read. Raises ConfigInvalid."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_file(path, os.fstat(handle))
            text = os.read(handle, _FILE_BYTES_MAX).decode("ascii", errors="replace")
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return parse_keys(text)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"{path} is no key file. {error}") from None


def _check_file(path: Path, status: os.stat_result) -> None:
    """Refuse what is no plain file of the node's user alone. Raises ConfigInvalid."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigInvalid(f"{path} is no file.")
    if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise ConfigInvalid(
            f"{path} has mode {status.st_mode & 0o777:04o} and the owner {status.st_uid}. Set it to 0600, for the "
            "user of the node."
        )
    if status.st_size > _FILE_BYTES_MAX:
        raise ConfigInvalid(f"{path} has more than {_FILE_BYTES_MAX} bytes.")


class TenantKeys:
    """The key files of a node, as they were when they were last read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, _Look] = {}
        self._ids: dict[str, list[str]] = {}
        self._lock = threading.Lock()  # a purge deletes while another thread looks

    def first(self) -> dict[int, list[bytes]]:
        """By tenant id, for the start of the native server: no key for a tenant whose file is refused.

        Raises:
            ConfigInvalid: the folder cannot be read.
        """
        return {tenant_id(name): self._read(name) for name in self._names()}

    def refresh(self, core: KeyCore) -> None:
        """Give the native server what has changed since the last look. Takes a moment: call it in a thread."""
        with self._lock:
            self._refresh(core)

    def _refresh(self, core: KeyCore) -> None:
        try:
            names = self._names()
        except ConfigInvalid as error:
            log.warning(Event.NODE_KEYS_REFUSED, tenant="", reason=str(error))
            return
        for name in sorted(self._seen.keys() | names.keys()):
            if self._seen.get(name) != names.get(name):
                self._give(core, name, self._read(name) if name in names else self._forget(name))

    def erase(self, core: KeyCore, tenant: str) -> list[str]:
        """Delete a tenant's key file and let go of the keys: what they encrypted can never be read again.

        Returns:
            The names of the keys that the node had.

        Raises:
            ConfigInvalid: the file cannot be deleted.
        """
        with self._lock:
            ids = self._ids.get(tenant, [])
            self._delete(tenant)
            self._forget(tenant)
            self._give(core, tenant, [])
        return ids

    def _delete(self, tenant: str) -> None:
        path = self._path(tenant)
        try:
            with open(path, "r+b") as opened:
                length = os.fstat(opened.fileno()).st_size
                opened.write(b"\0" * min(length, _FILE_BYTES_MAX))
                opened.flush()
                os.fsync(opened.fileno())
            path.unlink()
        except FileNotFoundError:
            pass  # another node of this host shares the folder
        except OSError as error:
            raise ConfigInvalid(f"{path} cannot be deleted: {error.strerror}.") from None

    def _give(self, core: KeyCore, tenant: str, keys: Sequence[bytes]) -> None:
        try:
            call_native(core.set_keys, tenant, list(keys))
        except MooncacheError as error:
            log.error(Event.NODE_KEYS_REFUSED, tenant=tenant, reason=str(error))
            return
        log.info(Event.NODE_KEYS_SET, tenant=tenant, key_ids=" ".join(self._ids.get(tenant, [])))

    def _read(self, tenant: str) -> list[bytes]:
        """The keys of a tenant; none when its file is refused, which the log says."""
        path = self._path(tenant)
        look = _look(path)
        if look is None:
            return self._forget(tenant)
        self._seen[tenant] = look
        self._ids[tenant] = []
        try:
            keys = read_key_file(path)
        except ConfigInvalid as error:
            log.error(Event.NODE_KEYS_REFUSED, tenant=tenant, reason=str(error))
            return []
        self._ids[tenant] = [key_id(key) for key in keys]
        return keys

    def _forget(self, tenant: str) -> list[bytes]:
        self._seen.pop(tenant, None)
        self._ids.pop(tenant, None)
        return []

    def _path(self, tenant: str) -> Path:
        return self.folder / f"{check_tenant_name(tenant)}{KEY_FILE_SUFFIX}"

    def _names(self) -> dict[str, _Look]:
        """Tenants that have a file, and how it looks. Raises ConfigInvalid."""
        found: dict[str, _Look] = {}
        try:
            entries = sorted(entry.name for entry in os.scandir(self.folder))
        except OSError as error:
            raise ConfigInvalid(
                f"store_node.tenant_keys_path is {self.folder}, which cannot be read: {error.strerror}."
            ) from None
        for name in entries:
            tenant = name.removesuffix(KEY_FILE_SUFFIX)
            if tenant == name or name.startswith(".") or len(found) >= _FILES_MAX:
                continue
            look = _look(self.folder / name)
            try:
                if look is not None:
                    found[check_tenant_name(tenant)] = look
            except MooncacheError:
                continue  # the name of no tenant
        return found


def _look(path: Path) -> _Look | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid
