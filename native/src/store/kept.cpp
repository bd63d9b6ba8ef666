// Memory that outlives the process: what a killed, restarted or upgraded node adopts from the former one.
//
// A committed block is adopted when its record holds in every field, its slot has the generation that the
// record names, and no other record claims a byte of it. Its own bytes are compared with their checksum at
// every read, as always, and once in the background.
// An extent that was reserved when the former process ended may still be written by a client that has the
// arena mapped. So may one whose bytes were to be overwritten. It is no block, and it stays reserved: the
// writable descriptors of each process hold a lock of the kernel's that lasts as long as any descriptor or
// mapping that came from them. When that lock is gone no client can write, and the extent is free,
// overwritten first if it was purged. Devices cannot write by then: who lends the descriptors waits until the
// former process is gone, and its registrations with it. Clients wait meanwhile, so several threads adopt:
// each reads a part of the catalogue, and then has some of the shards for itself.
#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>

#include "mooncache/crc32c.h"
#include "store/core.h"

namespace mooncache {

using store::Kept;
using store::KeptRecord;
using store::kNone;
using store::State;

// 40 bytes for each record: a million of them fit where a small node has room.
struct Store::Core::Candidate {
  uint64_t tick = 0;
  uint32_t arena = 0, offset = 0, quanta = 0;
  uint32_t slot = 0;
  uint32_t node = kNone;
  bool committed = false;
  bool refused = false;
  bool purged = false;
  uint8_t queue = 0;
  uint64_t end() const { return uint64_t{offset} + quanta; }
  static bool lies_before(const Candidate& a, const Candidate& b) {
    return a.arena != b.arena ? a.arena < b.arena : a.offset < b.offset;
  }
};

// What one thread found and adopted; summed up when all have ended.
struct Store::Core::Part {
  struct OfTenant {
    uint64_t bytes = 0, blocks = 0;
  };
  std::vector<Candidate> candidates;
  std::vector<ReservationId> held;
  std::unordered_map<TenantId, OfTenant> tenants;
  uint64_t blocks = 0, bytes = 0, refused = 0;
};

namespace {

// `work(number, part)` for each part on a thread of its own. Throws what one of them threw.
template <typename Part, typename Work>
void on_threads(std::vector<Part>& parts, const Work& work) {
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto run = [&](uint32_t number) {
    try {
      work(number, parts[number]);
    } catch (...) {
      const std::lock_guard lock(mutex);
      thrown = std::current_exception();
    }
  };
  std::vector<std::jthread> helpers;
  for (uint32_t number = 1; number < parts.size(); ++number) {
    try {
      helpers.emplace_back(run, number);
    } catch (const std::system_error&) {
      run(number);  // no more threads are to be had
    }
  }
  run(0);
  helpers.clear();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace

store::CatalogueShape Store::Core::shape() const {
  return {config.keep.node_id,   config.quantum_bytes, config.shards, slots_per_shard() * config.shards,
          config.capacity_bytes, arena_bytes};
}

// All or nothing: an arena without its catalogue is no use, nor the reverse.
Status Store::Core::adopt_files(std::vector<store::Memfd>& files) {
  kept.found.enabled = true;
  const std::vector<int>& fds = config.keep.fds;
  if (fds.empty()) return Status::ok();
  const auto refused = [&](const Status& why) {
    files.clear();
    catalogue = {};
    generations = {};
    kept.found.why_not = why.message;
    return why.code == Code::kAlreadyExists ? why : Status::ok();
  };
  if (fds.size() != arena_bytes.size() + 2)
    return refused({Code::kConfigInvalid, "the kept memory has another number of files"});
  auto found = store::Catalogue::adopt(fds[0], shape());
  if (!found) return refused(found.status());
  auto table = store::Memfd::adopt(fds[1], slots_per_shard() * config.shards * sizeof(uint64_t), {});
  if (!table) return refused(table.status());
  for (size_t number = 0; number < arena_bytes.size(); ++number) {
    auto file =
        store::Memfd::adopt(fds[number + 2], arena_bytes[number], {config.huge_pages, config.numa_node});
    if (!file) return refused(file.status());
    files.push_back(std::move(*file));
  }
  catalogue = std::move(*found);
  generations = std::move(*table);
  seeds = catalogue.seeds();
  kept.found.adopted = true;
  return Status::ok();
}

Status Store::Core::keep_files() {
  if (!catalogue.is_open()) {
    auto made = store::Catalogue::create(shape(), seeds);
    if (!made) return made.status();
    catalogue = std::move(*made);
  }
  writers.on_assigned = [this](WriterNumber number, uint64_t id) { catalogue.set_writer(number, id); };
  if (Status status = generations.keep(catalogue.session()); !status) return status;
  kept.found.fds.insert(kept.found.fds.begin(), {catalogue.file().kept_fd(), generations.kept_fd()});
  return Status::ok();
}

// As many as can be of use, unless the configuration says.
uint32_t Store::Core::adopting_threads() const {
  constexpr uint64_t kMost = 4, kSlotsEach = 1 << 17;
  if (config.keep.adopting_threads != 0) return std::min(config.keep.adopting_threads, config.shards);
  const uint64_t useful = std::min(kMost, slot_count / kSlotsEach + 1);
  return static_cast<uint32_t>(std::clamp<uint64_t>(std::thread::hardware_concurrency(), 1, useful));
}

// What holds by itself; whether records contradict each other comes later. Nothing: the slot has no record.
std::optional<Store::Core::Candidate> Store::Core::read_record(uint32_t slot,
                                                               const store::CatalogueShape& own) const {
  const auto found = catalogue.read(slot);
  if (found.kind == Kept::kEmpty) return std::nullopt;
  const store::KeptRecord& record = found.record;
  Candidate candidate;
  candidate.slot = slot;
  candidate.committed = found.kind == Kept::kCommitted;
  candidate.purged = found.kind == Kept::kPurged;
  const uint64_t current = generation(slot);
  candidate.refused = found.kind == Kept::kDamaged ||
                      *wrong_with(record, own, config.max_block_bytes) != '\0' ||
                      (hash_of(record.tenant, record.key) & shard_mask) != (slot & shard_mask) ||
                      (candidate.committed && (record.generation != current || current % 2 != 0));
  if (candidate.refused) return candidate;
  candidate.arena = record.arena;
  candidate.offset = record.offset;
  candidate.quanta = static_cast<uint32_t>(quanta_for(record.size));
  candidate.tick = found.tick;
  candidate.queue = found.queue;
  return candidate;
}

void Store::Core::end_former(uint32_t slot) {
  const uint64_t current = generation(slot);
  if (current % 2 == 0 && current != 0) set_generation(slot, current + 1);
}

// Slots [next, end), by place in the arenas. A block that was removed while it was read, or a moment before
// the end, has no record and still its generation.
void Store::Core::read_slots(uint64_t next, uint64_t end, Part& part) {
  const store::CatalogueShape own = shape();
  while (next < end) {
    const auto range = catalogue.next_used(next);
    for (uint64_t slot = std::max(next, range.begin); slot < std::min(range.end, end); ++slot) {
      const std::optional<Candidate> candidate = read_record(static_cast<uint32_t>(slot), own);
      if (candidate && !candidate->refused) {
        part.candidates.push_back(*candidate);
        continue;
      }
      if (candidate) {
        catalogue.clear(candidate->slot);
        ++part.refused;
      }
      end_former(static_cast<uint32_t>(slot));
    }
    next = std::max(range.end, next + 1);
  }
  std::sort(part.candidates.begin(), part.candidates.end(), Candidate::lies_before);
}

std::vector<Store::Core::Candidate> Store::Core::read_catalogue(std::vector<Part>& parts) {
  on_threads(parts, [&](uint32_t number, Part& part) {
    read_slots(slot_count * number / parts.size(), slot_count * (number + 1) / parts.size(), part);
  });
  std::vector<Candidate> all = std::move(parts.front().candidates);
  for (size_t number = 1; number < parts.size(); ++number) {
    const auto& more = parts[number].candidates;
    const auto middle = static_cast<std::ptrdiff_t>(all.size());
    all.insert(all.end(), more.begin(), more.end());
    std::inplace_merge(all.begin(), all.begin() + middle, all.end(), Candidate::lies_before);
    parts[number].candidates = {};
  }
  return all;
}

namespace {

// Of records that claim the same byte none is a block; one that says "may be written" stays. In two passes:
// the second one sees what the first one left.
template <typename Candidates>
void refuse_overlaps(Candidates& sorted) {
  for (const bool last : {false, true}) {
    typename Candidates::pointer widest = nullptr;
    for (auto& candidate : sorted) {
      if (last && candidate.refused) continue;
      if (widest != nullptr && widest->arena == candidate.arena && candidate.offset < widest->end()) {
        if (last || candidate.committed || !widest->committed) candidate.refused = true;
        if (!last && widest->committed) widest->refused = true;
        if (candidate.end() <= widest->end() || last) continue;
      }
      widest = &candidate;
    }
  }
}

}  // namespace

// They come by place in the arenas.
void Store::Core::adopt_extents(std::vector<Candidate>& candidates) {
  refuse_overlaps(candidates);
  std::erase_if(candidates, [&](const Candidate& candidate) {
    if (!candidate.refused) return false;
    catalogue.clear(candidate.slot);
    end_former(candidate.slot);
    ++kept.found.refused;
    return true;
  });
  std::vector<store::ExtentAllocator::Taken> taken;
  for (size_t begin = 0, end = 0; begin < candidates.size(); begin = end) {
    Arena& arena = *arenas[candidates[begin].arena];
    taken.clear();
    for (; end < candidates.size() && candidates[end].arena == candidates[begin].arena; ++end)
      taken.push_back({candidates[end].offset, candidates[end].quanta});
    const std::lock_guard lock(arena.mutex);
    const std::vector<uint32_t> nodes = arena.extents.take(taken);
    for (size_t at = 0; at < nodes.size(); ++at) {
      Candidate& candidate = candidates[begin + at];
      candidate.node = nodes[at];
      arena.extents.set_owner(nodes[at], candidate.slot);
      used_bytes.fetch_add(uint64_t{candidate.quanta} * config.quantum_bytes, std::memory_order_relaxed);
    }
  }
}

// Blocks come in the order of their last use, which is none of memory: without this the loop waits for memory
// four times for each.
void Store::Core::prefetch_for(const std::vector<Candidate>& candidates, const std::vector<uint32_t>& own,
                               size_t at) const {
  constexpr size_t kRecordAhead = 24, kIndexAhead = 12;
  if (at + kRecordAhead < own.size()) {
    const uint32_t slot = candidates[own[at + kRecordAhead]].slot;
    catalogue.prefetch(slot);
    const auto* const entry =
        reinterpret_cast<const std::byte*>(&shards[slot & shard_mask].entries[slot >> shard_bits]);
    __builtin_prefetch(entry, 1);
    __builtin_prefetch(entry + sizeof(BlockEntry) - 1, 1);
  }
  if (at + kIndexAhead < own.size()) {
    const uint32_t slot = candidates[own[at + kIndexAhead]].slot;
    const KeptRecord& record = catalogue.content(slot);
    shards[slot & shard_mask].index.prefetch(hash_of(record.tenant, record.key));
  }
}

// False: not as a block. The shard is locked.
bool Store::Core::adopt_entry(const Candidate& candidate, uint64_t tick, Part& part) {
  Shard& shard = shards[candidate.slot & shard_mask];
  const uint32_t index = candidate.slot >> shard_bits;
  const auto found = catalogue.read(candidate.slot);
  BlockEntry& entry = shard.entries[index];
  entry = BlockEntry{};
  entry.key = found.record.key;
  entry.tenant = found.record.tenant;
  entry.size = found.record.size;
  entry.offset = candidate.offset;
  entry.next = candidate.node;
  entry.arena = static_cast<uint16_t>(candidate.arena);
  const uint64_t hash = hash_of(entry.tenant, entry.key);
  if (!candidate.committed) {
    const uint64_t current = generation(candidate.slot);
    part.tenants[entry.tenant].bytes += entry.size;
    entry.state = State::kReserved;
    entry.purged = candidate.purged ? 1 : 0;
    if (current % 2 == 0) set_generation(candidate.slot, current + 1);
    reserved_bytes.fetch_add(extent_bytes(entry.size), std::memory_order_relaxed);
    ++shard.count.reservations;
    const uint64_t id = (extent_of(shard, index).generation << 32) | candidate.slot;
    part.held.push_back(static_cast<ReservationId>(id));
    return false;
  }
  if (find(shard, hash, entry.tenant, entry.key) != kNone) {
    ++part.refused;
    tenants.adopt(entry.tenant, entry.size, 0);  // it is given back at once
    free_entry(shard, index);
    return false;
  }
  entry.state = State::kVisible;
  entry.crc = found.record.crc;
  entry.committed_ms = found.record.committed_ms;
  if (found.writer <= kMaxWriters && writers.id_of(found.writer) != 0) own(entry, found.writer);
  entry.written_s = entry.writer != 0 ? found.record.written_s : 0;
  writers.appeared(entry.writer, entry.size, entry.written_s);
  const bool in_chain = advisor && advisor->stored(hash, 0);
  unlimited.stored(hash);
  entry.queue =
      store::queue_on_commit(rules, static_cast<Queue>(candidate.queue) == Queue::kProtected, in_chain);
  shard.index.insert(hash, index,
                     [&](uint32_t at) { return hash_of(shard.entries[at].tenant, shard.entries[at].key); });
  Part::OfTenant& tenant = part.tenants[entry.tenant];
  tenant.bytes += entry.size;
  ++tenant.blocks;
  ++shard.count.visible;
  ++part.blocks;
  part.bytes += entry.size;
  link(shard, index, tick);
  catalogue.note_use(candidate.slot, entry.tick, static_cast<uint8_t>(entry.queue), entry.writer);
  return true;
}

// The slots of a shard, before its blocks are adopted: `used` says which of them have a candidate.
void Store::Core::restore_shard(Shard& shard, const std::vector<bool>& used) {
  const Lock lock(shard.mutex);
  shard.index.reserve(static_cast<uint32_t>(used.size()));
  shard.entries.restore(static_cast<uint32_t>(used.size()), [&](uint32_t index) {
    if (!used[index]) {
      const uint32_t slot = slot_of(shard, index);
      if (generation(slot) % 2 == 0) set_generation(slot, generation(slot) + 1);
    }
    return used[index];
  });
}

// The candidates in every `parts`th shard from `number` on, in their order.
void Store::Core::adopt_part(const std::vector<Candidate>& candidates, uint32_t number, uint32_t parts,
                             uint64_t first_tick, Part& part) {
  std::vector<std::vector<bool>> used(config.shards);
  std::vector<uint32_t> own;
  for (size_t at = 0; at < candidates.size(); ++at) {
    const uint32_t slot = candidates[at].slot;
    if ((slot & shard_mask) % parts != number) continue;
    own.push_back(static_cast<uint32_t>(at));
    auto& row = used[slot & shard_mask];
    const size_t index = slot >> shard_bits;
    if (row.size() <= index) row.resize(index + 1);
    row[index] = true;
  }
  for (uint32_t shard = number; shard < config.shards; shard += parts)
    restore_shard(shards[shard], used[shard]);
  for (size_t at = 0; at < own.size(); ++at) {
    prefetch_for(candidates, own, at);
    const Candidate& candidate = candidates[own[at]];
    const Lock lock(shards[candidate.slot & shard_mask].mutex);
    if (adopt_entry(candidate, first_tick + own[at], part))
      kept.unchecked[candidates.size() - 1 - own[at]] = {candidate.slot, generation(candidate.slot)};
  }
}

void Store::Core::add_up(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    for (const auto& [tenant, use] : part.tenants) tenants.adopt(tenant, use.bytes, use.blocks);
    kept.held.insert(kept.held.end(), part.held.begin(), part.held.end());
    kept.found.blocks += part.blocks;
    kept.found.bytes += part.bytes;
    kept.found.refused += part.refused;
  }
  kept.found.held_blocks = kept.held.size();
  kept.held_blocks = kept.held.size();
}

void Store::Core::adopt_blocks() {
  const auto begin = std::chrono::steady_clock::now();
  for (WriterNumber number = 1; number <= kMaxWriters; ++number)
    writers.restore(number, catalogue.writer(number));
  std::vector<Part> parts(adopting_threads());
  std::vector<Candidate> candidates = read_catalogue(parts);
  add_up(parts);
  adopt_extents(candidates);
  // In the order of their last use: each is the hottest of its queue when it comes.
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.tick < b.tick; });
  constexpr std::pair<uint32_t, uint64_t> kNotAdopted{kNone, 0};
  kept.unchecked.assign(candidates.size(), kNotAdopted);
  const uint64_t first_tick = ticks.fetch_add(candidates.size());
  // The learnt policy hears of blocks in their order.
  std::vector<Part> by_shards(advisor ? 1 : parts.size());
  on_threads(by_shards, [&](uint32_t number, Part& part) {
    adopt_part(candidates, number, static_cast<uint32_t>(by_shards.size()), first_tick, part);
  });
  add_up(by_shards);
  std::erase(kept.unchecked, kNotAdopted);
  kept.left = kept.unchecked.size();
  kept.found.adopting_threads = static_cast<uint32_t>(parts.size());
  kept.found.adopt_us = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin)
          .count());
}

// How warm some of the blocks are, round after round: a read of a block need not write its record.
void Store::Core::note_uses() {
  constexpr uint32_t kEntries = 1024;  // of each shard
  bool more = false;
  for (uint32_t number = 0; number < config.shards; ++number) {
    Shard& shard = shards[number];
    const Lock lock(shard.mutex);
    const uint32_t end = std::min(shard.entries.size(), kept.next_noted + kEntries);
    for (uint32_t index = kept.next_noted; index < end; ++index) {
      const BlockEntry& entry = shard.entries[index];
      if (entry.state == State::kVisible)
        catalogue.note_use(slot_of(shard, index), entry.tick, static_cast<uint8_t>(entry.queue),
                           entry.writer);
    }
    more = more || end < shard.entries.size();
  }
  kept.next_noted = more ? kept.next_noted + kEntries : 0;
}

// False: it was damaged. A block that was removed or moved since is none of ours.
bool Store::check_kept(uint32_t slot, uint64_t generation) {
  Core::Shard& shard = core_->shards[slot & core_->shard_mask];
  const uint32_t index = slot >> core_->shard_bits;
  PinId pin{};
  ConstSlice bytes;
  uint32_t crc = 0;
  {
    const Core::Lock lock(shard.mutex);
    const Core::BlockEntry& entry = shard.entries[index];
    if (entry.state != State::kVisible || core_->generation(slot) != generation) return true;
    const auto pinned = core_->pin_entry(shard, index);
    if (!pinned) return true;  // no pins are left: its readers compare it
    pin = *pinned;
    bytes = core_->slice_of(entry);
    crc = entry.crc;
  }
  core_->kept.checked_blocks.fetch_add(1, std::memory_order_relaxed);
  core_->kept.checked_bytes.fetch_add(bytes.size, std::memory_order_relaxed);
  const bool same = crc32c({bytes.data, bytes.size}) == crc;
  if (!same) quarantine(pin);
  release(pin);
  return same;
}

KeptMemory Store::kept() const {
  return core_->kept.found;
}

KeptProgress Store::tend_kept(uint64_t max_bytes) {
  Core::KeptState& kept = core_->kept;
  const uint64_t until = kept.checked_bytes.load(std::memory_order_relaxed) + max_bytes;
  while (!kept.unchecked.empty() && kept.checked_bytes.load(std::memory_order_relaxed) < until) {
    const auto [slot, generation] = kept.unchecked.back();
    kept.unchecked.pop_back();
    if (!check_kept(slot, generation)) kept.damaged_blocks.fetch_add(1, std::memory_order_relaxed);
    kept.left.store(kept.unchecked.size(), std::memory_order_relaxed);
  }
  if (core_->catalogue.is_open()) core_->note_uses();
  const bool writable = std::any_of(core_->arenas.begin(), core_->arenas.end(), [&](const auto& arena) {
    return arena->memory->is_locked(1, core_->catalogue.session());
  });
  if (!kept.held.empty() && !writable) {
    for (const ReservationId id : kept.held) abort(id);
    kept.held.clear();
    kept.held_blocks.store(0, std::memory_order_relaxed);
  }
  return {kept.checked_blocks, kept.checked_bytes, kept.damaged_blocks, kept.left, kept.held_blocks};
}

}  // namespace mooncache
