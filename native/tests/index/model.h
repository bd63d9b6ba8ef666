// The slow, obvious index that the real one is compared with, and a maker of packed records.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "mooncache/block_index.h"
#include "mooncache/bytes.h"

namespace mooncache {

struct TestRecord {
  uint8_t kind = kRecordAdd;
  uint8_t tier = 1;
  TenantId tenant = 1;
  uint64_t size_bytes = 0;
  Key key;
};

inline std::vector<std::byte> pack(const std::vector<TestRecord>& records) {
  Writer writer;
  for (const TestRecord& record : records) {
    writer.u8(record.kind);
    writer.u8(record.tier);
    writer.u16(0);
    writer.u32(0);
    writer.u64(record.tenant);
    writer.u64(record.size_bytes);
    writer.key(record.key);
  }
  return writer.take();
}

inline Key test_key(uint64_t number) {
  Key key;
  std::memcpy(key.bytes.data() + 24, &number, sizeof number);  // what a user's own keys may look like
  return key;
}

inline std::vector<std::byte> pack_keys(const std::vector<Key>& keys) {
  Writer writer;
  for (const Key& key : keys) writer.key(key);
  return writer.take();
}

class ModelIndex {
 public:
  using BlockId = std::pair<TenantId, Key>;

  void apply(uint32_t holder, const std::vector<TestRecord>& records) {
    for (const TestRecord& record : records) {
      const BlockId id{record.tenant, record.key};
      if (record.kind == kRecordRemove) {
        erase(id, holder);
        if (full_.contains(holder)) full_[holder].erase(id);
      } else {
        blocks_[id][holder] = {static_cast<uint16_t>(holder), static_cast<Tier>(record.tier),
                               record.size_bytes};
        if (full_.contains(holder)) full_[holder].insert(id);
      }
    }
  }
  void begin_full(uint32_t holder) { full_[holder].clear(); }
  bool full_open(uint32_t holder) const { return full_.contains(holder); }
  uint64_t end_full(uint32_t holder) {
    const std::set<BlockId> reported = full_[holder];
    full_.erase(holder);
    return erase_if(holder, [&](const BlockId& id) { return !reported.contains(id); });
  }
  uint64_t drop_holder(uint32_t holder) {
    full_.erase(holder);
    return erase_if(holder, [](const BlockId&) { return true; });
  }

  std::vector<BlockReplica> locate(TenantId tenant, const Key& key) const {
    std::vector<BlockReplica> list;
    const auto found = blocks_.find({tenant, key});
    if (found == blocks_.end()) return list;
    for (const auto& [holder, replica] : found->second) list.push_back(replica);
    return list;
  }

  // holder -> leading run in tier t or faster, for every t; holders without the first key are left out
  std::map<uint32_t, std::array<uint32_t, kIndexTiers>> match(TenantId tenant,
                                                              const std::vector<Key>& keys) const {
    std::map<uint32_t, std::array<uint32_t, kIndexTiers>> runs;
    if (keys.empty()) return runs;
    for (const BlockReplica& first : locate(tenant, keys[0])) {
      auto& run = runs[first.holder];
      for (size_t tier = 0; tier < kIndexTiers; ++tier) {
        for (const Key& key : keys) {
          const auto replicas = locate(tenant, key);
          const bool held = std::any_of(replicas.begin(), replicas.end(), [&](const BlockReplica& replica) {
            return replica.holder == first.holder && static_cast<size_t>(replica.tier) <= tier;
          });
          if (!held) break;
          ++run[tier];
        }
      }
    }
    return runs;
  }

  std::map<TenantId, IndexUsage> tenant_usage() const {
    std::map<TenantId, IndexUsage> usage;
    for (const auto& [id, replicas] : blocks_) {
      ++usage[id.first].blocks;
      for (const auto& [holder, replica] : replicas) usage[id.first].bytes += replica.size_bytes;
    }
    return usage;
  }
  std::map<uint32_t, IndexUsage> holder_usage() const {
    std::map<uint32_t, IndexUsage> usage;
    for (const auto& [id, replicas] : blocks_) {
      for (const auto& [holder, replica] : replicas) {
        ++usage[holder].blocks;
        usage[holder].bytes += replica.size_bytes;
      }
    }
    return usage;
  }
  size_t size() const { return blocks_.size(); }

 private:
  bool erase(const BlockId& id, uint32_t holder) {
    const auto found = blocks_.find(id);
    if (found == blocks_.end() || found->second.erase(holder) == 0) return false;
    if (found->second.empty()) blocks_.erase(found);
    return true;
  }
  template <typename Unwanted>
  uint64_t erase_if(uint32_t holder, Unwanted unwanted) {
    std::vector<BlockId> doomed;
    for (const auto& [id, replicas] : blocks_) {
      if (replicas.contains(holder) && unwanted(id)) doomed.push_back(id);
    }
    for (const BlockId& id : doomed) erase(id, holder);
    return doomed.size();
  }

  std::map<BlockId, std::map<uint32_t, BlockReplica>> blocks_;
  std::map<uint32_t, std::set<BlockId>> full_;
};

}  // namespace mooncache
