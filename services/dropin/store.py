"""MooncakeDistributedStore: the original's store API, every call on a pool of ours.

Names and signatures are those of its Python package; docs/mooncake-store.md has the table of what differs and what is
refused. A number that a call answers is 0, a count, or a negative code (codes.py); the reason is in the log.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncache.client.buffers import to_view
from mooncache.client.options import ClientOptions
from mooncache.client.sync import Client
from mooncache.dropin import codes
from mooncache.dropin.base import each, failed, first_failure, one, other, refuse
from mooncache.dropin.objects import Objects, Source
from mooncache.dropin.segment import OwnSegment, SegmentName, incarnation_of
from mooncache.dropin.settings import SetupRefusedError, SetupSettings, checked, foreign_variables
from mooncache.dropin.tensors import TensorCalls
from mooncache.dropin.values import BufferHandle, ReplicaDescriptor, ReplicateConfig
from mooncache.dropin.zero_copy import ZeroCopyCalls
from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
_HEALTHY, _NOT_SET_UP, _MASTER_UNREACHABLE = 0, 1, 2
_DISK = "ssd"


def _value(value: Any) -> Source:
    """The bytes of a value. Raises TypeError for what is no buffer, InvalidArgument for one that is not contiguous."""
    if isinstance(value, str) or not (hasattr(value, "__dlpack__") or _is_buffer(value)):
        raise TypeError(f"A value is a bytes-like object; got {type(value).__name__}.")
    return [to_view(value, writable=False)]


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except TypeError:
        return False
    except BufferError:
        return True
    return True


class MooncakeDistributedStore(ZeroCopyCalls, TensorCalls):
    """A store of objects under names. Thread-safe once it is set up."""

    def __init__(self) -> None:
        super().__init__()
        self._client: Client | None = None
        self._segment: OwnSegment | None = None
        self._name: SegmentName | None = None
        self._pid = os.getpid()

    # --- life ------------------------------------------------------------------------------------------------

    def setup(
        self,
        local_hostname: str | Mapping[str, Any],
        metadata_server: str | None = None,
        global_segment_size: int | str | None = None,
        local_buffer_size: int | str | None = None,
        protocol: str | None = None,
        rdma_devices: str | None = None,
        master_server_addr: str | None = None,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Connect to the master at `master_server_addr` (empty: the configured one) and contribute
        `global_segment_size` bytes of this machine's memory, 0 for none. Or the same as one dictionary by these names.

        The token, TLS and all else that the original has no argument for come from the configuration, as for every
        client: MOONCACHE_… variables, a TOML file, or the state folder.

        Returns:
            0, or a negative code; the log says why.
        """
        if isinstance(local_hostname, Mapping):
            given = dict(local_hostname)
            missing = [name for name in ("local_hostname", "metadata_server") if name not in given]
        else:
            given = {name: value for name, value in locals().items() if name not in {"self", "__class__"}}
            missing = [name for name, value in given.items() if value is None and name != "engine"]
        if missing:
            raise TypeError(f"setup() needs {', '.join(missing)}.")
        if self._connected is not None:
            refuse("setup", "the store is set up already; call close() first")
            return codes.INVALID_PARAMS
        try:
            self._connect(checked(given))
        except SetupRefusedError as error:
            self.close()
            refuse("setup", str(error))
            return codes.INVALID_PARAMS
        except MooncacheError as error:
            self.close()
            return failed("setup", error)
        return codes.OK

    def _connect(self, asked: SetupSettings) -> None:
        for reason in asked.ignored:
            _log.warning(Event.DROPIN_IGNORED, name=reason.partition(":")[0], reason=reason)
        for name, reason in foreign_variables(os.environ).items():
            _log.warning(Event.DROPIN_IGNORED, name=name, reason=reason)
        self._pid = os.getpid()
        self._name = SegmentName(asked.host, asked.port)
        name = str(self._name)
        master = asked.master or None
        self._client = Client(master, tenant=asked.tenant, client_name=f"mooncake-{os.getpid()}")
        if asked.segment_bytes:
            options = ClientOptions.gather(master)
            former = incarnation_of(self._client, name)
            self._segment = OwnSegment.start(options, name, asked.host, asked.segment_bytes)
            weakref.finalize(self, self._segment.stop)
            self._segment.wait(self._client, former)
        self._connected = Objects(self._client)
        _log.info(
            Event.DROPIN_CONNECTED,
            segment=name,
            segment_bytes=asked.segment_bytes,
            tenant=self._client.tenant,
        )

    def close(self) -> int:
        """End the connection, and the memory that this store contributed with what lies in it. 0, also a second time.

        In a forked child it does nothing: the connection and the memory are the parent's.
        """
        if os.getpid() != self._pid:
            return codes.OK
        self._connected = None
        self._registry.clear()
        client, self._client = self._client, None
        segment, self._segment = self._segment, None
        name, self._name = self._name, None
        if client is not None:
            client.close()
        if segment is not None:
            segment.stop()
        if name is not None:
            name.close()
        return codes.OK

    def health_check(self) -> int:
        """0: usable; 1: not set up; 2: there is no node that takes blocks."""
        if self._client is None:
            return _NOT_SET_UP
        return (
            _HEALTHY if any(node.state == "active" for node in self._client.nodes()) else _MASTER_UNREACHABLE
        )

    def get_hostname(self) -> str:
        """Name of this store's segment, host:port: the node_id of the memory it contributes; "" before setup."""
        return "" if self._name is None else str(self._name)

    # --- put -------------------------------------------------------------------------------------------------

    @one
    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store an object; 0 also when it is there already, which then stays as it is."""
        return self._put("put", [key], [_value(value)], config)[0]

    @one
    def put_parts(self, key: str, *args: Any, config: ReplicateConfig | None = None) -> int:
        """Store one object that is all the parts, one after the other."""
        return self._put("put_parts", [key], [[part for arg in args for part in _value(arg)]], config)[0]

    @one
    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """Store objects; 0, or the first negative code."""
        return first_failure(self._put("put_batch", keys, [_value(value) for value in values], config))

    @one
    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store an object, in place of what is there."""
        return self._put("upsert", [key], [_value(value)], config, replace=True)[0]

    @one
    def upsert_parts(self, key: str, *args: Any, config: ReplicateConfig | None = None) -> int:
        """`put_parts`, in place of what is there."""
        source = [part for arg in args for part in _value(arg)]
        return self._put("upsert_parts", [key], [source], config, replace=True)[0]

    @one
    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """`put_batch`, in place of what is there."""
        sources = [_value(value) for value in values]
        return first_failure(self._put("upsert_batch", keys, sources, config, replace=True))

    # --- get -------------------------------------------------------------------------------------------------

    @other(b"")
    def get(self, key: str) -> bytes:
        """An object's bytes; b"" when it cannot be read."""
        return self._objects.get([key])[0] or b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """`get` for a batch."""
        return [value or b"" for value in self._read(keys)]

    def _read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        try:
            return self._objects.get(keys)
        except MooncacheError as error:
            failed("get_batch", error)
            return [None] * len(keys)

    def get_buffer(self, key: str) -> BufferHandle | None:
        """An object's bytes as a buffer with an address; None when it cannot be read."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """`get_buffer` for a batch."""
        return [None if value is None else BufferHandle(value) for value in self._read(keys)]

    # --- questions -------------------------------------------------------------------------------------------

    @one
    def is_exist(self, key: str) -> int:
        """1, 0, or a negative code."""
        return self._objects.exist([key])[0]

    @each
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """`is_exist` for a batch."""
        return self._objects.exist(keys)

    @one
    def get_size(self, key: str) -> int:
        """Bytes of an object, or a negative code."""
        return self._objects.sizes([key])[0]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The copies of an object; none when it is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """`get_replica_desc` for a batch, without those that are not there. Of a large object: of its manifest."""
        try:
            stats = self._objects.stats(keys)
        except MooncacheError as error:
            failed("batch_get_replica_desc", error)
            return {}
        return {
            key: [
                ReplicaDescriptor(node, (manifest or stat).size_bytes, on_disk=tier == _DISK)
                for node, tier in zip(stat.node_ids, stat.tiers, strict=True)
            ]
            for key, (_, stat, manifest) in zip(keys, stats, strict=True)
            if stat is not None
        }

    # --- removal ---------------------------------------------------------------------------------------------

    @one
    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object, with its pin."""
        return self._forget([key], self._objects.remove([key]))[0]

    @each
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """`remove` for a batch, one code for each key."""
        return self._forget(keys, self._objects.remove(keys))

    def _forget(self, keys: Sequence[str], answer: list[int]) -> list[int]:
        with self._names_lock:
            for key, code in zip(keys, answer, strict=True):
                if code in {codes.OK, codes.NOT_FOUND}:
                    self._names.pop(key, None)
        return answer

    @one
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the objects that **this store** wrote whose names match somewhere; how many, or a negative code.

        The pool keeps hashes of names. So it is the newest million names that this store itself used in puts.
        """
        try:
            pattern = re.compile(regex_pattern)
        except re.error as error:
            raise InvalidArgument(f"{regex_pattern!r} is no regular expression: {error}.") from error
        with self._names_lock:
            names = [name for name in self._names if pattern.search(name)]
        return self._forget(names, self._objects.remove(names)).count(codes.OK)

    @one
    def remove_all(self, force: bool = False) -> int:
        """Remove every block of the tenant, whoever wrote it; how many."""
        count = self._objects.remove_all()
        with self._names_lock:
            self._names.clear()
        return count

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove objects, or their copies in one segment; the keys of those that were there.

        Nothing has to wait for a lease: who reads an object at that moment keeps it until it has it.
        """
        try:
            found = self._objects.remove(keys, segment_name)
        except MooncacheError as error:
            failed("batch_replica_clear", error)
            return []
        if not segment_name:
            self._forget(keys, found)
        return [key for key, code in zip(keys, found, strict=True) if code == codes.OK]


_LATER = "store shards with the calls `*_with_tp`; other axes are not offered"
_ELSEWHERE = codes.UNAVAILABLE_IN_MODE
_REFUSED: dict[str, tuple[str, Any]] = {
    "alloc_from_mem_pool": ("any host memory can be used", 0),
    "allocate_and_mount_segment": ("start another store node", {"ret": _ELSEWHERE}),
    "batch_get_into_multi_buffer_ranges": ("use get_into_ranges", [_ELSEWHERE]),
    "batch_get_session_end": ("use get_into_ranges", _ELSEWHERE),
    "batch_get_session_start": ("use get_into_ranges", [_ELSEWHERE]),
    "batch_get_tensor_into_cuda": ("use batch_get_tensor", [_ELSEWHERE]),
    "batch_get_tensor_with_parallelism": (_LATER, [None]),
    "batch_get_tensor_with_parallelism_into": (_LATER, [None]),
    "batch_get_tensor_with_tp_into": ("use get_tensor_with_tp_into", [None]),
    "batch_put_from_multi_buffer_ranges": ("use batch_put_from_multi_buffers", [_ELSEWHERE]),
    "batch_put_session_end": ("use batch_put_from_multi_buffers", [_ELSEWHERE]),
    "batch_put_session_revoke": ("use batch_put_from_multi_buffers", [_ELSEWHERE]),
    "batch_put_session_start": ("use batch_put_from_multi_buffers", [_ELSEWHERE]),
    "batch_put_tensor_with_parallelism": (_LATER, [_ELSEWHERE]),
    "batch_put_tensor_with_parallelism_from": (_LATER, [_ELSEWHERE]),
    "batch_put_tensor_with_tp_from": ("use batch_put_tensor_with_tp", [_ELSEWHERE]),
    "batch_upsert_tensor_with_parallelism": (_LATER, [_ELSEWHERE]),
    "batch_upsert_tensor_with_parallelism_from": (_LATER, [_ELSEWHERE]),
    "create_copy_task": ("the master makes copies of what is read often", ((0, 0), _ELSEWHERE)),
    "create_move_task": ("`mooncache drain` moves a node's blocks", ((0, 0), _ELSEWHERE)),
    "get_offload_rpc_read_count": ("nodes count reads from their disks in their metrics", 0),
    "get_tensor_into_cuda": ("use get_tensor", _ELSEWHERE),
    "get_tensor_with_parallelism": (_LATER, None),
    "get_tensor_with_parallelism_into": (_LATER, None),
    "init_all": ("call setup", _ELSEWHERE),
    "mount_segment": ("start another store node (store_node.arena_path)", {"ret": _ELSEWHERE}),
    "put_tensor_with_parallelism": (_LATER, _ELSEWHERE),
    "put_tensor_with_parallelism_from": (_LATER, _ELSEWHERE),
    "put_tensor_with_tp_from": ("use put_tensor_with_tp", _ELSEWHERE),
    "query_task": ("there are no such tasks", (None, _ELSEWHERE)),
    "setup_dummy": ("call setup with global_segment_size 0", _ELSEWHERE),
    "unmount_and_free_segment": ("end the store node", _ELSEWHERE),
    "unmount_local_disk_segment": ("end the store node", _ELSEWHERE),
    "unmount_segment": ("end the store node", _ELSEWHERE),
    "upsert_tensor_with_parallelism": (_LATER, _ELSEWHERE),
    "upsert_tensor_with_parallelism_from": (_LATER, _ELSEWHERE),
}
"""Calls of the original that exist, so that a caller can go on, and only say that they are not served: why, and the
answer. A list of one is the answer for each key."""


def _refused(name: str, reason: str, answer: Any) -> Callable[..., Any]:
    def call(_self: MooncakeDistributedStore, *args: Any, **named: Any) -> Any:
        refuse(name, reason)
        if not isinstance(answer, list):
            return answer
        return answer * len(args[0] if args else named["keys"])

    call.__name__ = name
    call.__doc__ = f"Not served: {reason}."
    return call


for _name, (_reason, _answer) in _REFUSED.items():
    setattr(MooncakeDistributedStore, _name, _refused(_name, _reason, _answer))
