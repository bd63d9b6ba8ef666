// Every invariant of the index, recomputed from the entries.
#include <map>
#include <set>

#include "index/block_index_impl.h"

namespace mooncache {

// Slots lead to distinct used entries with the right hash; every used entry has a slot; replicas are
// packed, sorted where they must be, and no holder appears twice.
std::string BlockIndex::Impl::check_entries() const {
  std::vector<bool> reached(pool.high_water());
  std::string why;
  const bool reachable = table.for_each([&](size_t shard, index::SlotTable::Slot slot) {
    const uint32_t number = slot.entry - 1;
    if (number >= reached.size() || reached[number]) {
      why = "a slot leads nowhere or two lead to one entry";
      return;
    }
    reached[number] = true;
    const IndexEntry& entry = pool[number];
    const uint64_t value = hash(entry.tenant, entry.key);
    if (!entry.replicas[0].used()) why = "a slot leads to an entry without replicas";
    if ((value & 0xff) != shard || value >> 32 != slot.tag) why = "a slot does not fit the hash of its entry";
    if (find(value, entry.tenant, entry.key) != number) why = "an entry is not found under its key";
  });
  if (!reachable) return "a slot is not reachable from its home, or a shard's count is wrong";
  if (!why.empty()) return why;
  std::set<uint32_t> lists;
  for (uint32_t number = 0; number < pool.high_water(); ++number) {
    const IndexEntry& entry = pool[number];
    if (entry.replicas[0].used() != reached[number]) return "an entry is used but in no slot";
    if (!reached[number]) continue;
    if (entry.replicas[0].is_list() || entry.replicas[1].is_list()) return "a list stands in the wrong place";
    if (!entry.replicas[1].used() && entry.replicas[2].used()) return "replicas are not packed";
    if (entry.replicas[2].is_list()) {
      const uint32_t list = entry.replicas[2].list_number();
      if (!lists.insert(list).second) return "two entries share a list";
      const auto& items = pool.list(list);
      if (items.size() < 2) return "a list is shorter than two";
      for (size_t i = 1; i < items.size(); ++i) {
        if (items[i - 1].holder() >= items[i].holder()) return "a list is not sorted";
      }
    }
    std::set<uint32_t> seen;
    bool twice = false;
    pool.for_each(entry, [&](Packed replica) { twice |= !seen.insert(replica.holder()).second; });
    if (twice) return "a holder appears twice in an entry";
  }
  return lists.size() == pool.list_count() ? "" : "a list belongs to no entry";
}

std::string BlockIndex::Impl::check_totals() const {
  std::map<TenantId, IndexUsage> by_tenant;
  std::vector<Holder> by_holder(holders.size());
  uint64_t total_replicas = 0;
  uint64_t total_bytes = 0;
  std::string why;
  for (uint32_t number = 0; number < pool.high_water(); ++number) {
    const IndexEntry& entry = pool[number];
    if (!entry.replicas[0].used()) continue;
    IndexUsage& tenant = by_tenant[entry.tenant];
    ++tenant.blocks;
    pool.for_each(entry, [&](Packed replica) {
      if (replica.holder() >= holders.size()) {
        why = "a replica names an unknown holder";
        return;
      }
      const Holder& known = holders[replica.holder()];
      Holder& holder = by_holder[replica.holder()];
      if (replica.epoch() == known.epoch) {
        holder.marked += known.full_open ? 1 : 0;
      } else if (!known.full_open) {
        why = "a replica has the wrong epoch outside of a full report";
      }
      ++holder.usage.blocks;
      ++total_replicas;
      holder.usage.bytes += replica.size_bytes();
      tenant.bytes += replica.size_bytes();
      total_bytes += replica.size_bytes();
    });
  }
  if (!why.empty()) return why;
  for (size_t i = 0; i < holders.size(); ++i) {
    if (holders[i].usage != by_holder[i].usage) return "usage of a holder is wrong";
    if (holders[i].marked != by_holder[i].marked) return "marks of a holder's full report are miscounted";
  }
  if (by_tenant != std::map<TenantId, IndexUsage>(tenants.begin(), tenants.end()))
    return "usage of a tenant is wrong";
  if (total_replicas != replicas || total_bytes != bytes) return "totals are wrong";
  return "";
}

std::string BlockIndex::check() const {
  const auto lock = impl_->read();
  std::string why = impl_->check_entries();
  return why.empty() ? impl_->check_totals() : why;
}

}  // namespace mooncache
