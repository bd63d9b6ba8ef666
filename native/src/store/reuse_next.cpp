// Which blocks go next, as far as that is known now.
#include <functional>
#include <queue>
#include <unordered_set>

#include "store/reuse.h"

namespace mooncache::store {

// A walk over the heap in the order of its bids: a bid's children come after it. What lies behind a chain's
// head goes with its bid; the head is worth more and comes later, as victim() would note it anew.
void Reuse::next_victims(double now_s, uint32_t limit, std::vector<NextVictim>& out,
                         const Which& which) const {
  const uint32_t own = chain_that_expects(which.incoming);
  struct Look {
    double worth;
    uint64_t number;
    size_t at;  // in the heap; kHead: the head of a chain
    uint32_t chain;
    bool operator>(const Look& other) const {
      return worth != other.worth ? worth > other.worth : number > other.number;
    }
  };
  constexpr size_t kHead = ~size_t{0};
  std::priority_queue<Look, std::vector<Look>, std::greater<>> looks;
  const auto look_at = [&](size_t at) {
    if (at < heap_.size()) looks.push({heap_[at].worth, heap_[at].number, at, heap_[at].chain});
  };
  std::unordered_set<uint32_t> listed;  // a chain may have several bids
  const size_t end = out.size() + limit;
  look_at(0);
  const uint64_t most_looks = which.owner ? kOwnerLooks : 4ull * limit + 64;
  for (uint64_t looks_left = most_looks; !looks.empty() && out.size() < end && looks_left > 0; --looks_left) {
    const Look look = looks.top();
    looks.pop();
    const Chain& chain = chains_[look.chain];
    const bool head = look.at == kHead;
    if (!head) {
      look_at(2 * look.at + 1);
      look_at(2 * look.at + 2);
      if (look.chain == own || (which.owner && chain.owner != *which.owner)) continue;
      if (outdated(heap_[look.at]) || !listed.insert(look.chain).second) continue;
    }
    const uint32_t head_end = chain.first + kHeadBlocks;
    const bool all = head || chain.end <= head_end;
    const double chance = hazard_.chance_of(chain.klass, now_s - chain.used_s);
    for (uint32_t at = chain.places.head; at != kNone && out.size() < end; at = places_[at].links[kNext]) {
      const bool in_head = places_[at].at < head_end;
      if (in_head && !all) {
        looks.push({worth_of(chain, now_s, true), chain.number, kHead, look.chain});
        break;
      }
      if (in_head || !head) out.push_back({places_[at].id, chance});
    }
  }
}

}  // namespace mooncache::store
