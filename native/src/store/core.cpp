#include "store/core.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>

#include "store/mapped_file.h"

namespace mooncache {

using store::kNone;
using store::State;

namespace {

// 64 x 64 -> 128 bit product folded: a keyed hash with secret seeds, so that no client can choose keys
// that collide in the index.
uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kArenaQuantaMax = 0x7fffffff;

Status invalid(const char* what) {
  return {Code::kConfigInvalid, what};
}

Status validate(const StoreConfig& config) {
  if (config.quantum_bytes < 64 || config.quantum_bytes > 65536 ||
      !std::has_single_bit(config.quantum_bytes)) {
    return invalid("quantum_bytes must be a power of two from 64 to 65536");
  }
  if (config.shards < 1 || config.shards > 256 || !std::has_single_bit(config.shards)) {
    return invalid("shards must be a power of two from 1 to 256");
  }
  const bool all_of_it = config.capacity_bytes == 0 && !config.arena_path.empty();
  if ((config.capacity_bytes < config.quantum_bytes && !all_of_it) || config.capacity_bytes > (1ull << 45)) {
    return invalid("capacity_bytes must be at least one quantum and at most 32 TiB");
  }
  if (config.arena_bytes != 0 && (!config.arena_path.empty() || config.open_arena))
    return invalid("arena_bytes cuts anonymous memory, no other");
  if (!config.arena_path.empty() && config.open_arena)
    return invalid("an arena lies in a file or in the memory of a device, not in both");
  if (config.arena_bytes != 0 && config.arena_bytes < config.quantum_bytes)
    return invalid("arena_bytes is below one quantum");
  if (config.eviction != "2q" && config.eviction != "lru" && config.eviction != "mooncache")
    return invalid("eviction must be \"2q\", \"lru\" or \"mooncache\"");
  if (config.eviction_speed == 0 || config.eviction_speed > 100'000)
    return invalid("eviction_speed must be from 1 to 100000");
  if (config.probation_percent > 100) return invalid("probation_percent must be at most 100");
  if (config.ghost_factor > 64) return invalid("ghost_factor must be at most 64");
  if (config.numa_node < -1 || config.numa_node >= 1024) return invalid("numa_node must be from -1 to 1023");
  if (config.expected_block_bytes == 0 || config.max_block_bytes == 0)
    return invalid("block sizes must not be 0");
  if (config.max_victims == 0 || config.max_ranges == 0)
    return invalid("max_victims and max_ranges must not be 0");
  if (config.event_log_capacity < 16 || config.event_log_capacity > (1ull << 28)) {
    return invalid("event_log_capacity must be from 16 to 2^28 records");
  }
  if (config.keep.enabled && (!config.arena_path.empty() || config.open_arena))
    return invalid("only anonymous memory is kept over a restart, no file and no memory of a device");
  if (config.max_pins == 0 || config.max_pins > (1ull << 26))
    return invalid("max_pins must be from 1 to 2^26");
  return Status::ok();
}

}  // namespace

Store::Core::Core(StoreConfig config_in) : config(std::move(config_in)) {
  rules.policy = config.eviction == "2q"    ? store::Policy::kTwoQueues
                 : config.eviction == "lru" ? store::Policy::kLru
                                            : store::Policy::kChains;
  rules.probation_percent = config.probation_percent;
  rules.correlated_ms = config.correlated_ms;
}

Status Store::Core::start() {
  if (Status status = validate(config); !status) return status;
#if defined(__SANITIZE_THREAD__)  // it follows at most 64 locks per thread, and check() takes them all
  config.shards = std::min(config.shards, 32u);
#endif
  shard_bits = static_cast<uint32_t>(std::countr_zero(config.shards));
  shard_mask = config.shards - 1;
  if (Status status = make_arenas(); !status) return status;
  const uint64_t per_shard = slots_per_shard();
  slot_count = per_shard * config.shards;
  if (Status status = make_table(); !status) return status;
  shards = std::make_unique<Shard[]>(config.shards);
  retention_next = std::make_unique<std::atomic<uint64_t>[]>(config.shards);
  for (auto& row : cold) row = std::make_unique<std::atomic<uint64_t>[]>(config.shards);
  for (uint32_t number = 0; number < config.shards; ++number) {
    shards[number].number = number;
    shards[number].entries = store::Slab<BlockEntry, 32>(static_cast<uint32_t>(per_shard));
    shards[number].pins = store::Slab<store::PinRecord, 32>(kNone >> shard_bits);
    retention_next[number] = kNever;
    for (auto& row : cold) row[number] = kNever;
  }
  if (rules.policy == store::Policy::kChains)
    advisor = std::make_unique<store::Advisor>(config.eviction_speed);
  events = std::make_unique<store::EventLog>(config.event_log_capacity);
  if (!events->ok()) return {Code::kNoSpace, "no memory for the event log"};
  for (uint32_t id = 0; id < arenas.size(); ++id) {
    const store::ArenaMemory& memory = *arenas[id]->memory;
    segment_fds.push_back({id, SegmentKind::kArena, memory.size_bytes(), memory.fd_ro(), memory.fd_rw()});
  }
  segment_fds.push_back({static_cast<uint32_t>(arenas.size()), SegmentKind::kGenerationTable,
                         generations.size_bytes(), generations.fd_ro(), generations.fd_rw()});
  if (kept.found.adopted) adopt_blocks();
  return Status::ok();
}

// Keys spread unevenly over the shards, hence the slack.
uint64_t Store::Core::slots_per_shard() const {
  const uint64_t blocks =
      config.capacity_bytes / std::max<uint64_t>(config.expected_block_bytes, config.quantum_bytes);
  return std::min<uint64_t>(blocks / config.shards * 5 / 4 + 64,
                            std::min<uint64_t>(store::SlotIndex::kMaxEntries, kNone >> shard_bits));
}

// Generations, and the seeds that say which slot a key may have.
Status Store::Core::make_table() {
  if (!kept.found.adopted) {
    auto table = store::Memfd::create("mooncache-generations", slot_count * sizeof(uint64_t), {});
    if (!table) return table.status();
    generations = std::move(*table);
    if (::getrandom(seeds.data(), sizeof seeds, 0) != static_cast<ssize_t>(sizeof seeds))
      return {Code::kInternal, "getrandom"};
    for (uint64_t& seed : seeds) seed |= 1;
  }
  return config.keep.enabled ? keep_files() : Status::ok();
}

// One mapping, or one allocation, is one arena: larger quanta where 32 bits would not number them.
Status Store::Core::make_arena(std::unique_ptr<store::ArenaMemory> memory) {
  while (memory->size_bytes() / config.quantum_bytes > kArenaQuantaMax) config.quantum_bytes *= 2;
  const uint64_t quanta = memory->size_bytes() / config.quantum_bytes;
  if (quanta == 0) return invalid("the arena is smaller than one quantum");
  config.capacity_bytes = quanta * config.quantum_bytes;
  arenas.push_back(std::make_unique<Arena>(std::move(memory), static_cast<uint32_t>(quanta)));
  return Status::ok();
}

Status Store::Core::make_arenas() {
  if (!config.arena_path.empty()) {
    auto file = store::MappedFile::open({config.arena_path, config.capacity_bytes, config.huge_pages});
    return file ? make_arena(std::move(*file)) : file.status();
  }
  if (config.open_arena) {
    auto memory = config.open_arena(config.capacity_bytes);
    if (!memory) return memory.status();
    config.tier = (*memory)->tier();
    return make_arena(std::move(*memory));
  }
  const uint64_t arena_max = std::min<uint64_t>(config.arena_bytes == 0 ? ~uint64_t{0} : config.arena_bytes,
                                                kArenaQuantaMax * config.quantum_bytes);
  uint64_t left = config.capacity_bytes / config.quantum_bytes;
  const uint64_t arena_quanta_max = arena_max / config.quantum_bytes;
  if ((left + arena_quanta_max - 1) / arena_quanta_max > 1024) return invalid("more than 1024 arenas");
  config.capacity_bytes = left * config.quantum_bytes;
  for (; left > 0; left -= std::min(left, arena_quanta_max))
    arena_bytes.push_back(std::min(left, arena_quanta_max) * config.quantum_bytes);
  return make_memory_files();
}

Status Store::Core::make_memory_files() {
  std::vector<store::Memfd> files;
  if (config.keep.enabled) {
    if (Status status = adopt_files(files); !status) return status;
  }
  for (size_t number = 0; number < arena_bytes.size(); ++number) {
    if (number == files.size()) {
      auto file =
          store::Memfd::create("mooncache-arena", arena_bytes[number], {config.huge_pages, config.numa_node});
      if (!file) return file.status();
      files.push_back(std::move(*file));
    }
    if (config.keep.enabled) {
      const uint64_t session = kept.found.adopted ? catalogue.session() : 1;
      if (Status status = files[number].keep(session); !status) return status;
      kept.found.fds.push_back(files[number].kept_fd());
    }
    const auto quanta = static_cast<uint32_t>(arena_bytes[number] / config.quantum_bytes);
    arenas.push_back(
        std::make_unique<Arena>(std::make_unique<store::AnonymousMemory>(std::move(files[number])), quanta));
  }
  return Status::ok();
}

uint64_t Store::Core::hash_of(TenantId tenant, const Key& key) const {
  return fold(fold(key.word(0) ^ seeds[0], key.word(1) ^ seeds[1]) ^ key.word(2) ^ seeds[2],
              fold(key.word(3) ^ seeds[3], tenant ^ seeds[0]) ^ seeds[1]);
}

std::byte* Store::Core::bytes_of(const BlockEntry& entry) const {
  std::byte* const base = arenas[entry.arena]->memory->data();
  return base == nullptr ? nullptr : base + offset_of(entry);
}

Slice Store::Core::slice_of(const BlockEntry& entry) const {
  std::byte* const at = bytes_of(entry);
  return at == nullptr ? Slice{} : Slice{at, entry.size};
}

// The table is shared with other processes, so it is plain memory accessed atomically.
uint64_t Store::Core::generation(uint32_t slot) const {
  void* at = generations.data() + slot * sizeof(uint64_t);
  return std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(at)).load(std::memory_order_acquire);
}

// The fence keeps later writes to the block's memory behind the new generation, so that a reader that
// saw any of them also sees that the generation changed.
void Store::Core::set_generation(uint32_t slot, uint64_t value) {
  void* at = generations.data() + slot * sizeof(uint64_t);
  std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(at)).store(value, std::memory_order_seq_cst);
#if !defined(__SANITIZE_THREAD__)  // the sanitizer does not know fences; the leaf mutexes order its view
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

Extent Store::Core::extent_of(const Shard& shard, uint32_t index) const {
  const BlockEntry& entry = shard.entries[index];
  const uint32_t slot = slot_of(shard, index);
  return {entry.arena, slot, generation(slot), uint64_t{entry.offset} * config.quantum_bytes, entry.size};
}

BlockInfo Store::Core::info_of(const Shard& shard, uint32_t index, uint64_t now_ms) const {
  const BlockEntry& entry = shard.entries[index];
  BlockInfo info;
  info.extent = extent_of(shard, index);
  info.crc32c = entry.crc;
  info.tier = config.tier;
  info.pins = entry.pins - entry.demoting;
  info.hits = entry.hits;
  info.origin = {writers.id_of(entry.writer), entry.written_s};
  info.age_ms = now_ms > entry.committed_ms ? now_ms - entry.committed_ms : 0;
  info.pinned_until_ms = entry.retained_until_ms > now_ms ? entry.retained_until_ms : 0;
  return info;
}

uint32_t Store::Core::find(const Shard& shard, uint64_t hash, TenantId tenant, const Key& key) const {
  return shard.index.find(hash, [&](uint32_t index) {
    const BlockEntry& entry = shard.entries[index];
    return entry.tenant == tenant && entry.key == key;
  });
}

uint32_t Store::Core::find_hash(const Shard& shard, uint64_t hash) const {
  return shard.index.find(hash, [&](uint32_t index) {
    return hash_of(shard.entries[index].tenant, shard.entries[index].key) == hash;
  });
}

uint32_t Store::Core::reserved_entry(const Shard& shard, ReservationId id) const {
  const auto slot = static_cast<uint32_t>(static_cast<uint64_t>(id));
  const uint32_t index = slot >> shard_bits;
  if (index >= shard.entries.size() || shard.entries[index].state != State::kReserved) return kNone;
  return static_cast<uint32_t>(generation(slot)) == static_cast<uint64_t>(id) >> 32 ? index : kNone;
}

uint32_t Store::Core::pinned_entry(const Shard& shard, PinId id) const {
  const uint32_t index = static_cast<uint32_t>(static_cast<uint64_t>(id)) >> shard_bits;
  if (index >= shard.pins.size()) return kNone;
  const store::PinRecord& pin = shard.pins[index];
  return pin.live != 0 && pin.generation == static_cast<uint64_t>(id) >> 32 ? pin.next : kNone;
}

void Store::Core::publish_cold(const Shard& shard, Queue queue) {
  const uint32_t tail = shard.queues[static_cast<size_t>(queue)].tail;
  cold[static_cast<size_t>(queue)][shard.number].store(tail == kNone ? kNever : shard.entries[tail].tick,
                                                       std::memory_order_relaxed);
}

Result<PinId> Store::Core::pin_entry(Shard& shard, uint32_t index) {
  if (live_pins.fetch_add(1, std::memory_order_relaxed) >= config.max_pins) {
    live_pins.fetch_sub(1, std::memory_order_relaxed);
    return {Code::kLimitExceeded, "max_pins pins are live"};
  }
  const uint32_t number = shard.pins.allocate();
  if (number == kNone) {
    live_pins.fetch_sub(1, std::memory_order_relaxed);
    return {Code::kLimitExceeded, "too many pins on one shard"};
  }
  store::PinRecord& pin = shard.pins[number];
  pin.next = index;
  pin.live = 1;
  BlockEntry& entry = shard.entries[index];
  if (entry.linked != 0) unlink(shard, index);
  ++entry.pins;
  return static_cast<PinId>((uint64_t{pin.generation} << 32) | (number << shard_bits) | shard.number);
}

void Store::Core::link(Shard& shard, uint32_t index, uint64_t tick) {
  BlockEntry& entry = shard.entries[index];
  const auto queue = static_cast<size_t>(entry.queue);
  entry.tick = tick;
  entry.linked = 1;
  store::push_front<store::kQueuePrevious, store::kQueueNext>(shard.queues[queue], shard.entries, index);
  store::TenantQueues& own = shard.tenant_queues[entry.tenant];
  store::push_front<store::kTenantPrevious, store::kTenantNext>(own.lists[queue], shard.entries, index);
  own.bytes[queue] += extent_bytes(entry.size);
  ++own.blocks[queue];
  queue_bytes[queue].fetch_add(extent_bytes(entry.size), std::memory_order_relaxed);
  publish_cold(shard, entry.queue);
}

void Store::Core::unlink(Shard& shard, uint32_t index) {
  BlockEntry& entry = shard.entries[index];
  const auto queue = static_cast<size_t>(entry.queue);
  entry.linked = 0;
  store::unlink<store::kQueuePrevious, store::kQueueNext>(shard.queues[queue], shard.entries, index);
  const auto own = shard.tenant_queues.find(entry.tenant);
  store::unlink<store::kTenantPrevious, store::kTenantNext>(own->second.lists[queue], shard.entries, index);
  own->second.bytes[queue] -= extent_bytes(entry.size);
  if (--own->second.blocks[queue] == 0 && own->second.blocks[1 - queue] == 0) shard.tenant_queues.erase(own);
  queue_bytes[queue].fetch_sub(extent_bytes(entry.size), std::memory_order_relaxed);
  publish_cold(shard, entry.queue);
}

void Store::Core::link_if_idle(Shard& shard, uint32_t index) {
  BlockEntry& entry = shard.entries[index];
  if (entry.state != State::kVisible || entry.pins != 0 || entry.retained_until_ms != 0 || entry.linked != 0)
    return;
  if (entry.aside != 0) {
    entry.aside = 0;
    const bool in_chain =
        advisor->stored(hash_of(entry.tenant, entry.key), 0);  // at the time of its last call
    entry.queue = in_chain ? Queue::kProtected : Queue::kProbation;
  }
  link(shard, index);
}

void Store::Core::touch(Shard& shard, uint32_t index, uint64_t now_ms, bool in_chain) {
  BlockEntry& entry = shard.entries[index];
  const bool was_linked = entry.linked != 0;
  if (entry.on_disk == store::OnDisk::kRefused) entry.on_disk = store::OnDisk::kUnknown;
  if (was_linked) unlink(shard, index);
  const int64_t lived_ms = store::disk::age_ms(entry.committed_ms, now_ms);
  const uint64_t age_ms = lived_ms > 0 ? static_cast<uint64_t>(lived_ms) : 0;
  entry.queue = store::queue_on_hit(rules, entry.queue, age_ms, in_chain);
  if (was_linked) link(shard, index);
}

void Store::Core::append_event(const BlockEntry& entry, RecordKind kind, RemoveReason reason) {
  events->append({kind, config.tier, reason, entry.tenant, entry.size, entry.key});
}

// A block that lies on a disk, too, goes on there.
void Store::Core::announce_end(const BlockEntry& entry, RemoveReason reason) {
  const auto below_it = tier_below(entry.tenant, entry.key);
  const bool stays = (reason == RemoveReason::kEvicted || reason == RemoveReason::kCorrupt) && below_it;
  if (!stays || reason == RemoveReason::kCorrupt) append_event(entry, RecordKind::kRemove, reason);
  if (!stays) return;
  const RecordKind kind = reason == RemoveReason::kCorrupt ? RecordKind::kAdd : RecordKind::kMoveTier;
  events->append({kind, *below_it, RemoveReason::kNone, entry.tenant, entry.size, entry.key});
}

void Store::Core::hide(Shard& shard, uint32_t index, RemoveReason reason) {
  BlockEntry& entry = shard.entries[index];
  end_record(slot_of(shard, index), entry);
  if (entry.linked != 0) unlink(shard, index);
  if (entry.retained_until_ms != 0) {
    entry.retained_until_ms = 0;
    --shard.count.retained;
  }
  const uint64_t hash = hash_of(entry.tenant, entry.key);
  if (advisor) advisor->discard(hash);
  shard.index.erase(hash, index,
                    [&](uint32_t at) { return hash_of(shard.entries[at].tenant, shard.entries[at].key); });
  announce_end(entry, reason);
  tenants.count_block(entry.tenant, false);
  writers.went(entry.writer, entry.size);
  --shard.count.visible;
  ++shard.count.removed[static_cast<size_t>(reason)];
  if (entry.pins == 0) {
    free_entry(shard, index);
    return;
  }
  entry.state = State::kZombie;
  entry.removed = reason == RemoveReason::kRemoved ? 1 : 0;
  if (entry.demoting != 0) shard.leaving.push_back(index);
  ++shard.count.zombies;
}

// The order matters: first the catalogue (no later process adopts it), then the generation (one-sided readers
// of the old block now fail), then the memory. A purged block's record stays until its bytes are overwritten.
void Store::Core::free_entry(Shard& shard, uint32_t index) {
  BlockEntry& entry = shard.entries[index];
  const uint32_t slot = slot_of(shard, index);
  end_record(slot, entry);
  const uint64_t old = generation(slot);
  set_generation(slot, old % 2 == 0 ? old + 1 : old + 2);
  if (entry.purged != 0) {
    overwrite(entry);
    if (catalogue.is_open()) catalogue.clear(slot);
  }
  tenants.give_back(entry.tenant, entry.size);
  own(entry, 0);
  give_back({entry.arena, entry.next, entry.offset});
  entry.state = State::kFree;
  shard.entries.release(index);
}

void Store::Core::end_reservation(Shard& shard, uint32_t index) {
  reserved_bytes.fetch_sub(extent_bytes(shard.entries[index].size), std::memory_order_relaxed);
  shard.writes.erase(index);
  --shard.count.reservations;
}

Status Store::Core::publish(Shard& shard, uint32_t index, uint32_t crc, uint64_t now_ms,
                            const std::optional<CameUp>& came_up) {
  const bool from_disk = came_up.has_value();
  BlockEntry& entry = shard.entries[index];
  const uint64_t hash = hash_of(entry.tenant, entry.key);
  if (catalogue.is_open()) catalogue.prefetch(slot_of(shard, index));
  end_reservation(shard, index);
  if (entry.purged != 0) {
    free_entry(shard, index);
    return {Code::kReservationUnknown, "the tenant's blocks were purged, or its writer's recalled"};
  }
  if (from_disk) {
    const WriterNumber number = writers.open({came_up->origin.writer, {}, {}, 0});
    own(entry, number);
    writers.release(number);
    // Before it is a block: from then on a recall has to find it.
    if (catalogue.is_open()) catalogue.note_use(slot_of(shard, index), 0, 0, number);
  }
  entry.written_s = from_disk ? came_up->origin.written_s : now_written_s();
  if (recalls.covers(from_disk ? came_up->origin.writer : writers.id_of(entry.writer), entry.written_s)) {
    free_entry(shard, index);
    return {Code::kReservationUnknown, "the blocks of its writer were recalled"};
  }
  if (find(shard, hash, entry.tenant, entry.key) != kNone) {
    ++shard.count.races_lost;
    free_entry(shard, index);
    return {Code::kAlreadyExists, {}};
  }
  const auto print = static_cast<uint32_t>(hash >> 16) | 1u;
  const bool evicted_recently = shard.ghosts.contains(print);
  if (evicted_recently) {
    shard.ghosts.forget(print);
    ++shard.count.by_ghost;
  }
  entry.state = State::kVisible;
  entry.crc = crc;
  entry.committed_ms = from_disk ? came_up->since_ms : now_ms;
  const bool in_chain = advisor && advisor->stored(hash, now_ms);
  entry.queue = store::queue_on_commit(rules, evicted_recently, in_chain);
  const uint32_t slot = slot_of(shard, index);
  set_generation(slot, generation(slot) + 1);
  if (catalogue.is_open()) catalogue.commit(slot, crc, generation(slot), entry.committed_ms, entry.written_s);
  shard.index.insert(hash, index,
                     [&](uint32_t at) { return hash_of(shard.entries[at].tenant, shard.entries[at].key); });
  append_event(entry, RecordKind::kAdd, RemoveReason::kNone);
  tenants.count_block(entry.tenant, true);
  writers.appeared(entry.writer, entry.size, entry.written_s);
  if (from_disk) {
    tenants.count(entry.tenant, &TenantUsage::up_blocks, &TenantUsage::up_bytes, entry.size);
  } else {
    tenants.count(entry.tenant, &TenantUsage::stored_blocks, &TenantUsage::stored_bytes, entry.size);
  }
  ++shard.count.visible;
  ++shard.count.commits;
  unlimited.stored(hash);
  if (from_disk) entry.on_disk = store::OnDisk::kWritten;
  // Written by a client while the disk did not answer: what lies there may be another content.
  if (tier && !from_disk) {
    (void)end_leaving(shard, entry.tenant, entry.key);  // so may a former one on its way there
    (void)tier->remove(entry.tenant, entry.key, {});
  }
  link(shard, index);
  if (catalogue.is_open())
    catalogue.note_use(slot, entry.tick, static_cast<uint8_t>(entry.queue), entry.writer);
  if (commit_callback) commit_callback(entry.tenant, entry.key);
  return Status::ok();
}

void Store::Core::end_retention(Shard& shard, uint32_t index) {
  BlockEntry& entry = shard.entries[index];
  if (entry.retained_until_ms == 0) return;
  entry.retained_until_ms = 0;
  --shard.count.retained;
  link_if_idle(shard, index);
}

// Keeps one heap element per retained block.
void Store::Core::compact_retention(Shard& shard) {
  auto& ends = shard.retention_ends;
  if (ends.size() <= 2 * shard.count.retained + 64) return;
  const auto live = [&](const Shard::RetentionEnd& end) {
    return shard.entries[end.entry].state == State::kVisible &&
           static_cast<uint32_t>(generation(slot_of(shard, end.entry))) == end.generation;
  };
  std::erase_if(ends, [&](const Shard::RetentionEnd& end) { return !live(end); });
  for (const auto& end : ends) shard.entries[end.entry].in_heap = 0;
  std::erase_if(ends, [&](Shard::RetentionEnd& end) {
    BlockEntry& entry = shard.entries[end.entry];
    if (entry.in_heap != 0 || entry.retained_until_ms == 0) return true;
    entry.in_heap = 1;
    end.at_ms = entry.retained_until_ms;
    return false;
  });
  std::make_heap(ends.begin(), ends.end(), std::greater<>());
}

// At most so many per call: the rest is found by the next reserve that needs room.
void Store::Core::expire_retention(Shard& shard, uint64_t now_ms) {
  constexpr int kEndsMax = 256;
  auto& ends = shard.retention_ends;
  for (int count = 0; count < kEndsMax && !ends.empty() && ends.front().at_ms <= now_ms; ++count) {
    std::pop_heap(ends.begin(), ends.end(), std::greater<>());
    Shard::RetentionEnd end = ends.back();
    ends.pop_back();
    BlockEntry& entry = shard.entries[end.entry];
    if (entry.state != State::kVisible ||
        static_cast<uint32_t>(generation(slot_of(shard, end.entry))) != end.generation)
      continue;
    entry.in_heap = 0;
    if (entry.retained_until_ms == 0) continue;
    if (entry.retained_until_ms > now_ms) {  // prolonged since
      end.at_ms = entry.retained_until_ms;
      ends.push_back(end);
      std::push_heap(ends.begin(), ends.end(), std::greater<>());
      entry.in_heap = 1;
      continue;
    }
    end_retention(shard, end.entry);
  }
  retention_next[shard.number].store(ends.empty() ? kNever : ends.front().at_ms, std::memory_order_relaxed);
}

void Store::Core::notify_space() {
  if (has_waiters.load(std::memory_order_seq_cst) && has_waiters.exchange(false) && space_callback)
    space_callback();
}

}  // namespace mooncache
