"""The C API as a program in another language uses it: by ctypes, from the structures of mooncache/c_api.h."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_MS = 10_000


class Options(c.Structure):
    _fields_ = (
        ("struct_bytes", c.c_size_t),
        ("seeds", c.POINTER(c.c_char_p)),
        ("seed_count", c.c_size_t),
        ("token", c.c_char_p),
        ("client_name", c.c_char_p),
        ("connect_timeout_ms", c.c_uint32),
        ("refresh_ms", c.c_uint32),
        ("no_shared_memory", c.c_uint32),
        ("no_rdma", c.c_uint32),
        ("tls", c.c_uint32),
        ("tls_ca", c.c_char_p),
        ("tls_cert", c.c_char_p),
        ("tls_key", c.c_char_p),
        ("tls_server_name", c.c_char_p),
    )


class MemorySlice(c.Structure):
    _fields_ = (("data", c.c_void_p), ("bytes", c.c_size_t))


class Block(c.Structure):
    _fields_ = (("key", c.c_uint8 * 32), ("slices", c.POINTER(MemorySlice)), ("slice_count", c.c_size_t))


class Outcome(c.Structure):
    _fields_ = (("code", c.c_int32), ("copies", c.c_uint32), ("bytes", c.c_uint64))


class State(c.Structure):
    _fields_ = (
        ("struct_bytes", c.c_size_t),
        ("term", c.c_uint64),
        ("epoch", c.c_uint64),
        ("nodes", c.c_uint64),
        ("confirmed_ms_ago", c.c_uint64),
    )


class Pool:
    """A client of the library at `path`. Calls return codes."""

    def __init__(self, path: Path) -> None:
        self.lib = c.CDLL(str(path))
        self.lib.mooncache_code_name.restype = c.c_char_p
        self.lib.mooncache_message.restype = c.c_char_p
        self.client = c.c_void_p()

    def connect(self, seeds: Sequence[str], token: str, timeout_ms: int = TIMEOUT_MS) -> int:
        addresses = (c.c_char_p * len(seeds))(*[seed.encode() for seed in seeds])
        options = Options(
            struct_bytes=c.sizeof(Options),
            seeds=addresses,
            seed_count=len(seeds),
            token=token.encode(),
            connect_timeout_ms=timeout_ms,
            refresh_ms=50,
        )
        return int(self.lib.mooncache_connect(c.byref(options), c.byref(self.client)))

    def close(self) -> None:
        self.lib.mooncache_close(self.client)
        self.client = c.c_void_p()

    @property
    def message(self) -> str:
        return str(self.lib.mooncache_message().decode())

    def name(self, code: int) -> str:
        return str(self.lib.mooncache_code_name(code).decode())

    def key(self, name: str) -> bytes:
        key = (c.c_uint8 * 32)()
        assert self.lib.mooncache_key_of_name(name.encode(), key) == 0
        return bytes(key)

    def put(self, key: bytes, *parts: bytes) -> int:
        memory = [c.create_string_buffer(part, len(part)) for part in parts]
        slices = (MemorySlice * len(parts))(*[MemorySlice(c.addressof(part), len(part)) for part in memory])
        block, outcome = Block((c.c_uint8 * 32)(*key), slices, len(parts)), Outcome()
        code = self.lib.mooncache_put(
            self.client, c.byref(block), c.c_size_t(1), 1, TIMEOUT_MS, c.byref(outcome)
        )
        return int(code or outcome.code)

    def get(self, key: bytes, size: int) -> tuple[int, bytes]:
        memory = c.create_string_buffer(size)
        part = MemorySlice(c.addressof(memory), size)
        block, outcome = Block((c.c_uint8 * 32)(*key), c.pointer(part), 1), Outcome()
        code = self.lib.mooncache_get(
            self.client, c.byref(block), c.c_size_t(1), TIMEOUT_MS, c.byref(outcome)
        )
        return int(code or outcome.code), memory.raw[: outcome.bytes]

    def exists(self, *keys: bytes) -> list[int]:
        codes = (c.c_int32 * len(keys))()
        packed = b"".join(keys)
        assert self.lib.mooncache_exists(self.client, packed, c.c_size_t(len(keys)), TIMEOUT_MS, codes) == 0
        return list(codes)

    def state(self) -> State:
        state = State(struct_bytes=c.sizeof(State))
        assert self.lib.mooncache_cluster_state(self.client, c.byref(state)) == 0
        return state
