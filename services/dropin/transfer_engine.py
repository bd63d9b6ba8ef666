"""The original's `TransferEngine` on ours: raw addresses, numbers instead of errors, "host:port" as a peer's name.

Every address that a caller passes is looked up in what it registered before a byte moves; a peer finds memory by the
address that it has in its owner's process, as callers of the original tell each other.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec

from mooncache.dropin import settings
from mooncache.dropin.memory import check_mapped, gpu_of
from mooncache.dropin.transfer_values import TransferNotify, TransferOpcode
from mooncache.errors import (
    AlreadyExists,
    Closed,
    ConfigInvalid,
    DeadlineExceeded,
    InvalidArgument,
    MooncacheError,
    NotFound,
    StaleIncarnation,
    Unsupported,
)
from mooncache.runtime.logs import Event, get_logger
from mooncache.transfer import EnginePeer, EngineRegion, RangeTransfer, TransferEngine
from mooncache.transfer.engine import host_and_port

P = ParamSpec("P")
_log = get_logger(__name__)
_FIRST_BUFFER_BYTES: Final = 64 << 20
_FIRST: Final = "first"
_TIMEOUT_S: Final = 30.0
_S_PER_BYTE: Final = 1 / (1 << 30)
_BATCHES_MAX: Final = 65_536
DONE, UNDER_WAY, FAILED, TIMED_OUT = 1, 0, -1, -2


def _number(
    call: Callable[Concatenate[MooncakeTransferEngine, P], int],
) -> Callable[Concatenate[MooncakeTransferEngine, P], int]:
    """The call answers a number; of an error -1, and its text goes to the log."""
    return _answering(FAILED, call)


def _identity(
    call: Callable[Concatenate[MooncakeTransferEngine, P], int],
) -> Callable[Concatenate[MooncakeTransferEngine, P], int]:
    """The call answers a batch or an address; of an error 0."""
    return _answering(0, call)


def _answering(
    failure: int, call: Callable[Concatenate[MooncakeTransferEngine, P], int]
) -> Callable[Concatenate[MooncakeTransferEngine, P], int]:
    @functools.wraps(call)
    def guarded(self: MooncakeTransferEngine, /, *args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return call(self, *args, **kwargs)
        except MooncacheError as error:
            _log.warning(
                Event.DROPIN_FAILED,
                call=call.__name__,
                code=failure,
                error=type(error).__name__,
                reason=str(error),
            )
            return failure

    return guarded


@dataclass(slots=True)
class _Registered:
    region: EngineRegion
    mapping: mmap.mmap | None = None  # of memory that was allocated here
    size_bytes: int = 0


class MooncakeTransferEngine:
    """`mooncake.engine.TransferEngine`. Calls answer 0 or -1, addresses and batches 0 when they failed."""

    def __init__(self) -> None:
        self._engine: TransferEngine | None = None
        self._memory: dict[int, _Registered] = {}
        self._peers: dict[str, EnginePeer] = {}
        self._batches: dict[int, RangeTransfer] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    # Set-up.

    @_number
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str = ""
    ) -> int:
        """Listen at `local_hostname`, "host:port" or "host": any free port then, or when that one is taken.

        No metadata server is needed, whatever is named: peers ask each other. `protocol` and `device_name` choose
        nothing: shared memory and TCP are taken by themselves.
        """
        del metadata_server, device_name
        if protocol.lower() not in {"", "tcp", "rdma", "shm", "efa"}:
            raise Unsupported(f"Protocol {protocol!r} is not offered; engines of this package use TCP.")
        if self._engine is not None:
            raise AlreadyExists("The engine is initialised already.")
        for name, instead in settings.foreign_variables(os.environ).items():
            _log.info(Event.DROPIN_IGNORED, name=name, reason=f"{name} {instead}")
        host, colon, port = local_hostname.rpartition(":")
        if not colon or not port.isdigit():
            host, port = local_hostname, "0"
        self._engine = _listening(host.strip("[]") or "127.0.0.1", int(port))
        self.allocate_managed_buffer(_FIRST_BUFFER_BYTES)
        return 0

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """As `initialize`."""
        del metadata_type
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port that peers name after the host; 0: not initialised."""
        return 0 if self._engine is None else self._engine.port

    def get_engine(self) -> None:
        """Not served: there is no C++ object of the original behind this one."""
        _log.warning(Event.DROPIN_REFUSED, call="get_engine", reason="there is no engine of the original")

    def get_engine_ptr(self) -> int:
        """Not served; 0."""
        self.get_engine()
        return 0

    def get_local_topology(self, device_name: str = "") -> str:
        """No devices are chosen from; an empty JSON object."""
        del device_name
        return "{}"

    # Memory.

    @_number
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Let peers read and write memory of the caller, who keeps it until `unregister_memory`."""
        del location
        self._register(buffer_addr, capacity)
        return 0

    @_number
    def unregister_memory(self, buffer_addr: int) -> int:
        """When this answers 0, no peer reads or writes the memory."""
        self._unregister(buffer_addr)
        return 0

    @_number
    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """All of them or, when one cannot be registered, none."""
        del location
        if len(buffer_addresses) != len(capacities):
            raise InvalidArgument("There are not as many capacities as addresses.")
        done: list[int] = []
        try:
            for address, size in zip(buffer_addresses, capacities, strict=True):
                self._register(address, size)
                done.append(address)
        except MooncacheError:
            for address in done:
                self._unregister(address)
            raise
        return 0

    @_number
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """As `unregister_memory` for each."""
        for address in buffer_addresses:
            self._unregister(address)
        return 0

    @_identity
    def allocate_managed_buffer(self, length: int) -> int:
        """New memory that peers may read and write; its address."""
        if length <= 0:
            raise InvalidArgument("A buffer has at least one byte.")
        mapping = mmap.mmap(-1, length)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._register(address, length, mapping)
        return address

    @_number
    def free_managed_buffer(self, user_tensor: int, length: int = 0) -> int:
        """Give memory of `allocate_managed_buffer` back."""
        del length
        with self._lock:
            known = self._memory.get(user_tensor)
        if known is None or known.mapping is None:
            raise NotFound("No buffer was allocated at this address.")
        self._unregister(user_tensor)
        return 0

    @_identity
    def get_first_buffer_address(self, segment_name: str) -> int:
        """Of the first buffer of a peer, or of this engine by its own name."""
        host, port = host_and_port(segment_name)
        if port == self.get_rpc_port():
            with self._lock:
                if segment_name not in self._peers and self._memory:
                    return next(iter(self._memory))
        peer = self._peer(f"{host}:{port}")
        peer.refresh()
        regions = peer.regions
        if not regions:
            raise NotFound(f"{segment_name} has no memory for peers.")
        first = [region for region in regions if region.label == _FIRST]
        return (first or list(regions))[0].address

    @_number
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """Copy bytes into registered memory of this engine."""
        if length > len(src_ptr):
            raise InvalidArgument("There are fewer bytes than `length`.")
        self._check_local(dest_address, length)
        ctypes.memmove(dest_address, bytes(src_ptr), length)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Bytes of registered memory of this engine. Raises InvalidArgument: it is not registered."""
        self._check_local(source_address, length)
        return ctypes.string_at(source_address, length)

    # Transfers.

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, *_hint: str
    ) -> int:
        """Write one range to a peer."""
        return self.batch_transfer_sync_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, *_hint: str
    ) -> int:
        """Read one range of a peer."""
        return self.batch_transfer_sync_read(target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *_hint: str,
    ) -> int:
        """Write several ranges; 0: all of them are in place."""
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write
        )

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *_hint: str,
    ) -> int:
        """Read several ranges; 0: all of them are here."""
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read
        )

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        *_hint: str,
    ) -> int:
        """One range, either way."""
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify
        )

    @_number
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        *_hint: str,
    ) -> int:
        """Several ranges, either way; then the peer hears `notify`."""
        transfer = self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)
        transfer.wait()
        if notify is not None:
            self._peer(target_hostname).notify(notify.packed())
        return 0

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, *_hint: str
    ) -> int:
        """Begin to write one range; a number for `transfer_check_status`, 0 when it failed."""
        return self.batch_transfer_async_write(target_hostname, [buffer], [peer_buffer_address], [length])

    @_identity
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *_hint: str,
    ) -> int:
        """Begin to write; a number for `get_batch_transfer_status`, 0 when it failed."""
        return self._keep(
            self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)
        )

    @_identity
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        *_hint: str,
    ) -> int:
        """Begin to read; a number for `get_batch_transfer_status`, 0 when it failed."""
        return self._keep(
            self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)
        )

    def transfer_check_status(self, batch_id: int) -> int:
        """1: done, 0: under way, -1: failed or unknown, -2: took too long."""
        with self._lock:
            transfer = self._batches.get(batch_id)
        if transfer is None:
            return FAILED
        if not transfer.done:
            return UNDER_WAY
        with self._lock:
            self._batches.pop(batch_id, None)
        try:
            transfer.wait(0)
        except DeadlineExceeded:
            return TIMED_OUT
        except MooncacheError as error:
            _log.warning(
                Event.DROPIN_FAILED,
                call="transfer_check_status",
                code=FAILED,
                error=type(error).__name__,
                reason=str(error),
            )
            return FAILED
        return DONE

    @_number
    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all of these; 0: all are done."""
        with self._lock:
            transfers = [self._batches.pop(number, None) for number in batch_ids]
        if any(transfer is None for transfer in transfers):
            raise NotFound("A batch is not known, or was asked for before.")
        failure: MooncacheError | None = None
        for transfer in transfers:
            try:
                if transfer is not None:
                    transfer.wait()
            except MooncacheError as error:
                failure = error
        if failure is not None:
            raise failure
        return 0

    def get_notifies(self) -> list[TransferNotify]:
        """What peers have sent since the last call."""
        if self._engine is None:
            return []
        return [TransferNotify.unpacked(notice.data) for notice in self._engine.notifications()]

    @_number
    def send_probe(self, peer_server_name: str) -> int:
        """0: an engine answers there."""
        self._peer(peer_server_name).refresh(5.0)
        return 0

    def close(self) -> None:
        """End all connections; not a call of the original, which does so when the object is collected."""
        for peer in self._peers.values():
            peer.close()
        if self._engine is not None:
            self._engine.close()
        self._peers.clear()
        self._memory.clear()

    # Inside.

    @property
    def _running(self) -> TransferEngine:
        if self._engine is None:
            raise Closed("The engine is not initialised. Call initialize() first.")
        return self._engine

    def _register(self, address: int, size: int, mapping: mmap.mmap | None = None) -> None:
        engine = self._running
        if size <= 0 or address <= 0:
            raise InvalidArgument("Memory has an address, and at least one byte.")
        if gpu_of(address) is not None:
            raise Unsupported("Memory of a GPU is not offered to peers.")
        check_mapped(address, size)
        view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        label = _FIRST if not self._memory else ""
        region = engine.register(view, label=label, readable_by="*", writable_by="*", address=address)
        with self._lock:
            self._memory[address] = _Registered(region, mapping, size)

    def _unregister(self, address: int) -> None:
        with self._lock:
            known = self._memory.get(address)
        if known is None:
            raise NotFound("No memory is registered at this address.")
        known.region.close()
        with self._lock:
            self._memory.pop(address, None)

    def _check_local(self, address: int, size: int) -> None:
        with self._lock:
            inside = any(
                start <= address and address + size <= start + known.size_bytes
                for start, known in self._memory.items()
            )
        if size < 0 or not inside:
            raise InvalidArgument(
                f"{size} bytes at {address:#x} are not inside memory that is registered here."
            )

    def _peer(self, name: str) -> EnginePeer:
        with self._lock:
            known = self._peers.get(name)
        if known is not None:
            return known
        peer = self._running.connect(name)
        with self._lock:
            return self._peers.setdefault(name, peer)

    def _begin(
        self,
        target: str,
        buffers: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
    ) -> RangeTransfer:
        if not len(buffers) == len(remote) == len(lengths):
            raise InvalidArgument("Buffers, peer addresses and lengths are not of one number.")
        for address, size in zip(buffers, lengths, strict=True):
            self._check_local(address, size)
        ranges: list[tuple[Any, int, int]] = list(zip(buffers, remote, lengths, strict=True))
        limit_s = _TIMEOUT_S + sum(lengths) * _S_PER_BYTE
        peer = self._peer(target)
        begin = peer.write if opcode is TransferOpcode.Write else peer.read
        try:
            return begin(ranges, limit_s)
        except (Closed, StaleIncarnation):
            with self._lock:
                self._peers.pop(target, None)
            raise

    def _keep(self, transfer: RangeTransfer) -> int:
        with self._lock:
            if len(self._batches) >= _BATCHES_MAX:
                raise InvalidArgument(f"{_BATCHES_MAX} batches were begun and not asked for.")
            number = next(self._numbers)
            self._batches[number] = transfer
        return number


def _listening(host: str, port: int) -> TransferEngine:
    try:
        return TransferEngine(listen=f"{host}:{port}")
    except ConfigInvalid:
        if not port:
            raise
    return TransferEngine(listen=f"{host}:0")
