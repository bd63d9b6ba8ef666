"""Mooncache native data plane"""

from collections.abc import Sequence
from typing import Any


def crc32c(data: object, seed: int = 0) -> int:
    """
    CRC-32C of a bytes-like object, continuing from seed (the CRC of what came before).
    """

def crc32c_combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """CRC of A followed by B from both CRCs and the length of B in bytes."""

def crc32c_implementation() -> str:
    """The version this processor runs: portable, sse42, avx512 or armv8."""

def blake3(data: object) -> bytes:
    """BLAKE3 digest (32 bytes) of a bytes-like object."""

def blake3_keyed(key: object, data: object) -> bytes:
    """Keyed BLAKE3 digest (32 bytes). ValueError unless key has 32 bytes."""

def blake3_derive_key(context: str, data: object) -> bytes:
    """
    BLAKE3 key derivation (32 bytes): context is a constant of the program, data the key material.
    """

def chain_keys(root: object, tokens: object, block_tokens: int, parent: object | None = None) -> bytes:
    """
    Keys of the complete blocks of tokens, 32 bytes each, concatenated. tokens is a contiguous array of 32- or 64-bit integers; parent is the last key of a chain to continue. ValueError for anything else.
    """

def passport_root(fields: Sequence[tuple[str, str]]) -> bytes:
    """
    Digest (32 bytes) of the canonical encoding of (name, value) fields; their order does not matter. ValueError for no field, an empty or repeated name, or text beyond the limits.
    """

def key_of_name(name: str) -> bytes:
    """Block key (32 bytes) of a user-chosen name."""

def tenant_id_of(name: str) -> int:
    """Number of a tenant (64 bits) from its name."""

def memory_benchmark(block_bytes: int, count: int, repeats: int) -> dict[str, float]:
    """
    Median bytes per second of memcpy, crc32c, memcpy then crc32c, and copy_crc32c over count distinct buffers of block_bytes. ValueError for zeros or more than 16 GiB.
    """

class BlockIndex:
    """
    Which holder has which block. Thread-safe; every method releases the GIL around its work.
    """

    def __init__(self, hash_seed: int | None = None, blocks_max: int = 2147483648) -> None:
        """
        hash_seed: 64 bits, random unless given. blocks_max: records beyond it are refused.
        """

    def apply(self, holder: int, records: object) -> None:
        """
        Applies packed 56-byte block records of one holder (below 65535). ValueError, with nothing applied, for a cut or unknown record or a full index.
        """

    def begin_full(self, holder: int) -> None:
        """Begins, or begins again, a full report of a holder."""

    def end_full(self, holder: int) -> int:
        """
        Ends a full report: drops the blocks it did not mention and returns how many. ValueError without begin_full.
        """

    def drop_holder(self, holder: int) -> int:
        """Forgets all blocks of a holder and returns how many."""

    def locate(self, tenant_id: int, keys: object, holders_max: int = 65535) -> bytes:
        """
        keys: n * 32 bytes. For each key u16 count, then count times u16 holder, u8 tier, u8 0, u64 size_bytes (little endian). ValueError when keys are cut.
        """

    def match(self, tenant_id: int, keys: object) -> list[tuple[int, int]]:
        """
        (holder, leading blocks) of every holder of the first key, longest first.
        """

    def match_tiers(self, tenant_id: int, keys: object) -> list[tuple[int, int, int, int, int]]:
        """
        (holder, leading blocks in HBM, in DRAM or faster, in SSD or faster, in any tier), longest first.
        """

    def present(self, tenant_id: int, keys: object) -> bytes:
        """Bitmap: bit i % 8 of byte i // 8 when anyone holds key i."""

    def audit(self, wanted: Sequence[tuple[int, int]], wanted_of_others: int, domains: Sequence[int], domain_count: int, start: int, entries_max: int, found_max: int) -> tuple[int, int, int, int, int, bytes]:
        """
        Blocks with fewer copies than wanted ((tenant_id, copies), those of others), or with enough copies in too few domains (one number for each holder; 65535: its copies do not count). (next start or 0, short blocks, missing bytes, close blocks, close bytes, records of 52 bytes: u64 tenant, key, u64 size, u16 copies, u8 fastest tier, u8 close).
        """

    def tenant_usage(self) -> dict[int, tuple[int, int]]:
        """tenant_id -> (bytes of all replicas, distinct blocks)."""

    def holder_usage(self) -> dict[int, tuple[int, int]]:
        """holder -> (bytes, blocks)."""

    def stats(self) -> dict[str, int]:
        """
        blocks, replicas, bytes, memory_bytes, records_applied, popular_blocks.
        """

    def memory_bytes(self) -> int:
        """Memory that the index itself takes."""

    def check(self) -> str:
        """Verifies every invariant: "" or what is wrong. Linear in the index."""

def index_benchmark(blocks: int, holders: int, operations: int = 4000000) -> dict[str, float]:
    """
    Block operations per second of one core for apply, locate and match, with `blocks` blocks on `holders` holders, and bytes of index per block. ValueError for zeros or sizes beyond the limits.
    """

class DiskModel:
    """
    Which blocks a store node's disk would have, without a disk: the same decisions.
    """

    def __init__(self, capacity_bytes: int, block_bytes: int, write_bytes_per_s: int = 0, seed: int = 1) -> None: ...

    def offer(self, block: int, hits: int, chance: float, now_s: float) -> list[int]:
        """
        Memory evicts the block. Returns the blocks that the disk gives up for it.
        """

    def touch(self, block: int) -> None:
        """It was asked for."""

    def discard(self, block: int) -> None: ...

    def counts(self) -> dict[str, Any]: ...

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int: ...

def replay_chains(eviction: str, capacity_blocks: int, chains: Sequence[Sequence[int]], times_ms: Sequence[int]) -> list[int]:
    """
    Leading blocks found of each chain by a store with the policy: each chain is asked for, then what is missing is put. ValueError for a policy or capacity that the store refuses.
    """

class Reuse:
    """
    The store nodes' eviction policy "mooncache", for tests: one thread, ids for blocks.
    """

    def __init__(self, chains_max: int = 65536, start_uses: int = 512) -> None: ...

    def seen(self, blocks: Sequence[int], now_s: float, here: object = ...) -> None:
        """
        A chain was asked for. Bit at % 8 of byte at / 8 of here: blocks[at] is stored.
        """

    def stored(self, block: int, now_s: float) -> bool: ...

    def discard(self, block: int) -> None: ...

    def set_aside(self, block: int) -> None: ...

    def victim(self, now_s: float, incoming: int | None = None) -> tuple[int, float] | None:
        """(block, worth) of what should go next, None when no block is known."""

    def next_victims(self, now_s: float, limit: int) -> list[tuple[int, float]]:
        """
        (block, chance of another use) of what would go next, the first one first.
        """

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def chains(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    def check(self) -> str:
        """Empty when every invariant holds, else the first broken one."""

class ObjectRequests:
    """
    Calls on an object store that a store node wants made. Threads of the owner take and complete them; the node waits for none longer than its time limit.
    """

    def __init__(self) -> None: ...

    def take(self, wait_ms: int) -> tuple[int, int, str, int, int, bytes] | None:
        """
        The next call: id, kind (0 list, 1 read, 2 write, 3 delete), name, offset, size, bytes to write. None when there is none within the time, or after close().
        """

    def complete(self, id: int, result: int, data: object) -> None:
        """
        Ends a call: 0 or a negative errno, and the bytes that it has read. A list is for each object: length of the name (u16), name, size (u64), a number that changes with its bytes (u64), little endian.
        """

    def close(self) -> None:
        """Ends every call, those that are asked later, too."""

    @property
    def closed(self) -> bool:
        """Whether close() was called."""

class StoreServer:
    """
    Data-plane server of a store node and its store. Calls that fail as a whole raise RuntimeError(code, name, message); batches report one code per key.
    """

    def __init__(self, config: dict[str, Any]) -> None: ...

    def start(self) -> None: ...

    def stop(self, timeout_s: float = 5.0) -> None: ...

    def endpoints(self) -> dict[str, Any]: ...

    def arena(self) -> dict[str, Any]: ...

    def populate(self, offset: int, length: int, threads: int) -> None:
        """Puts memory behind these bytes of the arena."""

    def kept(self) -> dict[str, Any]:
        """
        What became of the memory of a former process, and what the next one needs.
        """

    def tend_kept(self, max_bytes: int) -> dict[str, int]:
        """
        Compares adopted blocks with their checksums, and frees extents that no former client can write now.
        """

    def stats(self) -> dict[str, int]: ...

    def latency_histograms(self) -> dict[str, Any]: ...

    def rails(self) -> list[dict[str, Any]]: ...

    def drain_log(self, max_events: int = 256) -> list[tuple[int, str, str]]: ...

    def drain_events(self, max_events: int) -> tuple[int, int, bool, bytes]: ...

    def event_seq(self) -> int: ...

    def snapshot(self, cursor: int, max_records: int) -> tuple[int, bytes]: ...

    def set_draining(self, draining: bool) -> None: ...

    def set_limits(self, tenant: str, *, memory_quota_bytes: int = 0, memory_share_bytes: int = 0, disk_quota_bytes: int = 0, disk_share_bytes: int = 0, bytes_per_s: int = 0, ttl_ms: int = 0, encrypted: bool = False) -> None: ...

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """The cluster's secrets of 32 bytes that peers may prove from now on."""

    def secret_uses(self) -> list[tuple[int, int]]:
        """
        (open connections, Unix time in seconds of the last proof or 0) of each secret.
        """

    def set_keys(self, tenant: str, keys: Sequence[bytes]) -> None:
        """
        Keys of 32 bytes that the tenant's blocks are encrypted with on disks: the first one writes, all of them read.
        """

    def tend_tenants(self, max_slots: int) -> dict[int, dict[str, int]]:
        """
        Counts what tenants have held since the last call and ends blocks that are too old. Figures by tenant id; 0: of all that are not remembered.
        """

    def purge(self, tenant_id: int, cursor: int) -> dict[str, int]:
        """
        Overwrites a page of a tenant's blocks; next_cursor 0: it was the last one.
        """

    def remove(self, tenant_id: int, keys: object, reason: int, force: bool = False) -> list[int]: ...

    def pin(self, tenant_id: int, keys: object, ttl_ms: int) -> list[int]: ...

    def unpin(self, tenant_id: int, keys: object) -> list[int]: ...

    def tenants(self) -> dict[int, str]: ...

    def check(self) -> str:
        """
        Empty when every invariant of the store holds, else the first broken one.
        """

    def corrupt(self, tenant_id: int, key: object, bit: int) -> int:
        """Fault injection for tests: flips one stored bit. Returns a code."""

    def writers(self) -> list[dict[str, Any]]:
        """
        Who has blocks here, or is known by name. Writer 0: of no known writer.
        """

    def writers_refused(self) -> int: ...

    def know_writer(self, id: int, instance: str, build: str, started_unix_s: int) -> bool:
        """Remembers what a writer has said of itself."""

    def origins(self, tenant_id: int, keys: object) -> list[tuple[int, int]]:
        """
        Of each block: its writer's id, and when it was written in seconds of Unix time; 0: unknown.
        """

    def set_origins(self, tenant_id: int, keys: object, origins: Sequence[tuple[int, int]]) -> list[int]:
        """Of copies: who wrote them first. A code for each."""

    def recall(self, writer: int, cursor: int, *, since_unix_s: int = 0, until_unix_s: int = 0, dry_run: bool = False, refuse_s: int = 0) -> dict[str, int]:
        """
        Removes a page of a writer's blocks for good; next_cursor 0: it was the last one.
        """

    def lift(self, writer: int) -> None:
        """
        What the writer writes becomes visible again; refuse_s of 4294967295 has no end before this call.
        """

    def set_cluster_map(self, term: int, epoch: int, nodes: list[dict[str, object]]) -> None:
        """
        What the node answers from now on when a peer asks which nodes there are.
        """

def store_growth_benchmark(from_blocks: int, to_blocks: int) -> dict[str, float]:
    """
    Fills a store of small blocks: the longest put between these two counts, in processor time and by the clock, and the mean.
    """

def disk_rates_benchmark(path: str, disk_bytes: int, memory_bytes: int, block_bytes: int, depth: int, write_ms: int, read_ms: int, encrypted: bool = False) -> dict[str, Any]:
    """
    What the SSD tier writes and reads in this folder, through a store, and its processor time.
    """

def disk_start_benchmark(path: str, records: int) -> dict[str, float]:
    """
    Writes so many small blocks to a disk in this folder, and opens it again: the time that takes.
    """

class CancelToken:
    """Stops calls from another thread; stays cancelled."""

    def __init__(self) -> None: ...

    def cancel(self) -> None: ...

    @property
    def cancelled(self) -> bool: ...

class StagedTally:
    """Bytes that passed through staging memory of the client."""

    def __init__(self) -> None: ...

    @property
    def bytes(self) -> int: ...

def place(key: object, nodes: list[dict[str, object]], host_id: str, count: int) -> list[int]:
    """Positions of the nodes for a block, best first."""

class Client:
    """
    Cluster client. Failed calls raise RuntimeError(code, name, message); batches report one code per item.
    """

    def __init__(self, config: dict[str, Any]) -> None: ...

    def set_map(self, epoch: int, nodes: list[dict[str, object]]) -> bool:
        """False when the map is older than the one in use."""

    @property
    def map_epoch(self) -> int: ...

    def set_key(self, key: bytes) -> None:
        """
        Connections that are made from now on prove this key (32 bytes) of the same tenant.
        """

    def put(self, keys: object, sources: object, replicas: int = 1, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None, prefer_node: int | None = None, tally: StagedTally | None = None) -> list[tuple[int, int | None, bool]]:
        """
        -> [(code, node_index, created)]; prefer_node: the first copy goes there when the node takes new blocks
        """

    def get(self, keys: object, destinations: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, offsets: object | None = None, node: int | None = None, tally: StagedTally | None = None) -> list[tuple[int, int, int | None]]:
        """-> [(code, size_bytes, node_index)]"""

    def get_bytes(self, keys: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[bytes | int]:
        """-> list of bytes, or of the code (int) where there is no block"""

    def get_lent(self, keys: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[ReceivedBlock | bytes | int]:
        """
        -> list of ReceivedBlock, of bytes where no memory was left to lend, of the code (int) where there is no block
        """

    def register_buffer(self, buffer: object) -> Registration: ...

    def register_device_buffer(self, gpu: GpuDevice, address: int, size: int, array: object) -> Registration:
        """`array` is kept until the registration ends."""

    def gpu_direct(self, gpu: GpuDevice) -> str:
        """How calls reach the memory of this GPU, empty before one tried."""

    def put_device(self, keys: object, sources: Sequence[Sequence[tuple[int, int]]], replicas: int = 1, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None, prefer_node: int | None = None) -> list[tuple[int, int | None, bool]]:
        """As put, out of registered device memory only."""

    def get_device(self, keys: object, destinations: Sequence[Sequence[tuple[int, int]]], timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[tuple[int, int, int | None]]:
        """As get, into registered device memory only."""

    def watch(self) -> BlockWatch: ...

    def give_up(self, keys: object, timeout_s: float = 30.0, node: int | None = None) -> int:
        """-> waits that ended"""

    def match(self, keys: object, timeout_s: float = 30.0, touch: bool = True, cancel: CancelToken | None = None, node: int | None = None, all_nodes: bool = False) -> tuple[int, tuple[bool, ...], int, list[list[tuple[int, int]]], list[int]]:
        """
        -> (leading_run, a bool for each key, unreachable_nodes, places, for each key its number in places); a place is [(node index, tier)] in the order of reading; all_nodes: every node is asked, however many there are
        """

    def prefetch(self, keys: object, max_bytes: int, begin_s: float, timeout_s: float = 30.0) -> tuple[int, int]:
        """
        -> blocks and bytes that begin to come up from disks, as far as match has heard of them
        """

    def exists(self, keys: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> tuple[bool, ...]:
        """-> a bool for each key"""

    def remove(self, keys: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[int]: ...

    def pin(self, keys: object, ttl_s: float, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[int]: ...

    def unpin(self, keys: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[int]: ...

    def stat(self, keys: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> list[dict[str, Any] | None]:
        """-> list of dict, None where there is no block"""

    def list_blocks(self, node: int, cursor: int = 0, limit: int = 1000, timeout_s: float = 30.0, cancel: CancelToken | None = None) -> tuple[int, list[tuple[bytes, int, int, int]]]:
        """
        -> (next_cursor, [(key, size_bytes, tier, hits)]); next_cursor 0: that was the last page
        """

    def node_stat(self, node: int, timeout_s: float = 30.0) -> dict[str, int]: ...

    def ping(self, node: int, timeout_s: float = 30.0) -> float:
        """-> round trip in seconds"""

    def reserve(self, key: object, size_bytes: int, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None) -> Reservation: ...

    def reserve_many(self, keys: object, block_bytes: int, timeout_s: float = 30.0, cancel: CancelToken | None = None, node: int | None = None, prefer_node: int | None = None) -> ReservationBatch: ...

    def unlocated(self, keys: object) -> list[int]:
        """Positions of keys that only the directory can locate."""

    def learn_locations(self, keys: object, packed: bytes) -> None: ...

    def stats(self) -> dict[str, int]: ...

    def transports(self) -> list[tuple[str, str, str]]:
        """-> [(name, state, reason)], best first; opens nothing."""

    def latency_histograms(self) -> dict[str, Any]:
        """
        name -> {counts, count, sum_us}; bucket i counts latencies below 2**i microseconds
        """

    def close(self) -> None: ...

class ReceivedBlock:
    """
    A block in memory that the client lends, read-only; it goes back with the object.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Registration:
    """A buffer that devices may use in place, until close()."""

    def close(self) -> None:
        """
        Twice is harmless; a call that uses the buffer keeps it registered until it ends.
        """

    def attach(self) -> None:
        """
        Hand it to the devices now, to stay so until close(); raises why they cannot use it.
        """

    @property
    def size_bytes(self) -> int: ...

class BlockWatch:
    """
    Waits for blocks that others are about to write. One thread at a time is in next().
    """

    def add(self, name: str, keys: object, timeout_s: float, node: int | None = None, news_s: float = 0.0) -> None: ...

    def remove(self, name: str) -> bool:
        """False: there is no such watch."""

    def next(self, timeout_s: float) -> list[tuple[str, tuple[int, ...], int, int]]:
        """
        -> [(name, new positions, state, code)]; state 0: more comes, 1: all, 2: given up, 3: time is over, 4: unreachable (the code says why)
        """

    def wake(self) -> None: ...

    def close(self) -> None: ...

class Reservation:
    """
    Space for one block on a node, filled range by range. Errors: RuntimeError(code, name, message).
    """

    def write(self, offset: int, source: object, timeout_s: float = 30.0, cancel: CancelToken | None = None) -> None:
        """Write a buffer, or a list of buffers, at a byte offset."""

    def commit(self, timeout_s: float = 30.0, cancel: CancelToken | None = None) -> None:
        """Make the block visible; every byte must be written."""

    def abort(self) -> None: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def node_index(self) -> int: ...

class ReservationBatch:
    """
    Space for blocks of one size, filled range by range. Calls answer a code for each block.
    """

    def write(self, offset: int, sources: object, timeout_s: float = 30.0, cancel: CancelToken | None = None, tally: StagedTally | None = None) -> list[int]:
        """
        For each block a buffer, or a list of buffers (empty: nothing), to write at the byte offset -> codes
        """

    def write_gathered(self, offset: int, buffer: object, places: list, step_bytes: int, ranges: list, timeout_s: float = 30.0, cancel: CancelToken | None = None, tally: StagedTally | None = None) -> list[int]:
        """
        For each block ranges (offset, bytes) of one buffer, from its place * step_bytes on (None: nothing) -> codes
        """

    def commit(self, timeout_s: float = 30.0, cancel: CancelToken | None = None) -> list[int]:
        """Make the blocks visible of which every byte was written -> codes"""

    def abort(self) -> None: ...

    def __len__(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def codes(self) -> list[int]:
        """0 for blocks that can be written"""

    @property
    def nodes(self) -> list[int | None]: ...

class GpuStager:
    """Pinned buffers with a copy stream each. Not thread-safe."""

    @property
    def slots(self) -> int: ...

    @property
    def how(self) -> str: ...

    def slot(self, number: int) -> tuple[int, int]:
        """(address, bytes) of a pinned buffer, valid as long as this object."""

    def follow(self, slot: int, event: int) -> None:
        """
        What is started next in the slot begins behind this CUDA event (its handle).
        """

    def start_out(self, slot: int, slices: Sequence[tuple[int, int]], blocks: Sequence[int], crc: bool = True) -> None: ...

    def start_in(self, slot: int, slices: Sequence[tuple[int, int]], blocks: Sequence[int], crc: bool = True) -> None: ...

    def wait(self, slot: int, timeout_s: float) -> list[int]:
        """CRC-32C of each block, or an empty list."""

    def settled(self, slot: int) -> bool:
        """Whether the device has nothing more to do in the slot. Never waits."""

class GpuDevice:
    """A CUDA device, opened at run time."""

    def __init__(self, ordinal: int = 0, driver: str = '', nvrtc: str = '') -> None: ...

    @property
    def name(self) -> str: ...

    def synchronize(self, timeout_s: float) -> None: ...

    def quarantined_bytes(self) -> int: ...

    def make_stager(self, slot_bytes: int, slots: int = 2) -> GpuStager: ...

    def allocate(self, size: int) -> int: ...

    def release(self, address: int) -> None: ...

    def share(self, address: int, size: int) -> tuple[bytes, int]:
        """(handle, offset) for attach() in another process of this host."""

    def attach(self, handle: bytes, offset: int) -> int: ...

    def detach(self, address: int) -> None: ...

    def export_dma_buf(self, address: int, size: int) -> tuple[int, int, int]:
        """
        (fd, offset, length) for a device on the same bus; the caller closes fd.
        """

def address_of(buffer: object) -> int:
    """Where a buffer lies; it is the caller's to keep it."""

class AllocatedMemory:
    """
    Memory of an engine, as a writable buffer; mapped as long as anyone has it.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...

    @property
    def base(self) -> int: ...

    def __len__(self) -> int: ...

class EngineTransfer:
    """A batch of ranges on its way."""

    def wait(self, timeout_s: float) -> None: ...

    def cancel(self) -> None: ...

    def done(self) -> bool: ...

    def route(self) -> str: ...

class EnginePeer:
    """A connection to one engine."""

    def name(self) -> str: ...

    def regions(self) -> list[tuple[int, int, bool, bool, bool, str]]:
        """-> [(base, bytes, readable, writable, mappable, label)]"""

    def refresh(self, timeout_s: float) -> None: ...

    def submit(self, write: bool, copies: list[tuple[Any, int, int]], timeout_s: float) -> EngineTransfer:
        """copies: [(buffer or local address, remote address, bytes)]"""

    def notify(self, bytes: object, timeout_s: float) -> None: ...

    def close(self) -> None: ...

class TransferEngine:
    """Memory that peers read and write in batches of ranges."""

    def __init__(self, name: str, key: bytes, secret: bytes, host_id: str, tcp_host: str, tcp_port: int, advertised_host: str, unix_path: str, shared_memory: bool, tls_cert: str, tls_key: str, tls_ca: str, progress_timeout_s: float) -> None: ...

    def register_memory(self, address: int, bytes: int, label: str, grants: list[tuple[str, int, int, bool, bool]], base: int = 0) -> int:
        """-> base; grants: [(peer, offset, bytes, read, write)]"""

    def allocate(self, bytes: int, label: str, grants: list[tuple[str, int, int, bool, bool]]) -> AllocatedMemory:
        """-> memory; its base is its address for peers"""

    def unregister(self, base: int, timeout_s: float) -> None: ...

    def grant(self, base: int, peer: str, offset: int, bytes: int, read: bool, write: bool) -> None: ...

    def revoke(self, base: int, peer: str, timeout_s: float) -> None: ...

    def describe(self, peer: str = '') -> bytes: ...

    def connect(self, descriptor: bytes, timeout_s: float) -> EnginePeer: ...

    def connect_to(self, host: str, port: int, timeout_s: float) -> EnginePeer: ...

    def tcp_port(self) -> int: ...

    def notifications(self, most: int, timeout_s: float) -> list[tuple[str, bytes]]:
        """-> [(peer, bytes)]"""

    def stats(self) -> list[tuple[str, int]]: ...

    def close(self) -> None: ...

def rdma_ports(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """
    The RDMA ports as a client or node with these settings sees them: device, port, usable, reason (why not), link_layer, gid, gid_index, gid_reason, mtu_bytes, megabits_per_s, gpu_direct (how it would reach GPU memory, and why not better). Raises RuntimeError(code, name, message).
    """

def rdma_address(link_layer: str, table: list[tuple[int, str, bytes]], wanted: int) -> tuple[bool, int, str]:
    """
    Which address of a port is used: [(index, kind, GID)] -> (usable, index, why this one or why none). Kinds: InfiniBand, RoCE v1, RoCE v2; `wanted`: only this index, -1 = any.
    """

def rdma_distance(one: tuple[str, int], other: tuple[str, int]) -> str:
    """
    How far apart two PCI devices (path from the host bridge down, NUMA node or -1) are: PIX, PXB, PHB, NODE, SYS, UNKNOWN.
    """

def rdma_order(rails: Sequence[tuple[int, bool]]) -> list[int]:
    """
    Positions of the rails (Mbit/s, far from the memory) in the order in which a client that is idle takes them for a connection.
    """

def rdma_answer(rails: list[tuple[str, bytes]], peer: tuple[str, bytes], used: Sequence[int]) -> int | None:
    """
    Position of the rail (link layer, GID) that a node answers the peer's with; `used`: how much each has to do already. None: none reaches it.
    """

def transfer_probe(options: dict[str, Any]) -> dict[str, Any]:
    """
    One measurement of a transport against a node: bytes, seconds, cpu_seconds of the moving threads, batch_us of each batch. Raises RuntimeError(code, name, message).
    """
