// One disk of the SSD tier: a log of segments, the index of what lies in them, and the thread that moves
// bytes.
//
// Any thread asks (contains, fetch, remove); they take one short lock and never wait for the disk. The
// device's own thread does everything else: reads, appends, the reuse of segments, the end of blocks that the
// disk does not give back. What it promises:
//   - a block that is read has the key that was asked for and its CRC, or it is a miss;
//   - a removed block is gone from the index at once, and for good when `done` of remove() was called;
//   - the file never grows beyond its capacity;
//   - a disk that does not answer for `stall_ms` has no blocks until it answers again, one that fails
//     several times in a row has none until the node starts again.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "mooncache/status.h"
#include "store/disk/admission.h"
#include "store/disk/file.h"
#include "store/disk/format.h"
#include "store/disk/index.h"
#include "store/disk/io_queue.h"
#include "store/disk/keyring.h"
#include "store/disk/memory.h"

namespace mooncache::store::disk {

struct DeviceOptions {
  std::string path;  // a folder, a file or a block device
  uint64_t capacity_bytes = 0;
  std::string node_id;
  uint64_t segment_bytes = 0;      // 0: from the capacity
  uint64_t write_bytes_per_s = 0;  // 0: without a limit
  uint32_t stall_ms = 500;
  uint32_t number = 0;  // among the devices of the node
  bool allow_uring = true;
  bool sparse = false;                     // the file takes room as it is written, not at the start
  bool hands_down = false;                 // what it gives up goes to what lies below it
  uint64_t ahead_bytes = 64 << 20;         // that may come up ahead at once
  std::shared_ptr<const Keyring> keyring;  // null: nothing is encrypted, and nothing encrypted is read
  WallClock wall_clock;                    // by which blocks with a TTL end; empty: the system's
  // Tests put theirs in place.
  std::function<std::unique_ptr<IoQueue>(int fd, std::span<const iovec> buffers)> open_queue;
};

struct DeviceStats {
  uint64_t capacity_bytes = 0, blocks = 0, block_bytes = 0, index_bytes = 0;
  uint64_t reads = 0, read_bytes = 0, read_misses = 0, corrupt = 0;
  uint64_t admitted = 0, admitted_bytes = 0, refused = 0, dropped = 0, written_bytes = 0;
  uint64_t removals = 0, reclaimed = 0, kept = 0, recovered = 0;
  uint64_t expired = 0;    // blocks whose time was over
  uint64_t too_large = 0;  // refused, because no segment or no write takes so much
  uint64_t pinned_bytes = 0;
  uint64_t prefetched = 0, prefetch_given_up = 0;
  uint64_t encrypted = 0, encrypted_bytes = 0;  // written since the start
  // Not written, because their key is missing or libcrypto is; not read for the same reason; read, but not
  // what was encrypted with that key (these count as corrupt, too).
  uint64_t key_refused = 0, key_misses = 0, decrypt_failures = 0;
  uint64_t io_errors = 0, no_space = 0, stalls = 0;
  uint64_t answering = 0;  // 1: it serves
};
using DeviceCounter = uint64_t DeviceStats::*;
// With the names under which they are shown.
inline constexpr std::pair<std::string_view, DeviceCounter> kDeviceCounters[] = {
    {"capacity_bytes", &DeviceStats::capacity_bytes},
    {"blocks", &DeviceStats::blocks},
    {"block_bytes", &DeviceStats::block_bytes},
    {"index_bytes", &DeviceStats::index_bytes},
    {"reads", &DeviceStats::reads},
    {"read_bytes", &DeviceStats::read_bytes},
    {"read_misses", &DeviceStats::read_misses},
    {"corrupt_blocks", &DeviceStats::corrupt},
    {"prefetched_blocks", &DeviceStats::prefetched},
    {"prefetch_given_up", &DeviceStats::prefetch_given_up},
    {"admitted_blocks", &DeviceStats::admitted},
    {"admitted_bytes", &DeviceStats::admitted_bytes},
    {"refused_blocks", &DeviceStats::refused},
    {"dropped_blocks", &DeviceStats::dropped},
    {"written_bytes", &DeviceStats::written_bytes},
    {"removals", &DeviceStats::removals},
    {"reclaimed_blocks", &DeviceStats::reclaimed},
    {"kept_blocks", &DeviceStats::kept},
    {"recovered_blocks", &DeviceStats::recovered},
    {"expired_blocks", &DeviceStats::expired},
    {"too_large_blocks", &DeviceStats::too_large},
    {"pinned_bytes", &DeviceStats::pinned_bytes},
    {"encrypted_blocks", &DeviceStats::encrypted},
    {"encrypted_bytes", &DeviceStats::encrypted_bytes},
    {"key_refused_blocks", &DeviceStats::key_refused},
    {"key_misses", &DeviceStats::key_misses},
    {"decrypt_failures", &DeviceStats::decrypt_failures},
    {"io_errors", &DeviceStats::io_errors},
    {"no_space", &DeviceStats::no_space},
    {"stalls", &DeviceStats::stalls},
    {"devices_answering", &DeviceStats::answering},
};

class Device {
 public:
  using Done = std::function<void()>;
  struct Found {
    uint64_t size = 0;
    uint32_t hits = 0;
    uint64_t pinned_until_ms = 0;  // 0: not pinned
    Tier tier = Tier::kSsd;
  };

  // Opens or creates the file and rebuilds the index. CONFIG_INVALID: of another node, in use, of another
  // format, too small; NO_SPACE.
  static Result<std::unique_ptr<Device>> open(DeviceOptions options, Memory& memory);
  ~Device();  // close()
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  std::optional<Found> find(TenantId tenant, const Key& key) const;
  // It is on its way to the disk, and cannot be read there yet.
  bool is_being_written(TenantId tenant, const Key& key) const;
  void touch(TenantId tenant, const Key& key);
  // Brings the block up into memory; `done` is called once, from the device's thread, whether it came or
  // not. False: it is not here, or too many are asked for.
  bool fetch(TenantId tenant, const Key& key, Done done);
  // Brings a block up that will be asked for soon, behind all that is fetched. The bytes that come up now, 0
  // when it is not here or on its way already. Nothing when it is given up: more than `max_bytes`, fetches
  // are behind, or much comes up ahead already. It is also given up when it has not begun at `until_ms`.
  std::optional<uint64_t> prefetch(TenantId tenant, const Key& key, uint64_t max_bytes, uint64_t until_ms);
  // True when a start could find the block; `done` when its removal will last. It never does when too many
  // removals wait for the disk.
  bool remove(TenantId tenant, const Key& key, Done done);
  // A block from a disk above, to be written here (device_down.cpp). Too much of it at once is dropped.
  void take_handed(const ColdBlock& block, std::vector<std::byte> body);
  // Until then its segment is not given up without it: it moves on. LIMIT_EXCEEDED: pinned blocks would take
  // more than a quarter of the disk; NOT_FOUND.
  Code pin(TenantId tenant, const Key& key, uint64_t until_ms, uint64_t now_ms);
  Code unpin(TenantId tenant, const Key& key);
  // Calls visit(tenant, key, size, hits) from `cursor` on, `limit` times at most; the next cursor, 0 at the
  // end. With `hidden` also of what still lies there and is no longer served.
  using Visit = std::function<void(TenantId, const Key&, uint64_t, uint32_t)>;
  uint64_t walk(uint64_t cursor, uint32_t limit, const Visit& visit, bool hidden = false) const;
  // The same for blocks of one writer: visit(tenant, key, size), also of those that are being written.
  using VisitWritten = std::function<void(TenantId, const Key&, uint64_t)>;
  uint64_t walk_writer(uint64_t cursor, uint32_t limit, const RecallRequest& request,
                       const VisitWritten& visit) const;
  // Where a block here comes from. The time is read from its record.
  std::optional<Origin> origin(TenantId tenant, const Key& key) const;
  // What each tenant has here, by writers.
  std::vector<DiskUse> uses() const;
  uint64_t bytes_of(TenantId tenant) const;
  // Removes a block and overwrites its record (device_purge.cpp), which lasts from the next sync_purged() on.
  // Its bytes; 0: it is not here. BACK_PRESSURE: it is being written, and may still be here. INTERNAL: it is
  // removed, but the disk did not take the overwrite.
  Result<uint64_t> purge(TenantId tenant, const Key& key);
  bool sync_purged();
  // Writes what it holds and closes the open segment. Nothing is served afterwards.
  void close();
  DeviceStats stats() const;
  bool answering() const { return answering_.load(std::memory_order_relaxed); }

 private:
  // Of a read: a block of 1 MiB comes up with its header and the ends of its pages in four.
  static constexpr uint64_t kPieceBytes = (256 << 10) + kPageBytes;
  struct Segment {
    // kWiping: its header is being overwritten, kWiped: no start will find it.
    enum class State : uint8_t { kFree, kOpening, kOpen, kClosed, kWiping, kWiped, kGivenUp };
    State state = State::kFree;
    uint64_t sequence = 0;
    uint32_t sound_units = kNone;  // from this unit on a write failed
    uint32_t reads = 0;            // under way; guarded by mutex_
  };
  // A block on its way up, or (keep) into a newer segment.
  struct Fetch {
    TenantId tenant = 0;
    Key key;
    uint32_t size = 0;
    uint32_t end = 0;  // of its life
    Origin origin{};   // as its record says it
    Location at;
    uint64_t sequence = 0;
    bool keep = false;
    bool pinned = false;
    bool down = false;  // (keep) it goes to what lies below this disk
    uint8_t hits = 0;
    bool queued = true;  // not all of its reads have begun
    // Brought up ahead: no get has asked for it. Changed by the device's thread, under mutex_.
    bool ahead = false;
    bool joined = false;    // a get has asked since; guarded by mutex_
    uint64_t until_ms = 0;  // ahead: it is given up when it has not begun by then
    bool ended = false;     // for those who wait; reads may still be under way
    bool begun = false, failed = false, header_sound = false;
    bool encrypted = false;  // its bytes come into `body`
    bool keyless = false;
    RecordHeader header;
    uint32_t crc32c = 0;
    uint64_t next_byte = 0;  // of the file: where the next read begins
    uint32_t under_way = 0;
    Reservation reservation{};
    std::vector<std::byte> body;  // keep or encrypted only
    std::vector<Done> waiting;    // guarded by mutex_
  };
  struct Op {
    enum class Kind : uint8_t { kFree, kRead, kChunk, kHeader, kFooter, kWipe, kSync, kPlain };
    Kind kind = Kind::kFree;
    uint32_t generation = 0;
    uint64_t begun_ms = 0;
    uint64_t bytes = 0;
    uint32_t buffer = 0;  // kRead
    uint64_t chunk = 0;   // kChunk: its number
    uint64_t offset = 0;  // of the file
    std::shared_ptr<Fetch> fetch;
    uint32_t segment = 0;
    int64_t result = 0;
  };
  // A piece of the open segment in memory.
  struct Chunk {
    uint64_t number = 0;
    uint32_t buffer = 0, segment = 0;
    uint64_t offset = 0;  // in the segment
    uint64_t fill = 0;
    uint64_t since_ms = 0;
    bool sealed = false, submitted = false, done = false, failed = false;
    // Of a block that is larger than what the buffers take: memory for it alone, and the place in it.
    std::shared_ptr<AlignedMemory> own;
    uint64_t own_at = 0;
  };
  struct PendingRecord {
    RecordHeader header;
    Location at;
    uint64_t first_chunk = 0, last_chunk = 0;
    Done done;          // of a removal
    bool kept = false;  // it lies on the disk already, at `from`, and is read there until this is written
    Location from;
  };
  struct Removal {
    TenantId tenant = 0;
    Key key;
    Done done;
  };
  struct Handed {
    ColdBlock block;
    std::vector<std::byte> body;
    bool removed = false;  // guarded by mutex_
  };
  struct FooterBuild {
    uint32_t segment = 0;
    std::vector<FooterEntry> entries;
    AlignedMemory memory;
    bool submitted = false;
  };

  Device(DeviceOptions options, Memory& memory);
  // device_open.cpp
  Status start();
  Status open_file();
  Status open_superblock();
  Status check_unused();
  Status create_superblock(const Superblock& wanted, bool is_first);
  Status recover();
  bool recover_segment(uint32_t number);
  void adopt(const RecordHeader& header, Location at);
  int64_t plain(const Io& io);
  // device.cpp
  void run();
  void turn(int timeout_ms);
  void begin_next(uint64_t copied_bytes);
  int timeout_ms() const;
  // The op's number; kNone: the queue takes no more now.
  uint32_t submit(Op op, Io io);
  void ended(const IoEnd& end);
  void watch_for_stalls();
  void give_up();
  void end_operations();
  void count_error(int64_t result);
  void fail_all();
  // device_read.cpp
  void pump_reads();
  void pump_reads(std::deque<std::shared_ptr<Fetch>>& from, size_t buffers_left);
  // device_ahead.cpp
  void take_asked();
  void no_longer_ahead(Fetch& fetch);
  void drop_late_prefetches();
  bool begin(Fetch& fetch);
  void read_ended(Op& op, int64_t result);
  void take_bytes(Fetch& fetch, uint64_t file_offset, std::span<const std::byte> bytes);
  void take_header(Fetch& fetch, std::span<const std::byte> bytes);
  void finish(const std::shared_ptr<Fetch>& fetch);
  Code conclude(Fetch& fetch);
  void report(const std::shared_ptr<Fetch>& fetch);
  void drop(const Fetch& fetch, RemoveReason reason);
  // device_write.cpp
  void demote();
  Demotion demote(const ColdBlock& block, DeviceStats& seen);
  // device_cipher.cpp
  Keyring::Writing writing_of(TenantId tenant);
  bool end_encryption(RecordHeader& header);
  Code decrypt(Fetch& fetch);
  void take_body(Fetch& fetch);
  void give_body(Fetch& fetch);
  void say_keyless(TenantId tenant);
  bool has_ended(uint32_t end) const { return end != 0 && is_over(end, wall_ms(options_.wall_clock)); }
  // Whether what is known of a block can be read: its time is not over, and its tenant has a key, where it
  // takes one. mutex_ is held.
  bool is_readable(const DiskEntry& entry) const {
    if (entry.hidden != 0 || has_ended(entry.end)) return false;
    return entry.encrypted == 0 ||
           (options_.keyring != nullptr && options_.keyring->has_key(index_.tenant_of(entry)));
  }
  uint32_t find_readable(TenantId tenant, const Key& key) const {
    const uint32_t number = index_.find(tenant, key);
    return number != kNone && is_readable(index_[number]) ? number : kNone;
  }
  // device_origin.cpp
  std::optional<Origin> recorded(Location at, uint64_t sequence) const;
  // device_down.cpp
  void write_handed();
  Demotion write(Handed& handed, DeviceStats& seen);
  void want_down(const DiskEntry& entry);
  void finish_down(Fetch& fetch, Code code);
  bool holds(const Fetch& fetch) const;
  bool end_handed(TenantId tenant, const Key& key);
  // device_remove.cpp
  void hide(uint32_t number);
  bool end_appended(TenantId tenant, const Key& key);
  void want_removal(TenantId tenant, const Key& key, Done done);
  void write_removals();
  void append_removal(Removal removal);
  void synced(bool whole);
  // device_write.cpp
  bool room_for(uint64_t bytes);
  bool fits_open(uint64_t bytes) const;
  bool leaves_room_to_move(uint64_t bytes);
  bool enter(const PendingRecord& record);
  void begin_append(const ColdBlock& block);
  RecordHeader blank(const RecordHeader& header);
  template <typename Copy>
  bool append(RecordHeader header, PendingRecord record, const Keyring::KeyRef& key, const Copy& copy);
  Chunk& chunk();
  void seal_chunk();
  void flush_old();
  void pump_writes();
  void chunk_ended(const Op& op, bool whole);
  void retire_chunks();
  void record_ended(PendingRecord& record, bool sound);
  void written(const Op& op, bool whole);
  bool open_segment();
  void open_ahead();
  bool write_header(uint32_t number);
  void close_segment();
  void encode_footer(FooterBuild& footer);
  void write_footers();
  void wipe(uint32_t number);
  void reclaim();
  void drop_ended();
  bool moves_on(const DiskEntry& entry) const;
  void want_kept(const DiskEntry& entry, bool pinned);
  void keep_again(const std::shared_ptr<Fetch>& fetch);
  bool keep(const Fetch& fetch);
  void release_segments();

  uint64_t segment_offset(uint32_t number) const { return kDataOffset + number * layout_.segment_bytes; }
  std::byte* chunk_data(const Chunk& chunk) const {
    if (chunk.own != nullptr) return chunk.own->data() + chunk.own_at;
    return chunk_memory_.data() + uint64_t{chunk.buffer} * chunk_bytes_;
  }
  uint64_t largest_block() const;
  uint64_t largest_in_chunks() const;
  void refuse_large(const ColdBlock& block, DeviceStats& seen);
  // mutex_ is held.
  void forget(uint32_t number) {
    fetches_.erase(number);
    end_pin(number);
    index_.erase(number);
  }
  void end_pin(uint32_t number) {
    if (pins_.erase(number) > 0) pinned_bytes_ -= record_bytes(index_[number].size);
  }
  bool is_pinned(uint32_t number, uint64_t now_ms) const {
    const auto pin = pins_.find(number);
    return pin != pins_.end() && pin->second > now_ms;
  }
  void expire_pins(uint64_t now_ms);
  bool overwrite(Location at, const RecordHeader& purged);

  const DeviceOptions options_;
  Memory& memory_;
  File file_;
  Superblock layout_;
  AlignedMemory read_memory_, chunk_memory_, page_memory_;  // outlive the queue, which may still write there
  std::deque<FooterBuild> footers_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<uint32_t> free_reads_, free_chunks_;
  uint64_t chunk_bytes_ = 0;

  std::mutex purge_mutex_;
  // No lock is taken under it but those of tenants' limits (Memory::claim) and keys.
  mutable std::mutex mutex_;
  DiskIndex index_;
  std::unordered_map<uint32_t, std::shared_ptr<Fetch>> fetches_;  // by entry
  std::unordered_map<uint32_t, uint64_t> pins_;                   // by entry: until when
  uint64_t pinned_bytes_ = 0;                                     // of their records
  std::deque<std::shared_ptr<Fetch>> asked_, asked_ahead_;
  size_t ahead_count_ = 0;  // of fetches_
  uint64_t ahead_bytes_ = 0;
  std::deque<Removal> removals_;
  std::map<std::pair<TenantId, Key>, uint32_t> unlasting_;  // removals that do not last yet, of each key
  std::optional<std::pair<TenantId, Key>> appended_;        // the block that is being copied to a chunk
  bool is_cut_ = false;                                     // it was removed meanwhile
  std::deque<std::shared_ptr<Handed>> handed_;
  uint64_t handed_bytes_ = 0;
  bool stopping_ = false;

  // The thread's own.
  std::vector<Segment> segments_;  // reads: under mutex_
  std::deque<uint32_t> free_segments_;
  std::deque<uint32_t> closed_, given_up_;  // oldest first
  // ahead_: what was asked for since lies in wanted_ as well.
  std::deque<std::shared_ptr<Fetch>> wanted_, ahead_;
  std::vector<Op> ops_;
  std::vector<uint32_t> free_ops_;
  std::deque<Chunk> chunks_;  // oldest first; the last one may still be filled
  std::deque<PendingRecord> pending_;
  std::vector<FooterEntry> footer_;         // of the open segment
  std::vector<Removal> to_sync_, syncing_;  // written
  std::vector<IoEnd> ends_;
  std::vector<ColdBlock> cold_;
  RecordCipher cipher_;
  std::vector<std::vector<std::byte>> bodies_;  // of encrypted blocks that came up, for the next ones
  uint64_t bodies_bytes_ = 0;
  uint64_t said_keyless_ms_ = 0;
  // Memory for the large block that is appended now, and whether chunks of one are still to be written.
  std::shared_ptr<AlignedMemory> large_;
  uint64_t large_used_ = 0;
  std::weak_ptr<AlignedMemory> large_under_way_;
  bool said_too_large_ = false;
  uint32_t ended_at_ = 0, ended_minute_ = 0;  // how far drop_ended() has looked, and for which minute
  WriteBudget budget_;
  std::mt19937_64 random_;
  uint64_t next_sequence_ = 1, next_chunk_ = 1, last_failed_chunk_ = 0;
  uint32_t open_ = kNone;   // the segment that is appended to
  uint64_t open_fill_ = 0;  // in it
  uint32_t reads_under_way_ = 0, writes_under_way_ = 0;
  uint64_t kept_bytes_ = 0;
  uint64_t copied_bytes_ = 0;  // since operations were begun
  static constexpr uint64_t kNextLookMs = 5;
  uint64_t look_pause_ms_ = kNextLookMs;  // between two looks for cold blocks
  uint64_t now_ms_ = 0, next_demotion_ms_ = 0, next_wipe_ms_ = 0;
  uint64_t next_removal_ms_ = 0, stalled_ms_ = 0;
  uint32_t errors_in_row_ = 0;
  bool removals_waiting_ = false, off_ = false;

  std::atomic<bool> answering_{false};
  mutable std::mutex stats_mutex_;
  DeviceStats count_;

  std::mutex ready_mutex_;
  std::condition_variable ready_changed_;
  std::optional<Status> ready_;
  std::thread thread_;
};

}  // namespace mooncache::store::disk
