"""Our client under test: keys of 32 bytes as block keys, all others as names, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mooncache
from mooncache.client.reservation import Reservation
from mooncache.conformance.stores.target import PoolTarget

_BLOCK_KEY_BYTES = 32


def name_of_key(key: bytes) -> str | bytes:
    """A key for the client: another one for other bytes."""
    return key if len(key) == _BLOCK_KEY_BYTES else key.decode("latin-1")


class PartialBlock:
    """A block that is written range by range."""

    def __init__(self, reserved: Reservation) -> None:
        self._reserved = reserved

    def write(self, offset: int, data: bytes) -> None:
        """Write a range."""
        self._reserved.write(offset, data)

    def commit(self) -> None:
        """From now on it is readable."""
        self._reserved.commit()

    def abandon(self) -> None:
        """Give the reservation back."""
        self._reserved.abort()


class PoolStore(PoolTarget):
    """`mooncache.Client` on a pool; the configuration is that of `PoolTarget`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        try:
            self._client = mooncache.connect(**self.client_settings())
        except BaseException:
            super().close()
            raise

    def put(self, key: bytes, value: bytes | bytearray | memoryview) -> None:
        """Store a block; of a key that is there the first value stays."""
        self._client.put(name_of_key(key), value, replicas=self.replicas)

    def get(self, key: bytes) -> bytes | None:
        """The block's bytes."""
        return self._client.get(name_of_key(key))

    def get_into(self, key: bytes, destination: memoryview) -> int | None:
        """Read it in place."""
        return self._client.get_into(name_of_key(key), destination)

    def exist(self, key: bytes) -> bool:
        """Whether a node has it."""
        return self._client.exists(name_of_key(key))

    def remove(self, key: bytes) -> bool:
        """Remove it from every node."""
        return self._client.remove(name_of_key(key))

    def begin(self, key: bytes, size_bytes: int) -> PartialBlock:
        """Reserve a block."""
        return PartialBlock(self._client.reserve(name_of_key(key), size_bytes))

    def close(self) -> None:
        """End the client, and the pool if it was started here."""
        self._client.close()
        super().close()
