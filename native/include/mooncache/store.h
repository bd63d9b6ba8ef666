// The store-node core: memory, blocks and their lives, without sockets.
//
// A Store owns arenas (memfd-backed, so that their descriptors can be handed to readers on the same
// host), cuts them into extents, and keeps an index from (tenant, key) to committed blocks. What it
// promises:
//   - a block is invisible until its commit, and every visible block has its CRC-32C;
//   - memory under a live pin or reservation is never reused; a removed block that is still pinned is
//     invisible at once and its memory is freed by the last release;
//   - the generation of a slot changes before the slot's memory can be reused, so a one-sided reader
//     that compares generations after its copy never takes foreign bytes for its own;
//   - each change of what is visible is one record in the event log, in an order that agrees with the
//     order of effects on each key.
// Time is passed in: `now_ms` is any monotonic clock, the same one in all calls.
// All functions may be called from any thread. Nothing here blocks on I/O or waits for space.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"

namespace mooncache {

namespace store {
class ArenaMemory;
namespace disk {
class ObjectRequests;
}
}  // namespace store

using DiskKey = std::array<std::byte, 32>;

// Disks under the memory: the SSD tier. Its blocks survive the process.
struct DiskConfig {
  // A folder, a file or a block device for each disk; empty = there is no tier.
  std::vector<std::string> paths;
  uint64_t bytes = 0;              // of each, with everything that is kept beside the blocks
  uint64_t write_bytes_per_s = 0;  // to each, over a minute; 0 = without a limit
  std::string node_id = "node";    // whose blocks they are: a disk of another node is refused
  bool allow_uring = true;
  uint32_t stall_ms = 500;  // a disk that does not answer for so long is not there
  // A folder that several nodes share, below the disks or, without disks, below the memory. Each node writes
  // a log of its own there and reads those of the others. Empty: none.
  std::string shared_path;
  uint64_t shared_bytes = 0;              // of this node's log; it never grows
  uint64_t shared_write_bytes_per_s = 0;  // as above
  uint32_t shared_scan_ms = 2000;         // between two looks at what the others wrote
  // An object store in the place of the folder; whoever owns the queue carries the calls out. `shared_path`
  // is then a folder of this host, for what is not there yet, `shared_spool_bytes` at most.
  std::shared_ptr<store::disk::ObjectRequests> shared_objects;
  uint64_t shared_spool_bytes = 1ull << 30;
  uint32_t shared_timeout_ms = 2000;   // of a read; a store that takes longer is not there
  uint32_t shared_upload_ms = 10'000;  // what a segment has is in the store after so long, also when not full
  // What Store::set_keys() and TenantLimits::encrypted say of tenants, before the first block can go down.
  std::vector<std::pair<TenantId, std::vector<DiskKey>>> keys;
  std::vector<TenantId> encrypted;
  // Milliseconds since 1970, by which blocks with a TTL end there; empty: the system's clock.
  std::function<uint64_t()> wall_clock;
  // What its owner should know: level (20 info, 30 warning, 40 error), event, message. From the disks'
  // threads.
  std::function<void(uint8_t, const char*, std::string)> log;
};

// Memory that outlives the process: of anonymous memory only.
struct KeepConfig {
  bool enabled = false;
  std::string node_id = "node";  // whose blocks they are: another node's memory is not adopted
  // What Store::kept() of a former process named, in its order; empty = there was none. They stay the
  // caller's.
  std::vector<int> fds;
  uint32_t adopting_threads = 0;  // 0: by the memory's size and the processors, at most 4
};

struct StoreConfig {
  uint64_t capacity_bytes = 256ull << 20;  // 0 with an arena_path: all of it
  // Where the blocks lie. "" = anonymous memory of this process. Else a DAX character device, a file, or a
  // folder in which an unnamed file is made; rounded down to the pages of its mapping. Its contents are never
  // read back: a node starts empty.
  std::string arena_path;
  // Opens other memory for the blocks, of so many bytes (store/arena_memory.h); null = there is none. The
  // tier is that of the memory then.
  std::function<Result<std::unique_ptr<store::ArenaMemory>>(uint64_t)> open_arena;
  // The capacity is cut into arenas of at most this size; 0 = one arena. A block lies in one arena.
  uint64_t arena_bytes = 0;
  // Allocation quantum: extents start at and are rounded up to multiples of it. Power of two, 64..65536.
  uint32_t quantum_bytes = 512;
  // Blocks of this size on average fill the node before slots run out (the generation table has
  // capacity / expected_block_bytes slots, plus slack; it is a sparse file, untouched slots cost nothing).
  uint64_t expected_block_bytes = 4096;
  uint64_t max_block_bytes = 1ull << 30;
  uint32_t shards = 64;  // power of two, 1..256
  bool huge_pages = false;
  int numa_node = -1;  // that anonymous memory comes from; -1 = from where it is touched first
  // "mooncache" (what chains are still worth, learnt from match(); blocks of no chain by "lru"), "2q"
  // (probation, ghosts, protected), or "lru".
  std::string eviction = "mooncache";
  // "mooncache": how many times as fast as the clock its time goes; for replays of traces.
  uint32_t eviction_speed = 1;
  // "2q": share of the capacity kept for blocks not read again since their commit, in percent.
  uint32_t probation_percent = 50;
  // "2q": keys remembered after their eviction, as a multiple of the resident blocks.
  uint32_t ghost_factor = 4;
  // "2q": a read sooner than this after the commit is part of the same use (prefill writes, decode
  // reads) and does not show reuse.
  uint64_t correlated_ms = 2000;
  // Most blocks that one reserve() evicts before it answers NO_SPACE.
  uint32_t max_victims = 1024;
  uint64_t event_log_capacity = 1ull << 20;  // records
  // Disjoint ranges that one reservation may hold before they join.
  uint32_t max_ranges = 4096;
  uint64_t max_pins = 1ull << 24;
  uint64_t max_pin_ttl_ms = 24ull * 3600 * 1000;
  Tier tier = Tier::kDram;
  KeepConfig keep;
  // With disks `now_ms` has to be std::chrono::steady_clock in milliseconds.
  DiskConfig disk;
};

struct WriterUse {
  BlockWriter writer;
  uint64_t blocks = 0, bytes = 0;            // in memory
  uint64_t disk_blocks = 0, disk_bytes = 0;  // on disks and in this node's log of a shared tier
  uint32_t first_s = 0, last_s = 0;          // as Origin::written_s
};
struct RecallRequest {
  uint64_t writer = 0;
  uint32_t since_s = 0, until_s = ~uint32_t{0};  // as Origin::written_s; both ends count
  bool dry_run = false;                          // counts only
  uint32_t refuse_s = 0;  // for so long from now on the writer's blocks do not become visible
  static constexpr uint32_t kUntilLifted = ~uint32_t{0};  // as refuse_s: until Store::lift()
  bool covers(uint32_t written_s) const { return since_s <= written_s && written_s <= until_s; }
  bool all_times() const { return since_s == 0 && until_s == ~uint32_t{0}; }
};
// What Store::recall() has found.
struct Recalled {
  uint64_t next_cursor = 0;        // 0 = that was the last page
  uint64_t blocks = 0, bytes = 0;  // in memory
  uint64_t held_blocks = 0;        // of them: being read or written; their memory is freed by the last user
  uint64_t disk_blocks = 0, disk_bytes = 0;  // on disks alone
  uint64_t failed_blocks = 0;                // invisible, but no disk has said that the removal lasts
};

// Handles: index in the low half, generation in the high half. 0 is never valid.
enum class ReservationId : uint64_t {};
enum class PinId : uint64_t {};

// Where a block's bytes lie, as peers learn it. `offset` counts from the start of segment `segment`.
struct Extent {
  uint32_t segment = 0;
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
};

struct Reservation {
  ReservationId id{};
  Extent extent;  // generation is odd: not readable yet
};

struct BlockInfo {
  Extent extent;
  uint32_t crc32c = 0;
  Tier tier = Tier::kDram;
  uint32_t pins = 0;  // live pins, not counting the retention pin
  uint32_t hits = 0;
  uint64_t age_ms = 0;  // since the commit
  Origin origin;
  uint64_t pinned_until_ms = 0;  // retention pin; 0 = none
};

struct Pinned {
  PinId id{};
  BlockInfo info;
};

struct MatchResult {
  uint32_t leading_run = 0;  // keys present before the first absent one
  uint32_t present = 0;
  std::vector<uint8_t> bitmap;   // bit i%8 of byte i/8 = key i is present
  std::vector<uint8_t> on_disk;  // the same: present, but not in memory
  std::vector<uint8_t> shared;   // the same: of these, in the shared directory alone
};

struct Prefetched {
  uint32_t blocks = 0;  // on their way up now, which were not before
  uint64_t bytes = 0;
};

// Block record, 56 bytes little endian:
// u8 kind | u8 tier | u8 reason | u8 flags | u32 reserved | u64 tenant | u64 size_bytes | 32 B key
inline constexpr size_t kBlockRecordBytes = 56;
enum class RecordKind : uint8_t { kAdd = 1, kRemove = 2, kMoveTier = 3 };
enum class RemoveReason : uint8_t {
  kNone = 0,
  kEvicted = 1,
  kRemoved = 2,
  kCorrupt = 3,
  kDrained = 4,
  kReplaced = 5
};
inline constexpr size_t kRemoveReasons = 6;

struct EventBatch {
  uint64_t first_seq = 0;  // of the first record here; when there is none, the next one to come
  uint64_t last_seq = 0;   // of the last record here; first_seq - 1 when there is none
  bool overflow = false;   // records before first_seq were lost since the last call: take a snapshot
  std::vector<std::byte> records;
};

struct SnapshotPage {
  uint64_t next_cursor = 0;  // 0 = that was the last page; a page may be empty before the end
  std::vector<std::byte> records;
};

struct StoredBlock {
  Key key;
  uint64_t size = 0;
  Tier tier = Tier::kDram;
  uint32_t hits = 0;
};
struct ListPage {
  uint64_t next_cursor = 0;  // 0 = end; a page may be empty before the end
  std::vector<StoredBlock> items;
};

enum class SegmentKind : uint32_t { kArena = 0, kGenerationTable = 1 };
// Descriptors belong to the Store and live as long as it does (duplicate or send them, do not close).
struct SegmentFd {
  uint32_t id = 0;  // what Extent::segment names; the generation table comes after the arenas
  SegmentKind kind = SegmentKind::kArena;
  uint64_t size = 0;
  int fd_ro = -1;
  int fd_rw = -1;
};

// What the memory behind the arenas is.
struct ArenaInfo {
  std::string kind;         // "memory", "dax", "fsdax", "hugetlbfs", "tmpfs", "file", or a device's
  std::string description;  // where it is
  std::string warning;      // what its owner should know; "" = nothing
  // Why processes of this host cannot map it; "" = they can.
  std::string why_not_shared;
  std::string why_not_huge;  // why it has no huge pages although they were asked for; "" = nothing to say
  uint64_t size_bytes = 0;
  uint64_t resident_bytes = 0;  // that have memory behind them now
  uint64_t page_bytes = 0;      // of its mapping; 0 = the system's
  bool addressable = true;      // by the processor: else only write() and read() move bytes
};

// Of one tier; 0 = none. Quota: the tenant never has more. Share: its blocks are not evicted for others
// while it has no more than that; what it has beyond goes first.
struct TierLimits {
  uint64_t quota_bytes = 0;
  uint64_t share_bytes = 0;
  bool operator==(const TierLimits&) const = default;
};
struct TenantLimits {
  TierLimits memory{}, disk{};
  uint64_t bytes_per_s = 0;  // of puts and gets together; beyond it BACK_PRESSURE. 0 = no limit
  uint64_t ttl_ms = 0;       // of a block since its commit, below the memory too. 0 = none
  bool encrypted = false;    // its blocks go to disks encrypted (Store::set_keys) or not at all
  bool operator==(const TenantLimits&) const = default;
};
struct TenantUsage {
  TenantId tenant = 0;
  uint64_t bytes = 0;   // of reservations and blocks in memory, as requested (not rounded)
  uint64_t blocks = 0;  // visible ones
  uint64_t disk_bytes = 0, disk_blocks = 0;  // as of the last tend_tenants()
  // Since the start.
  uint64_t hits = 0, hit_bytes = 0, misses = 0;
  uint64_t stored_blocks = 0, stored_bytes = 0;  // by commits
  uint64_t evicted_blocks = 0, evicted_bytes = 0;
  uint64_t down_blocks = 0, down_bytes = 0;  // written to disks
  uint64_t up_blocks = 0, up_bytes = 0;      // that came back from disks
  uint64_t refused = 0, throttled = 0;       // by quota, by rate
  uint64_t expired_blocks = 0;
  uint64_t byte_ms = 0, disk_byte_ms = 0;  // held: bytes times milliseconds
  TenantLimits limits;
};
// What a tenant has on the disks of a node.
struct DiskUse {
  TenantId tenant = 0;
  uint64_t bytes = 0, blocks = 0;
  uint64_t writer = 0;               // blocks of one tenant are named for each of their writers
  uint32_t first_s = 0, last_s = 0;  // as Origin::written_s, of all that were put there
};
// What Store::purge() has done.
struct Purged {
  uint64_t next_cursor = 0;                  // 0 = that was the last page
  uint64_t blocks = 0, bytes = 0;            // in memory, overwritten by now
  uint64_t held_blocks = 0, held_bytes = 0;  // in use: invisible, overwritten when the last user ends
  uint64_t disk_blocks = 0, disk_bytes = 0;  // on disks, overwritten by now
  uint64_t failed_blocks = 0;                // invisible, but the disk did not take the overwrite
};

struct StoreStats {
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;       // extents handed out, rounded to quanta
  uint64_t free_bytes = 0;       // capacity - used
  uint64_t evictable_bytes = 0;  // of used: could be evicted now
  uint64_t pinned_bytes = 0;    // of used: under a live pin or a retention pin (expired ones may still count)
  uint64_t reserved_bytes = 0;  // of used: not committed yet
  uint64_t probation_bytes =
      0;  // of evictable: not read again since commit ("2q"), of no known chain ("mooncache")
  uint64_t largest_free_bytes = 0;
  uint64_t free_extents = 0;
  uint64_t fragmentation_ppm = 0;  // 1 - largest free / free, parts per million
  uint64_t blocks = 0;             // visible
  uint64_t zombie_blocks = 0;      // removed, kept by pins
  uint64_t pins = 0;
  uint64_t retained_blocks = 0;  // with a retention pin
  uint64_t reservations = 0;
  uint64_t commits = 0, aborts = 0, commit_races_lost = 0, commit_incomplete = 0, commit_mismatch = 0;
  uint64_t removed[kRemoveReasons] = {};  // by RemoveReason
  uint64_t evicted_bytes = 0;
  uint64_t evicted_probation = 0, evicted_protected = 0, evicted_quota = 0;
  uint64_t hits = 0;            // acquire() that found its block
  uint64_t misses_unknown = 0;  // never seen, or long ago
  uint64_t misses_evicted = 0;  // evicted recently
  uint64_t match_present = 0, match_absent = 0;
  // Of questions that count as uses, in blocks, estimated from a sample of them (store/unlimited.h).
  struct Sampled {
    uint64_t asked = 0;
    uint64_t found = 0;      // here, and nothing before it in its chain that was ever here is missing
    uint64_t unlimited = 0;  // ever here: what a memory without limit would have found
  } sampled;
  uint64_t admitted_by_ghost = 0;
  uint64_t no_space = 0, quota_refusals = 0, draining_refusals = 0;
  uint64_t event_seq = 0, event_overflows = 0, events_pending = 0;
  uint64_t bookkeeping_bytes = 0;  // entries, index, allocator, generations, ghosts, pins (not the event log)
  uint64_t event_log_bytes = 0;
  uint64_t draining = 0;                               // on demand, or because the arena is gone
  uint64_t arena_gone = 0;                             // see lost_bytes()
  std::vector<std::pair<std::string, uint64_t>> disk;  // of the SSD tier, when there is one
  std::vector<std::pair<std::string, uint64_t>> kept;  // when memory outlives the process

  std::vector<std::pair<std::string_view, uint64_t>> named() const;
};

// What became of memory that a former process left.
struct KeptMemory {
  bool enabled = false;
  bool adopted = false;
  std::string why_not;       // adopted; "" = nothing was offered
  uint64_t blocks = 0;       // that were adopted
  uint64_t bytes = 0;        // of them
  uint64_t refused = 0;      // records that were not believed
  uint64_t held_blocks = 0;  // extents that a writer of a former process may still write, at the start
  uint64_t adopt_us = 0;
  uint32_t adopting_threads = 0;
  std::vector<int> fds;  // to be kept for the next process; the store's
};

// How far tend_kept() is.
struct KeptProgress {
  uint64_t checked_blocks = 0, checked_bytes = 0, damaged_blocks = 0;  // since the start
  uint64_t left_blocks = 0;  // that were adopted and not looked at yet
  uint64_t held_blocks = 0;  // see KeptMemory
};

class ArenaView;

class Store {
 public:
  // CONFIG_INVALID, or NO_SPACE when the operating system refuses the memory.
  static Result<std::unique_ptr<Store>> open(StoreConfig config);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Space for a block. Evicts the coldest evictable blocks as far as needed. INVALID_ARGUMENT (size 0),
  // TOO_LARGE, ALREADY_EXISTS (the key is visible), DRAINING, QUOTA_EXCEEDED (larger than the quota, or
  // nothing of the tenant can be evicted), NO_SPACE (retry after the space callback; it comes at once when a
  // quota needs more than max_victims). Several reservations may exist for one key; the first commit wins.
  // `writer`: whose block it will be; the caller holds the number.
  Result<Reservation> reserve(TenantId tenant, const Key& key, uint64_t size, uint64_t now_ms,
                              WriterNumber writer = 0);
  // Makes the block visible. The caller vouches that all bytes are there and have this CRC.
  // RESERVATION_UNKNOWN, ALREADY_EXISTS (lost a race; the space is freed).
  Status commit(ReservationId reservation, uint32_t crc, uint64_t now_ms);
  // Ranged writes: note each range after its bytes were copied (any order, no overlap), then
  // commit_written. An overlap spoils the reservation: INVALID_ARGUMENT now, INCOMPLETE at the commit.
  Status note_written(ReservationId reservation, uint64_t offset, uint64_t length, uint32_t crc);
  // Bytes arrived damaged and lie in the range. Over a noted range they spoil the reservation (INCOMPLETE at
  // the commit); elsewhere they do no harm, the range can be written again.
  Status note_damaged(ReservationId reservation, uint64_t offset, uint64_t length);
  // Like commit, but the noted ranges must cover [0, size) exactly (else INCOMPLETE) and have the
  // combined CRC `crc` (else CHECKSUM_MISMATCH); on either the reservation is aborted.
  Status commit_written(ReservationId reservation, uint32_t crc, uint64_t now_ms);
  // Gives the space back; an unknown (already ended) reservation is ignored.
  void abort(ReservationId reservation);
  // The bytes of a live reservation; empty when it is unknown, or its memory is not addressable. Valid until
  // commit or abort.
  Slice writable(ReservationId reservation);
  // Puts bytes of a live reservation in their place, whatever the memory; through when it returns.
  // RESERVATION_UNKNOWN, INVALID_ARGUMENT (outside the block), and what the device answers.
  Status write(ReservationId reservation, uint64_t offset, ConstSlice from);
  Result<Extent> reservation_extent(ReservationId reservation) const;

  // Finds and pins. NOT_FOUND, LIMIT_EXCEEDED (max_pins).
  Result<Pinned> acquire(TenantId tenant, const Key& key, uint64_t now_ms);
  // True: the block is not in memory, and on its way up from a disk. `done` is called once, from another
  // thread and without locks, when acquire() finds it or will not. It must not wait.
  bool fetch(TenantId tenant, const Key& key, std::function<void()> done);
  // Brings blocks up from the disks that will be asked for soon, up to `max_bytes`. They go behind everything
  // that is waited for. The rest is given up where fetches are behind, where much comes up ahead already, and
  // what has not begun at `until_ms` or finds no room in memory.
  Prefetched prefetch(TenantId tenant, std::span<const Key> keys, uint64_t max_bytes, uint64_t until_ms);
  bool has_disk() const;
  // Ends the disks' threads: what was asked of them is done or given up, and they keep what they have.
  void close_disk();
  // Unknown (already released) pins are ignored.
  void release(PinId pin);
  // The bytes under a live pin; empty when it is unknown, or its memory is not addressable.
  ConstSlice readable(PinId pin) const;
  // A copy of bytes under a live pin. PIN_UNKNOWN, INVALID_ARGUMENT, and what the device answers.
  Status read(PinId pin, uint64_t offset, Slice to) const;
  // Whether writable() and readable() give anything.
  bool addressable() const;
  // PIN_UNKNOWN; works for a block that was removed under the pin.
  Result<BlockInfo> pin_info(PinId pin, uint64_t now_ms) const;
  // The reader saw wrong bytes: the block becomes a miss now (event reason kCorrupt), its generation
  // changes, its memory is freed by the last release.
  void quarantine(PinId pin);

  // Which keys are here. With `touch`, present blocks count as used, the last key first, so that the
  // head of a chain is always younger than its tail and chains are evicted from their end. Policy "mooncache"
  // learns from it what sessions do: ask for whole chains, also on nodes that hold a part.
  MatchResult match(TenantId tenant, std::span<const Key> keys, bool touch, uint64_t now_ms);
  // Does not count as a use. NOT_FOUND. A block on a disk alone has no extent.
  Result<BlockInfo> stat(TenantId tenant, const Key& key, uint64_t now_ms) const;
  // Invisible at once. NOT_FOUND; PINNED when a retention pin is in force, unless forced. Live pins of
  // readers do not prevent it, they delay the reuse of the memory. `lasts`: called once when no restart
  // brings the block back, perhaps at once, perhaps from another thread; it must not wait, nor call the
  // store.
  Code remove(TenantId tenant, const Key& key, RemoveReason reason, uint64_t now_ms, bool force = false,
              std::function<void()> lasts = {});
  // Retention pin: no eviction until now_ms + ttl_ms. A repeat sets a new end, earlier or later. A block in
  // memory stays there; one on a disk alone stays on the disk, also when it comes up and goes again.
  // NOT_FOUND, INVALID_ARGUMENT (ttl 0 or above max_pin_ttl_ms), LIMIT_EXCEEDED (pins hold a quarter of the
  // disk).
  Code pin(TenantId tenant, const Key& key, uint64_t ttl_ms, uint64_t now_ms);
  Code unpin(TenantId tenant, const Key& key);

  // Blocks of one tenant, unordered; at most `limit` (capped at 4096). Start with cursor 0.
  ListPage list(TenantId tenant, uint64_t cursor, uint32_t limit) const;

  // One reader: takes the oldest records out of the log.
  EventBatch drain_events(uint64_t max_events);
  // Sequence number of the newest event, 0 before the first.
  uint64_t event_seq() const;
  // Add-records of all visible blocks, in pages. Fuzzy: note event_seq() before the first page, apply
  // the pages, then replay every event after that number; the result is exact.
  SnapshotPage snapshot(uint64_t cursor, uint32_t max) const;

  StoreStats stats() const;
  std::vector<TenantUsage> tenants() const;
  // The sums of tenants that are not remembered one by one.
  TenantUsage other_tenants() const;
  // Counts how long tenants have held what they hold and removes blocks that are older than their tenant's
  // TTL: once a second or so. At most `max_slots` slots are looked at.
  void tend_tenants(uint64_t now_ms, uint32_t max_slots);
  // Removes a page of a tenant's blocks, pinned or not, and overwrites their bytes with zeros. What is being
  // written becomes unknown to its writer. Start with cursor 0.
  Purged purge(TenantId tenant, uint64_t cursor);

  // The number of a writer, until close_writer(). 0: it says no id, or all kMaxWriters numbers are in use;
  // its blocks are of an unknown writer then. What the first one with an id says of itself counts.
  WriterNumber open_writer(const BlockWriter& writer);
  void close_writer(WriterNumber number);
  // Who has blocks here, or is known by name. Writer 0 has the disks' blocks of which no writer is known.
  std::vector<WriterUse> writers() const;
  uint64_t writers_refused() const;  // how often there was no number
  // Where blocks come from; those that are not here have none. May read from a disk.
  std::vector<Origin> origins(TenantId tenant, std::span<const Key> keys) const;
  // Of a copy that was written here by another process than the block: who wrote it first. One that was
  // recalled goes: RESERVATION_UNKNOWN. NOT_FOUND: it is not in memory.
  Code set_origin(TenantId tenant, const Key& key, const Origin& origin);
  // Removes a page of a writer's blocks of all tenants, pinned or not, from memory and from disks for good.
  // Start with cursor 0, which also keeps what was written then from becoming visible later, out of this or
  // another node's disks or memory, until this process ends. Waits for the disks: seconds. Not under a lock.
  Recalled recall(const RecallRequest& request, uint64_t cursor, uint64_t now_ms);
  // What the writer writes from now on becomes visible again, when it was refused until this call.
  void lift(uint64_t writer);

  void set_draining(bool draining);
  bool draining() const;
  void set_limits(TenantId tenant, const TenantLimits& limits);  // never evicts by itself
  // The keys with which a tenant's blocks are encrypted on disks and in the shared directory from now on: the
  // first one writes, all of them read. Without keys what was encrypted is not here, and the tenant's blocks
  // go to no disk if it had a key since the start. CONFIG_INVALID: libcrypto is missing, they go to no disk.
  Status set_keys(TenantId tenant, const std::vector<DiskKey>& keys);
  const std::vector<SegmentFd>& segments() const;
  KeptMemory kept() const;
  // Compares adopted blocks with their checksums, the coldest first, until `max_bytes` are read or none is
  // left: a damaged one becomes a miss. Gives extents free that no process can write now. One caller at
  // a time.
  KeptProgress tend_kept(uint64_t max_bytes);
  const StoreConfig& config() const;  // as it is in force: capacity and quantum are those of the memory
  ArenaInfo arena() const;
  // Puts memory behind the bytes [offset, offset + length) of the arenas, taken as one row, with `threads`
  // threads; what lies behind the end is left out. Else pages come when a block is first written, from
  // the writer, and memory that is not there ends the writer. No byte changes, so blocks may be in
  // use. NO_SPACE.
  Status populate(uint64_t offset, uint64_t length, uint32_t threads);
  // For code that opens blocks to devices (store/arena_view.h).
  ArenaView arena_view();
  // Looks whether the arena's memory is still all there; call it now and then. Bytes lost since the start (a
  // truncated file, failed pages): their blocks fail their checksums, the store goes on. A device that does
  // not answer has lost all of them until it answers again, which this call tries once a second; reserve()
  // says DRAINING meanwhile.
  uint64_t lost_bytes();
  // What the last lost_bytes() found: whether nothing can be read or written.
  bool arena_gone() const;
  // Called without locks, on the thread that freed, after a reserve() answered NO_SPACE and space may
  // have become free since. The end of a retention pin does not call it: who waits also retries on a timer.
  // Set it before the store is shared. It may call the store.
  void set_space_callback(std::function<void()> callback);
  // Called for each block that becomes visible, at once, on the thread that committed it and under the lock
  // of the block's shard: it must not call the store, nor wait. Who looked for the key before and did not
  // find it gets this call after that look. Set it before the store is shared.
  void set_commit_callback(std::function<void(TenantId, const Key&)> callback);

  // Verifies every invariant; false and a reason when one is broken. Stops the world; for tests and idle.
  bool check(std::string* why) const;
  // Fault injection for tests: flips one bit of a visible block. NOT_FOUND, INVALID_ARGUMENT.
  Code flip_bit(TenantId tenant, const Key& key, uint64_t bit);

 private:
  struct Core;
  explicit Store(std::unique_ptr<Core> core);
  bool check_kept(uint32_t slot, uint64_t generation);
  std::unique_ptr<Core> core_;
};

}  // namespace mooncache
