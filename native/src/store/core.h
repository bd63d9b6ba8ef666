// Everything behind class Store.
//
// Lock order: reserve_gate (shared by reserve, exclusive by check) -> one shard mutex (check takes all, in
// ascending order) -> one leaf: an arena's mutex, the tenants, the event log, the advisor, the sample of
// blocks (unlimited.h), the index of a disk. No leaf is taken under another leaf (but the tenants under a
// disk's index), and outside check() no thread holds two shards. The space callback runs without locks.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "mooncache/store.h"
#include "store/advisor.h"
#include "store/arena_memory.h"
#include "store/catalogue.h"
#include "store/disk/memory.h"
#include "store/disk/tier.h"
#include "store/event_log.h"
#include "store/extent_allocator.h"
#include "store/memfd.h"
#include "store/shard.h"
#include "store/tenants.h"
#include "store/unlimited.h"
#include "store/victims.h"
#include "store/writers.h"

namespace mooncache {

struct Store::Core {
  using BlockEntry = store::BlockEntry;
  using Shard = store::Shard;
  using Queue = store::Queue;
  using Lock = std::unique_lock<std::mutex>;

  struct Arena {
    Arena(std::unique_ptr<store::ArenaMemory> memory_in, uint32_t quanta)
        : memory(std::move(memory_in)), extents(quanta) {}
    const std::unique_ptr<store::ArenaMemory> memory;
    mutable std::mutex mutex;
    store::ExtentAllocator extents;
  };
  // Where a block's bytes begin.
  struct Place {
    store::ArenaMemory* memory = nullptr;
    uint64_t offset = 0;
  };
  // Space that no entry owns yet.
  struct Space {
    uint16_t arena = 0;
    uint32_t node = store::kNone;
    uint32_t offset = 0;
  };
  // What one reserve() may still evict, what it evicted, and what for.
  struct Pressure {
    uint32_t victims_left = 0;
    uint64_t evicted_bytes = 0;
    uint64_t incoming = 0;  // hash
    uint64_t now_ms = 0;
    bool comes_up = false;  // from below the memory
  };
  static constexpr uint64_t kNever = ~uint64_t{0};

  explicit Core(StoreConfig config_in);
  Status start();
  Status make_arenas();
  Status make_memory_files();
  Status make_table();
  Status make_arena(std::unique_ptr<store::ArenaMemory> memory);

  // --- where things are (core.cpp) ---
  uint64_t hash_of(TenantId tenant, const Key& key) const;
  Shard& shard_of(uint64_t hash) { return shards[hash & shard_mask]; }
  uint32_t slot_of(const Shard& shard, uint32_t entry) const { return (entry << shard_bits) | shard.number; }
  uint64_t quanta_for(uint64_t size) const {
    return (size + config.quantum_bytes - 1) / config.quantum_bytes;
  }
  uint64_t extent_bytes(uint64_t size) const { return quanta_for(size) * config.quantum_bytes; }
  std::byte* bytes_of(const BlockEntry& entry) const;  // null: not addressable
  uint64_t offset_of(const BlockEntry& entry) const { return uint64_t{entry.offset} * config.quantum_bytes; }
  Slice slice_of(const BlockEntry& entry) const;
  Place place_of(const BlockEntry& entry) const {
    return {arenas[entry.arena]->memory.get(), offset_of(entry)};
  }
  uint64_t generation(uint32_t slot) const;
  void set_generation(uint32_t slot, uint64_t value);
  Extent extent_of(const Shard& shard, uint32_t entry) const;
  BlockInfo info_of(const Shard& shard, uint32_t entry, uint64_t now_ms) const;
  uint32_t find(const Shard& shard, uint64_t hash, TenantId tenant, const Key& key) const;
  uint32_t find_hash(const Shard& shard, uint64_t hash) const;  // a block with this hash, kNone: none
  // Entry of a live handle, kNone otherwise. The shard must be locked.
  uint32_t reserved_entry(const Shard& shard, ReservationId id) const;
  uint32_t pinned_entry(const Shard& shard, PinId id) const;
  Shard& shard_of(ReservationId id) { return shards[static_cast<uint64_t>(id) & shard_mask]; }
  Shard& shard_of(PinId id) { return shards[static_cast<uint64_t>(id) & shard_mask]; }
  // `act(shard, entry)` under the lock of the handle's shard. RESERVATION_UNKNOWN or PIN_UNKNOWN when the
  // handle is not live, or no longer.
  template <typename Act>
  auto with_reserved(ReservationId id, const Act& act) {
    return with_entry(id, &Core::reserved_entry, Code::kReservationUnknown, act);
  }
  template <typename Act>
  auto with_pinned(PinId id, const Act& act) {
    return with_entry(id, &Core::pinned_entry, Code::kPinUnknown, act);
  }
  template <typename Handle, typename Find, typename Act>
  auto with_entry(Handle id, Find find_entry, Code unknown, const Act& act) {
    using Answer = decltype(act(std::declval<Shard&>(), uint32_t{}));
    Shard& shard = shard_of(id);
    const Lock lock(shard.mutex);
    const uint32_t index = (this->*find_entry)(shard, id);
    return index == store::kNone ? Answer(Status{unknown, {}}) : act(shard, index);
  }

  // --- lives of blocks; the shard is locked (core.cpp) ---
  void publish_cold(const Shard& shard, Queue queue);
  // A pin, which also takes the entry out of its queue. LIMIT_EXCEEDED.
  Result<PinId> pin_entry(Shard& shard, uint32_t entry);
  void link(Shard& shard, uint32_t entry) {  // hottest of its queue
    link(shard, entry, ticks.fetch_add(1, std::memory_order_relaxed));
  }
  void link(Shard& shard, uint32_t entry, uint64_t tick);
  void unlink(Shard& shard, uint32_t entry);
  void link_if_idle(Shard& shard, uint32_t entry);  // links the entry if nothing holds it
  void touch(Shard& shard, uint32_t entry, uint64_t now_ms, bool in_chain);
  void hide(Shard& shard, uint32_t entry, RemoveReason reason);  // visible -> zombie or free
  void free_entry(Shard& shard, uint32_t entry);
  // No later process adopts it as a block.
  void end_record(uint32_t slot, const BlockEntry& entry) {
    if (catalogue.is_open()) entry.purged != 0 ? catalogue.purge(slot) : catalogue.clear(slot);
  }
  void end_reservation(Shard& shard, uint32_t entry);
  struct CameUp {
    uint64_t since_ms = 0;
    Origin origin;
  };
  Status publish(Shard& shard, uint32_t entry, uint32_t crc, uint64_t now_ms,
                 const std::optional<CameUp>& came_up = {});
  void announce_end(const BlockEntry& entry, RemoveReason reason);
  void append_event(const BlockEntry& entry, RecordKind kind, RemoveReason reason);
  void end_retention(Shard& shard, uint32_t entry);
  void compact_retention(Shard& shard);
  void expire_retention(Shard& shard, uint64_t now_ms);

  // --- making room (reserve.cpp) ---
  bool allocate(uint64_t size, Space* space);
  void give_back(const Space& space);
  bool make_room(uint64_t size, uint64_t now_ms, Pressure& pressure, Space* space);
  bool evict_advised(Pressure& pressure);
  bool evict_coldest(Pressure& pressure);
  std::pair<uint64_t, uint32_t> coldest(size_t queue) const;  // tick and shard; kNever: the queue is empty
  bool evict_tail(Shard& shard, Queue queue, Pressure& pressure);  // the shard is locked
  bool evict_of_tenant(TenantId tenant, Pressure& pressure);
  bool evict_by_share(Pressure& pressure);
  bool evict_in_shard(Shard& shard, Pressure& pressure);
  bool clear_neighbourhood(uint64_t size, Pressure& pressure, Space* space);
  void evict_entry(Shard& shard, uint32_t entry, Pressure& pressure);
  void expire_all_retention(uint64_t now_ms);
  Code charge(TenantId tenant, uint64_t size, uint64_t now_ms, Pressure& pressure);
  bool tenant_has_victim(TenantId tenant) const;
  // Who of one tenant goes, and who goes for a block that comes up: what lies below the memory (victims.cpp).
  struct Victim {
    uint32_t slot = 0;
    uint64_t tick = 0;
    store::Loss loss = store::Loss::kBlock;
  };
  store::Loss loss_of(const BlockEntry& entry) const;
  void add_victim(const Shard& shard, uint32_t entry, const Pressure& pressure,
                  std::vector<Victim>& out) const;
  static bool any_can_go(const std::vector<Victim>& victims);
  void coldest_of_queue(Queue queue, const Pressure& pressure, std::vector<Victim>& out) const;
  bool evict_coldest_below(Queue queue, Pressure& pressure);
  void next_advised(std::optional<TenantId> tenant, const Pressure& pressure, std::vector<Victim>& out);
  bool next_advised(std::optional<TenantId> tenant, const Pressure& pressure, uint32_t most,
                    std::vector<Victim>& out);
  bool evict_first_to_go(std::vector<Victim>& coldest, Pressure& pressure, bool for_quota = false);
  bool evict_for_read(Pressure& pressure);
  // From the end of a list; `previous` is the link that leads on. The shard is locked.
  bool evict_end(Shard& shard, uint32_t tail, uint32_t previous, Pressure& pressure);
  // Of some shards: the coldest blocks of a tenant, and what it has there.
  struct OfTenant {
    std::vector<Victim> coldest[store::kQueues];
    uint64_t bytes[store::kQueues] = {};
  };
  OfTenant coldest_of_tenant(TenantId tenant, const Pressure& pressure);
  // `more_to_evict`: set when it needs more victims than one call may take.
  Result<Reservation> reserve(TenantId tenant, const Key& key, uint64_t size, uint64_t now_ms,
                              bool* more_to_evict, bool from_disk = false, WriterNumber writer = 0);
  Result<Reservation> take_slot(TenantId tenant, const Key& key, uint64_t size, const Space& space,
                                Pressure& pressure, WriterNumber writer);
  // Call without locks after space may have become free.
  void notify_space();

  // --- memory that outlives the process (kept.cpp) ---
  struct KeptState {
    KeptMemory found;
    // Slot and generation of adopted blocks that were not looked at yet, the coldest last.
    std::vector<std::pair<uint32_t, uint64_t>> unchecked;
    std::vector<ReservationId> held;
    uint32_t next_noted = 0;  // entry, of each shard
    std::atomic<uint64_t> checked_blocks{0}, checked_bytes{0}, damaged_blocks{0}, left{0}, held_blocks{0};
  };
  struct Candidate;
  struct Part;
  store::CatalogueShape shape() const;
  // Adopts what config.keep offers: `files` are the arenas then, else empty. ALREADY_EXISTS.
  Status adopt_files(std::vector<store::Memfd>& files);
  Status keep_files();  // sets apart what the next process adopts
  void adopt_blocks();
  uint32_t adopting_threads() const;
  // No block of a former process lies there: who still reads one has to see that.
  void end_former(uint32_t slot);
  std::optional<Candidate> read_record(uint32_t slot, const store::CatalogueShape& own) const;
  void read_slots(uint64_t next, uint64_t end, Part& part);
  std::vector<Candidate> read_catalogue(std::vector<Part>& parts);
  void adopt_extents(std::vector<Candidate>& candidates);
  void prefetch_for(const std::vector<Candidate>& candidates, const std::vector<uint32_t>& own,
                    size_t at) const;
  bool adopt_entry(const Candidate& candidate, uint64_t tick, Part& part);
  void restore_shard(Shard& shard, const std::vector<bool>& used);
  void adopt_part(const std::vector<Candidate>& candidates, uint32_t number, uint32_t parts,
                  uint64_t first_tick, Part& part);
  void add_up(const std::vector<Part>& parts);
  void note_uses();

  // --- the SSD tier below (tiering.cpp) ---
  class MemoryAbove;  // what the disks ask
  Status open_tier(Store& store);
  store::disk::SharedDirectory shared_directory() const;
  // Blocks that are evicted next, and that no disk has, each with a pin of the disk's.
  void take_cold(uint32_t device, const store::disk::ColdWish& wish,
                 std::vector<store::disk::ColdBlock>& out);
  struct ColdLimits {
    uint32_t device = 0, devices = 1;
    uint64_t deep_bytes = 0;
    uint64_t small_bytes = 0;  // a larger block takes none of those that are left
    uint64_t bytes_left = 0;
    uint32_t large_left = 0;
    uint64_t now_ms = 0, wall_ms = 0;
  };
  void take_cold_tail(Shard& shard, Queue queue, uint64_t deep_bytes, ColdLimits& limits,
                      std::vector<store::disk::ColdBlock>& out);
  // Of all tenants, or of one. False: the advisor names none.
  bool take_cold_advised(std::optional<TenantId> tenant, ColdLimits& limits,
                         std::vector<store::disk::ColdBlock>& out);
  bool take_cold_block(Shard& shard, uint32_t entry, double chance, ColdLimits& limits,
                       std::vector<store::disk::ColdBlock>& out);
  void end_demotion(uint32_t slot, store::disk::Demotion end);
  // What memory evicted while a disk was about to copy it is found by nothing until the disk has it: it does
  // not arrive there. False: there is none. The shard is locked.
  bool end_leaving(Shard& shard, TenantId tenant, const Key& key);
  using Visit = std::function<void(Tier, TenantId, const Key&, uint64_t size, uint32_t hits)>;
  // `hidden`: also what no get finds there.
  uint64_t walk_disks(uint64_t cursor, uint32_t limit, const Visit& visit, bool hidden = false);
  // Where below the memory this node has the block, to stay. The shard may be locked.
  std::optional<Tier> tier_below(TenantId tenant, const Key& key) const {
    const store::disk::SsdTier* disks = below.load(std::memory_order_acquire);
    const auto found = disks == nullptr ? std::nullopt : disks->find(tenant, key);
    return found ? std::optional<Tier>(found->tier) : std::nullopt;
  }
  bool is_on_disk(TenantId tenant, const Key& key) const { return tier_below(tenant, key).has_value(); }
  // Another node has it in the shared directory.
  bool is_others(TenantId tenant, const Key& key) const {
    const store::disk::SsdTier* disks = below.load(std::memory_order_acquire);
    return disks != nullptr && disks->find_of_others(tenant, key).has_value();
  }

  // --- what tenants have and lose (tenancy.cpp) ---
  void overwrite(const BlockEntry& entry);  // its bytes, with zeros; its shard is locked
  // The end of the block's life for its record, 0: none. Nothing: it ends too soon to go down.
  std::optional<uint32_t> end_below(const BlockEntry& entry, uint64_t now_ms, uint64_t wall_ms) const;
  void purge_records(TenantId tenant, std::span<const Key> keys, Purged& done);
  void take_cold_of_loser(ColdLimits& limits, std::vector<store::disk::ColdBlock>& out);
  void expire_blocks(uint64_t now_ms, uint32_t max_slots);
  std::mutex tend_mutex;
  uint64_t expiry_cursor = 0;  // guarded by tend_mutex

  // --- who wrote blocks, and their recall (recall.cpp) ---
  void own(BlockEntry& entry, WriterNumber writer);  // the entry holds the number from now on
  uint32_t now_written_s() const;
  uint64_t recall_page(const RecallRequest& request, uint64_t cursor,
                       std::vector<std::pair<TenantId, Key>>& out, Recalled& done);
  store::Writers writers;
  store::Recalls recalls;

  // --- checking (check.cpp); everything is locked ---
  struct Census;
  bool check_shard(const Shard& shard, Census& census, std::string* why) const;
  bool check_queues(const Shard& shard, Census& census, std::string* why) const;
  bool check_totals(Census& census, std::string* why) const;

  StoreConfig config;
  store::EvictionRules rules;
  uint32_t shard_bits = 0;
  uint64_t shard_mask = 0;
  store::Catalogue::Seeds seeds{};
  std::vector<std::unique_ptr<Arena>> arenas;
  std::vector<uint64_t> arena_bytes;  // that anonymous memory is cut into
  store::Memfd generations;
  store::Catalogue catalogue;  // not open: nothing outlives the process
  KeptState kept;
  uint64_t slot_count = 0;
  uint64_t slots_per_shard() const;
  std::vector<SegmentFd> segment_fds;
  std::unique_ptr<Shard[]> shards;
  // When each shard's coldest block was last used, one row per queue: the coldest block of the node is
  // found by a scan of `shards` adjacent words, without a lock. kNever = the queue is empty.
  std::unique_ptr<std::atomic<uint64_t>[]> cold[store::kQueues];
  std::unique_ptr<std::atomic<uint64_t>[]> retention_next;  // per shard: earliest end, kNever = none
  std::unique_ptr<store::EventLog> events;
  store::Tenants tenants;
  std::unique_ptr<store::Advisor> advisor;  // policy "mooncache" only
  store::Unlimited unlimited;

  std::shared_mutex reserve_gate;
  std::atomic<uint64_t> ticks{1};
  std::atomic<uint64_t> queue_bytes[store::kQueues] = {};
  std::atomic<uint64_t> used_bytes{0};
  std::atomic<uint64_t> reserved_bytes{0};
  std::atomic<uint64_t> live_pins{0};
  std::atomic<uint32_t> rotation{0};
  std::atomic<bool> is_draining{false};
  std::atomic<bool> arena_gone{false};
  bool takes_no_blocks() const {
    return is_draining.load(std::memory_order_relaxed) || arena_gone.load(std::memory_order_relaxed);
  }
  std::atomic<bool> has_waiters{false};
  std::atomic<uint64_t> no_space{0}, quota_refusals{0}, draining_refusals{0};
  std::function<void()> space_callback;
  std::function<void(TenantId, const Key&)> commit_callback;
  const std::shared_ptr<store::disk::Keyring> keyring = std::make_shared<store::disk::Keyring>();
  // Last, because their threads use all of the above.
  std::unique_ptr<store::disk::Memory> above, above_shared;
  std::unique_ptr<store::disk::SsdTier> tier;         // null: no disks
  std::atomic<store::disk::SsdTier*> below{nullptr};  // the same, once it is open: its threads may be earlier
};

}  // namespace mooncache
