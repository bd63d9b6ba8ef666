// Victims that are looked for: of one tenant, by the eviction policy; and for a block that comes up from a
// disk, what lies below the memory already, within the coldest blocks.
#include "store/victims.h"

#include <algorithm>
#include <vector>

#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::Loss;
using store::State;

namespace {

constexpr uint32_t kLooksForAny = 256;  // of each shard, where all of the coldest ones are under way
constexpr int kRoundsMax = 4;           // other threads may take what was chosen
// Of those that have blocks of a tenant, the next ones in turn: keys spread evenly, so that the coldest
// blocks of these are about as cold as those of all.
constexpr uint32_t kShardsAsked = 16;
constexpr uint32_t kAdvisedForPut = 8;

template <typename Victims>
void sort_coldest_first(Victims& victims) {
  std::sort(victims.begin(), victims.end(), [](const auto& a, const auto& b) { return a.tick < b.tick; });
}

}  // namespace

// The shard is locked.
store::Loss Store::Core::loss_of(const BlockEntry& entry) const {
  if (entry.demoting != 0) return Loss::kUnderWay;
  const store::disk::SsdTier* disks = below.load(std::memory_order_acquire);
  if (disks == nullptr) return Loss::kBlock;
  if (disks->find(entry.tenant, entry.key) || disks->find_of_others(entry.tenant, entry.key))
    return Loss::kNothing;
  return disks->is_being_written(entry.tenant, entry.key) ? Loss::kUnderWay : Loss::kBlock;
}

// The shard is locked. For a put it does not matter where else a block lies.
void Store::Core::add_victim(const Shard& shard, uint32_t index, const Pressure& pressure,
                             std::vector<Victim>& out) const {
  const BlockEntry& entry = shard.entries[index];
  out.push_back({slot_of(shard, index), entry.tick, pressure.comes_up ? loss_of(entry) : Loss::kBlock});
}

bool Store::Core::any_can_go(const std::vector<Victim>& victims) {
  return std::any_of(victims.begin(), victims.end(),
                     [](const Victim& victim) { return victim.loss != Loss::kUnderWay; });
}

// From the tails of all shards, the coldest tail first.
void Store::Core::coldest_of_queue(Queue queue, const Pressure& pressure, std::vector<Victim>& out) const {
  const auto number = static_cast<size_t>(queue);
  std::vector<std::pair<uint64_t, uint32_t>> tails;
  for (uint32_t at = 0; at < config.shards; ++at) {
    const uint64_t tick = cold[number][at].load(std::memory_order_relaxed);
    if (tick != kNever) tails.emplace_back(tick, at);
  }
  std::sort(tails.begin(), tails.end());
  for (const bool any : {false, true}) {
    for (const auto& [tick, at] : tails) {
      if (out.size() >= store::kMostLooks && any_can_go(out)) break;
      const Shard& shard = shards[at];
      const Lock lock(shard.mutex);
      const uint32_t most = any ? kLooksForAny : store::looks_of_shard(shard.count.visible);
      uint32_t index = shard.queues[number].tail;
      for (uint32_t looks = 0; index != kNone && looks < most; ++looks) {
        add_victim(shard, index, pressure, out);
        if (out.size() == 1 && out[0].loss == Loss::kNothing) return;  // the coldest of all
        if (any && any_can_go(out)) break;
        index = shard.entries[index].links[store::kQueuePrevious];
      }
      if (any && any_can_go(out)) break;
    }
    if (any_can_go(out)) break;
    out.clear();
  }
  sort_coldest_first(out);
}

// The coldest block of the queue, when it lies below already. That is what most reads from a disk find, so it
// costs no list of candidates and one look into the disk's index. False: the candidates have to be compared.
bool Store::Core::evict_coldest_below(Queue queue, Pressure& pressure) {
  const auto [tick, number] = coldest(static_cast<size_t>(queue));
  if (number == kNone) return false;
  Shard& shard = shards[number];
  const Lock lock(shard.mutex);
  const uint32_t tail = shard.queues[static_cast<size_t>(queue)].tail;
  if (tail == kNone || shard.entries[tail].tick != tick || loss_of(shard.entries[tail]) != Loss::kNothing)
    return false;
  evict_entry(shard, tail, pressure);
  return true;
}

// In the policy's order; of the chain of the block that room is made for only when there is no other. What is
// read now is set aside until it can go. The first one is enough most of the time, and a list of them is long
// to make.
void Store::Core::next_advised(std::optional<TenantId> tenant, const Pressure& pressure,
                               std::vector<Victim>& out) {
  for (const uint32_t most : {1u, pressure.comes_up ? store::kMostLooks : kAdvisedForPut}) {
    out.clear();
    if (next_advised(tenant, pressure, most, out)) return;
  }
}

// False: among more than `most` there may be a better one.
bool Store::Core::next_advised(std::optional<TenantId> tenant, const Pressure& pressure, uint32_t most,
                               std::vector<Victim>& out) {
  std::vector<store::Reuse::NextVictim> next;
  advisor->next_victims(most, pressure.now_ms, next, {pressure.incoming, tenant});
  if (next.empty()) advisor->next_victims(most, pressure.now_ms, next, {{}, tenant});
  for (const auto& [id, chance] : next) {
    Shard& shard = shard_of(id);
    const Lock lock(shard.mutex);
    const uint32_t index = find_hash(shard, id);
    if (index == kNone) {
      advisor->discard(id);
      continue;
    }
    BlockEntry& entry = shard.entries[index];
    if (entry.linked == 0) {
      advisor->set_aside(id);
      entry.aside = 1;
      continue;
    }
    add_victim(shard, index, pressure, out);
    if (out.size() == 1 && (!pressure.comes_up || out[0].loss == Loss::kNothing)) return true;
  }
  return next.empty();
}

// What was chosen is looked at once more under its lock: it may have been read, or be on its way down, since.
bool Store::Core::evict_first_to_go(std::vector<Victim>& coldest, Pressure& pressure, bool for_quota) {
  std::vector<Loss> losses;
  for (const Victim& victim : coldest) losses.push_back(victim.loss);
  while (const auto at = store::first_to_go(losses)) {
    const Victim chosen = coldest[*at];
    Shard& shard = shards[chosen.slot & shard_mask];
    const Lock lock(shard.mutex);
    const uint32_t index = chosen.slot >> shard_bits;
    const BlockEntry& entry = shard.entries[index];
    const bool same = entry.state == State::kVisible && entry.linked != 0 && entry.tick == chosen.tick;
    if (same && (!pressure.comes_up || loss_of(entry) == chosen.loss)) {
      shard.count.evicted_quota += for_quota ? 1 : 0;
      evict_entry(shard, index, pressure);
      return true;
    }
    losses[*at] = Loss::kUnderWay;
  }
  return false;
}

bool Store::Core::evict_end(Shard& shard, uint32_t tail, uint32_t previous, Pressure& pressure) {
  if (tail == kNone) return false;
  if (!pressure.comes_up) {
    evict_entry(shard, tail, pressure);
    return true;
  }
  std::vector<uint32_t> coldest;
  std::vector<Loss> losses;
  for (uint32_t index = tail; index != kNone && losses.size() < store::kMostLooks;
       index = shard.entries[index].links[previous]) {
    coldest.push_back(index);
    losses.push_back(loss_of(shard.entries[index]));
  }
  const auto at = store::first_to_go(losses);
  if (at) evict_entry(shard, coldest[*at], pressure);
  return at.has_value();
}

// The queues lose in the same order as for a put (evict_advised(), evict_coldest()).
bool Store::Core::evict_for_read(Pressure& pressure) {
  std::vector<Victim> next;
  for (int round = 0; round < kRoundsMax; ++round) {
    next.clear();
    if (advisor) next_advised({}, pressure, next);
    const bool is_chained =
        !next.empty() && coldest(static_cast<size_t>(Queue::kProbation)).first >= next.front().tick;
    if (is_chained && evict_first_to_go(next, pressure)) return true;
    auto queue = store::victim_queue(rules, queue_bytes[0].load(std::memory_order_relaxed),
                                     queue_bytes[1].load(std::memory_order_relaxed));
    for (int turn = 0; turn < 2; ++turn) {
      if (evict_coldest_below(queue, pressure)) return true;
      next.clear();
      coldest_of_queue(queue, pressure, next);
      if (evict_first_to_go(next, pressure)) return true;
      queue = queue == Queue::kProbation ? Queue::kProtected : Queue::kProbation;
    }
  }
  return false;
}

Store::Core::OfTenant Store::Core::coldest_of_tenant(TenantId tenant, const Pressure& pressure) {
  OfTenant found;
  const uint32_t first = rotation.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t step = 0, asked = 0; step < config.shards && asked < kShardsAsked; ++step) {
    const Shard& shard = shards[(first + step) & shard_mask];
    const Lock lock(shard.mutex);
    const auto own = shard.tenant_queues.find(tenant);
    if (own == shard.tenant_queues.end()) continue;
    ++asked;
    for (size_t queue = 0; queue < store::kQueues; ++queue) {
      found.bytes[queue] += own->second.bytes[queue];
      const uint32_t most = pressure.comes_up ? store::looks_of_shard(own->second.blocks[queue]) : 1;
      uint32_t index = own->second.lists[queue].tail;
      for (uint32_t looks = 0; index != kNone && looks < most; ++looks) {
        add_victim(shard, index, pressure, found.coldest[queue]);
        index = shard.entries[index].links[store::kTenantPrevious];
      }
    }
  }
  for (auto& coldest : found.coldest) sort_coldest_first(coldest);
  return found;
}

// As the policy would choose if the tenant had the memory for itself.
bool Store::Core::evict_of_tenant(TenantId tenant, Pressure& pressure) {
  std::vector<Victim> next;
  for (int round = 0; round < kRoundsMax; ++round) {
    OfTenant found = coldest_of_tenant(tenant, pressure);
    const auto& probation = found.coldest[static_cast<size_t>(Queue::kProbation)];
    next.clear();
    if (advisor) next_advised(tenant, pressure, next);
    const bool is_chained =
        !next.empty() && (probation.empty() || probation.front().tick >= next.front().tick);
    if (is_chained && evict_first_to_go(next, pressure, true)) return true;
    const auto queue = static_cast<size_t>(store::victim_queue(rules, found.bytes[0], found.bytes[1]));
    if (evict_first_to_go(found.coldest[queue], pressure, true) ||
        evict_first_to_go(found.coldest[1 - queue], pressure, true))
      return true;
    if (found.bytes[0] + found.bytes[1] == 0) return false;
  }
  return false;
}

}  // namespace mooncache
