// The audit: which blocks have fewer copies than they should, or copies that one failure would take together.
// It goes through the entries by their numbers, so it can stop anywhere and go on later: a block that comes
// behind its back is found the next time round.
#include <algorithm>

#include "index/block_index_impl.h"

namespace mooncache {
namespace {

// Entries looked at in one turn under the shared lock.
constexpr uint32_t kAuditTurn = 32 << 10;

uint32_t wanted_of(const IndexAudit& audit, TenantId tenant) {
  const auto at = std::lower_bound(audit.wanted.begin(), audit.wanted.end(), tenant,
                                   [](const auto& item, TenantId id) { return item.first < id; });
  return at != audit.wanted.end() && at->first == tenant ? at->second : audit.wanted_of_others;
}

// The copies of one block that count.
struct Copies {
  static constexpr uint32_t kDomainsMax = 16;  // more than that is never asked for

  void add(index::Packed replica, uint32_t domain) {
    if (count == 0) size_bytes = replica.size_bytes();
    tier = std::min<uint32_t>(tier, replica.tier());
    ++count;
    const auto* end = domains.data() + domain_count;
    if (domain_count < kDomainsMax && std::find<const uint32_t*>(domains.data(), end, domain) == end) {
      domains[domain_count++] = domain;
    }
  }

  uint32_t count = 0;
  uint32_t domain_count = 0;
  uint32_t tier = kIndexTiers - 1;
  uint64_t size_bytes = 0;
  std::array<uint32_t, kDomainsMax> domains{};
};

}  // namespace

AuditPage BlockIndex::audit(const IndexAudit& audit, uint32_t start, uint32_t entries_max,
                            size_t found_max) const {
  const Impl& impl = *impl_;
  AuditPage page;
  uint32_t number = start;
  for (uint32_t left = entries_max; left > 0;) {
    const auto lock = impl.read();
    if (number >= impl.pool.high_water()) return page;
    const uint32_t end = number + std::min({kAuditTurn, left, impl.pool.high_water() - number});
    left -= end - number;
    for (; number < end; ++number) {
      const Impl::IndexEntry& entry = impl.pool[number];
      if (!entry.replicas[0].used()) continue;
      const uint32_t wanted = wanted_of(audit, entry.tenant);
      if (wanted < 2) continue;
      Copies copies;
      impl.pool.for_each(entry, [&](Impl::Packed replica) {
        const uint32_t holder = replica.holder();
        if (holder < audit.domains.size() && audit.domains[holder] != kNoDomain) {
          copies.add(replica, audit.domains[holder]);
        }
      });
      if (copies.count == 0) continue;  // nothing that lasts: whoever empties its node takes care of it
      const bool is_short = copies.count < wanted;
      if (!is_short && copies.domain_count >= std::min(wanted, audit.domain_count)) continue;
      if (is_short) {
        page.short_blocks += 1;
        page.missing_bytes += copies.size_bytes * (wanted - copies.count);
      } else {
        page.close_blocks += 1;
        page.close_bytes += copies.size_bytes;
      }
      if (found_max == 0) continue;
      page.found.push_back({entry.tenant, entry.key, copies.size_bytes, static_cast<uint16_t>(copies.count),
                            static_cast<Tier>(copies.tier), !is_short});
      if (page.found.size() == found_max) {
        page.next = number + 1;
        return page;
      }
    }
  }
  page.next = number;
  return page;
}

}  // namespace mooncache
