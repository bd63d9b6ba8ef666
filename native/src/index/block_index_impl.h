// State of a BlockIndex. Locks, outermost first: `writers` (one change at a time, from its beginning
// to its end), `gate` (a waiting writer holds it, so a stream of readers cannot starve it), `mutex`.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "index/entry_pool.h"
#include "index/slot_table.h"
#include "mooncache/block_index.h"

namespace mooncache {

struct BlockIndex::Impl {
  using IndexEntry = index::IndexEntry;
  using Packed = index::Packed;

  // Every replica of the holder carries `epoch`, except during a full report, which flips it: then
  // `marked` replicas carry it and the others have not been reported again.
  struct Holder {
    IndexUsage usage;
    uint64_t marked = 0;
    bool epoch = false;
    bool full_open = false;
  };
  struct Record {
    uint8_t kind;
    uint8_t tier;
    TenantId tenant;
    uint64_t size_bytes;
    Key key;
  };

  // Blocks that are looked up together, so that their cache misses overlap.
  static constexpr size_t kGroup = 64;

  explicit Impl(BlockIndexOptions options_in);

  std::shared_lock<std::shared_mutex> read() const {
    const std::lock_guard hold(gate);
    return std::shared_lock(mutex);
  }
  std::unique_lock<std::shared_mutex> write() {
    const std::lock_guard hold(gate);
    return std::unique_lock(mutex);
  }

  uint64_t hash(TenantId tenant, const Key& key) const;
  uint32_t find(uint64_t hash_value, TenantId tenant, const Key& key) const {
    return table.find(hash_value, [&](uint32_t number) {
      const IndexEntry& entry = pool[number];
      return entry.key == key && entry.tenant == tenant;
    });
  }

  static Record decode(const std::byte* bytes);
  Status validate(uint32_t holder, std::span<const std::byte> records) const;
  void apply_group(uint32_t holder, const std::byte* bytes, size_t count);
  void put_replica(uint32_t holder, const Record& record, uint64_t hash_value);
  void remove_replica(uint32_t number, Packed* replica);
  IndexUsage& usage_of(TenantId tenant);

  // Visits up to `limit` replicas of the holder in bounded turns under the lock; `visit(number,
  // replica)` says whether it counted. The caller holds `writers`.
  template <typename Visit>
  void sweep(uint32_t holder, uint64_t limit, Visit visit);

  // Looks the keys up in groups; visit(i, entry or nullptr) returns false to stop. Needs the lock.
  template <typename Visit>
  void for_each_key(TenantId tenant, std::span<const std::byte> keys, Visit visit) const;

  std::string check_entries() const;
  std::string check_totals() const;

  const BlockIndexOptions options;
  index::SlotTable table;
  index::EntryPool pool;
  std::vector<Holder> holders;
  std::unordered_map<TenantId, IndexUsage> tenants;
  TenantId last_tenant = 0;  // records of one tenant come in runs
  IndexUsage* last_usage = nullptr;
  uint64_t replicas = 0;
  uint64_t bytes = 0;
  uint64_t records_applied = 0;

  std::mutex writers;
  mutable std::mutex gate;
  mutable std::shared_mutex mutex;
};

// Two 64 x 64 -> 128 multiplications fold the key; a secret seed keeps chosen keys
// from colliding on purpose.
inline uint64_t BlockIndex::Impl::hash(TenantId tenant, const Key& key) const {
  __extension__ using Wide = unsigned __int128;
  const auto fold = [](uint64_t a, uint64_t b) {
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  const uint64_t own = options.hash_seed;
  const uint64_t seed = own ^ tenant;
  const uint64_t a = fold(key.word(0) ^ seed ^ 0xa0761d6478bd642f, key.word(1) ^ own ^ 0xe7037ed1a0b428db);
  const uint64_t b = fold(key.word(2) ^ own ^ 0x8ebc6af09c88c6e3, key.word(3) ^ seed ^ 0x589965cc75374cc3);
  return fold(a ^ 0x1d8e4e27c47d124f, b ^ seed ^ 0xeb44accab455d165);
}

template <typename Visit>
void BlockIndex::Impl::for_each_key(TenantId tenant, std::span<const std::byte> keys, Visit visit) const {
  const size_t count = keys.size() / kKeyBytes;
  std::array<Key, kGroup> group;
  std::array<uint64_t, kGroup> hashes;
  for (size_t start = 0; start < count; start += kGroup) {
    const size_t size = std::min(kGroup, count - start);
    for (size_t i = 0; i < size; ++i) {
      std::memcpy(group[i].bytes.data(), keys.data() + (start + i) * kKeyBytes, kKeyBytes);
      hashes[i] = hash(tenant, group[i]);
      table.prefetch(hashes[i]);
    }
    for (size_t i = 0; i < size; ++i) {
      const uint32_t number = table.candidate(hashes[i]);
      if (number != index::kNoEntry) __builtin_prefetch(&pool[number]);
    }
    for (size_t i = 0; i < size; ++i) {
      const uint32_t number = find(hashes[i], tenant, group[i]);
      if (!visit(start + i, number == index::kNoEntry ? nullptr : &pool[number])) return;
    }
  }
}

}  // namespace mooncache
