// Questions to the index: locate, match, present, usage.
#include <algorithm>
#include <cstring>

#include "index/block_index_impl.h"

namespace mooncache {
namespace {

Status keys_status(std::span<const std::byte> keys) {
  if (keys.size() % kKeyBytes == 0) return Status::ok();
  return {Code::kInvalidArgument, "keys must be whole: their length is not a multiple of 32 bytes"};
}

template <typename Id>
void sort_by_id(std::vector<std::pair<Id, IndexUsage>>& list) {
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
}

}  // namespace

Result<std::vector<std::vector<BlockReplica>>> BlockIndex::locate(TenantId tenant,
                                                                  std::span<const std::byte> keys,
                                                                  uint32_t holders_max) const {
  if (Status status = keys_status(keys); !status) return status;
  std::vector<std::vector<BlockReplica>> found(keys.size() / kKeyBytes);
  const auto lock = impl_->read();
  impl_->for_each_key(tenant, keys, [&](size_t i, const Impl::IndexEntry* entry) {
    if (entry == nullptr) return true;
    impl_->pool.for_each(*entry, [&](Impl::Packed replica) {
      if (found[i].size() < holders_max) found[i].push_back(replica.unpack());
    });
    return true;
  });
  return found;
}

Result<std::vector<std::byte>> BlockIndex::locate_packed(TenantId tenant, std::span<const std::byte> keys,
                                                         uint32_t holders_max) const {
  if (Status status = keys_status(keys); !status) return status;
  const size_t limit = std::min(holders_max, kIndexHoldersMax);
  constexpr size_t kItemBytes = 12;
  // Written by offset into a vector that doubles: appending field by field costs more than the look-up.
  std::vector<std::byte> out(keys.size());
  size_t used = 0;
  const auto room_for = [&](size_t more) {
    if (out.size() - used < more) out.resize(std::max(out.size() * 2, used + more));
  };
  const auto lock = impl_->read();
  impl_->for_each_key(tenant, keys, [&](size_t, const Impl::IndexEntry* entry) {
    const size_t at = used;
    uint16_t count = 0;
    room_for(sizeof count);
    used += sizeof count;
    if (entry != nullptr) {
      impl_->pool.for_each(*entry, [&](Impl::Packed replica) {
        if (count == limit) return;
        ++count;
        room_for(kItemBytes);
        const uint64_t holder_and_tier = uint64_t{replica.holder()} | uint64_t{replica.tier()} << 16;
        const uint64_t size_bytes = replica.size_bytes();
        std::memcpy(out.data() + used, &holder_and_tier, 4);
        std::memcpy(out.data() + used + 4, &size_bytes, sizeof size_bytes);
        used += kItemBytes;
      });
    }
    std::memcpy(out.data() + at, &count, sizeof count);
    return true;
  });
  out.resize(used);
  return out;
}

Result<IndexMatch> BlockIndex::match(TenantId tenant, std::span<const std::byte> keys) const {
  if (Status status = keys_status(keys); !status) return status;
  // Place of a holder in `result.holders`, plus one. All zero between calls; only what the first key
  // set is cleared again, so the cost does not depend on how many holders there are.
  thread_local std::vector<uint32_t> place;
  IndexMatch result;
  const auto lock = impl_->read();
  if (place.size() < impl_->holders.size()) place.resize(impl_->holders.size());
  impl_->for_each_key(tenant, keys, [&](size_t i, const Impl::IndexEntry* entry) {
    if (entry == nullptr) return false;
    const auto position = static_cast<uint32_t>(i);
    ++result.leading_run;
    impl_->pool.for_each(*entry, [&](Impl::Packed replica) {
      const uint32_t holder = replica.holder();
      if (i == 0) {
        result.holders.push_back({holder, {}});
        place[holder] = static_cast<uint32_t>(result.holders.size());
      }
      if (place[holder] == 0) return;
      auto& runs = result.holders[place[holder] - 1].run_up_to_tier;
      for (size_t tier = replica.tier(); tier < kIndexTiers; ++tier) {
        if (runs[tier] == position) runs[tier] = position + 1;
      }
    });
    return true;
  });
  for (const HolderMatch& item : result.holders) place[item.holder] = 0;
  std::sort(result.holders.begin(), result.holders.end(), [](const HolderMatch& a, const HolderMatch& b) {
    if (a.leading_blocks() != b.leading_blocks()) return a.leading_blocks() > b.leading_blocks();
    return a.holder < b.holder;
  });
  return result;
}

Result<std::vector<std::byte>> BlockIndex::present(TenantId tenant, std::span<const std::byte> keys) const {
  if (Status status = keys_status(keys); !status) return status;
  std::vector<std::byte> bitmap((keys.size() / kKeyBytes + 7) / 8);
  const auto lock = impl_->read();
  impl_->for_each_key(tenant, keys, [&](size_t i, const Impl::IndexEntry* entry) {
    if (entry != nullptr) bitmap[i / 8] |= std::byte{1} << (i % 8);
    return true;
  });
  return bitmap;
}

std::vector<std::pair<TenantId, IndexUsage>> BlockIndex::tenant_usage() const {
  const auto lock = impl_->read();
  std::vector<std::pair<TenantId, IndexUsage>> list;
  for (const auto& [tenant, usage] : impl_->tenants) {
    if (usage.blocks != 0) list.emplace_back(tenant, usage);
  }
  sort_by_id(list);
  return list;
}

std::vector<std::pair<uint32_t, IndexUsage>> BlockIndex::holder_usage() const {
  const auto lock = impl_->read();
  std::vector<std::pair<uint32_t, IndexUsage>> list;
  for (uint32_t holder = 0; holder < impl_->holders.size(); ++holder) {
    if (impl_->holders[holder].usage.blocks != 0) list.emplace_back(holder, impl_->holders[holder].usage);
  }
  return list;
}

IndexStats BlockIndex::stats() const {
  const Impl& impl = *impl_;
  const auto lock = impl.read();
  IndexStats stats;
  stats.blocks = impl.table.size();
  stats.replicas = impl.replicas;
  stats.bytes = impl.bytes;
  stats.records_applied = impl.records_applied;
  stats.popular_blocks = impl.pool.list_count();
  stats.memory_bytes = sizeof(Impl) + impl.table.memory_bytes() + impl.pool.memory_bytes() +
                       impl.holders.capacity() * sizeof(Impl::Holder) +
                       impl.tenants.size() * (sizeof(TenantId) + sizeof(IndexUsage) + 2 * sizeof(void*)) +
                       impl.tenants.bucket_count() * sizeof(void*);
  return stats;
}

}  // namespace mooncache
