"""The drop-in `MooncakeDistributedStore` under test, through the calls that programs of the original make."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from typing import Any, Final

from mooncache.client.state_dir import read_cluster_file
from mooncache.conformance.stores.target import PoolTarget
from mooncache.dropin import codes
from mooncache.dropin.store import MooncakeDistributedStore
from mooncache.errors import Internal, MasterUnavailable

_STATE_DIR: Final = "MOONCACHE_CLUSTER_STATE_DIR"
_SET_UP = threading.Lock()
_METADATA: Final = "P2PHANDSHAKE"
_BUFFER_BYTES: Final = 16 << 20


def _checked(call: str, code: int) -> int:
    """A number that is no error. Raises Internal, which names the code."""
    if code < 0:
        raise Internal(f"{call} answered {code}.")
    return code


class MooncakeStore(PoolTarget):
    """The configuration is that of `PoolTarget`; keys are names, byte for byte."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._store = MooncakeDistributedStore()
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        found = read_cluster_file(self.state_dir)
        if found is None:
            raise MasterUnavailable(f"No cluster runs in {self.state_dir}. Start one with `mooncache up`.")
        with _SET_UP:  # the original's setup() has no argument for the token: it is found by this variable
            before = os.environ.get(_STATE_DIR)
            os.environ[_STATE_DIR] = str(self.state_dir)
            try:
                master = ",".join(found.master_targets)
                code = self._store.setup("localhost", _METADATA, 0, _BUFFER_BYTES, "tcp", "", master)
            finally:
                if before is None:
                    del os.environ[_STATE_DIR]
                else:
                    os.environ[_STATE_DIR] = before
        _checked("setup", code)

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        """Store an object; of a name that is there the first value stays."""
        _checked("put", self._store.put(key.decode("latin-1"), value))

    def get(self, key: bytes) -> bytes | None:
        """The object; the original answers b"" for a miss and for an error."""
        return self._store.get(key.decode("latin-1")) or None

    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        """Read it to an address."""
        place = ctypes.addressof(ctypes.c_char.from_buffer(destination))
        code = self._store.get_into(key.decode("latin-1"), place, destination.nbytes)
        return None if code == codes.NOT_FOUND else _checked("get_into", code)

    def exist(self, key: bytes) -> bool:
        """Whether it is there."""
        return _checked("is_exist", self._store.is_exist(key.decode("latin-1"))) == 1

    def remove(self, key: bytes) -> bool:
        """Remove it."""
        code = self._store.remove(key.decode("latin-1"))
        return code != codes.NOT_FOUND and _checked("remove", code) >= 0

    def close(self) -> None:
        """End the store, and the pool if it was started here."""
        self._store.close()
        super().close()
