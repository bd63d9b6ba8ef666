#include "store/reuse.h"

#include <algorithm>
#include <functional>

namespace mooncache::store {

namespace {

constexpr uint64_t kRefreshUses = 128;
constexpr uint32_t kExtendsBlocks = 2;  // what keeps all but so many blocks of the chain before extends it
constexpr uint32_t kForksMax = 1024;
constexpr uint64_t kValueUses = 16;
constexpr size_t kHeapSlack = 4;

uint64_t mixed(uint64_t id) {
  return id * 0x9e3779b97f4a7c15ull;
}

bool bit(std::span<const uint8_t> bits, size_t at) {
  return at / 8 < bits.size() && ((bits[at / 8] >> (at % 8)) & 1) != 0;
}

bool fail(std::string* why, const char* what) {
  *why = what;
  return false;
}

}  // namespace

Reuse::Reuse(ReuseLimits limits) : limits_(limits) {}

void Reuse::seen(std::span<const uint64_t> ids, double now_s, std::span<const uint8_t> here, uint64_t owner) {
  ++uses_;
  owner_ = owner;
  if (uses_ == limits_.start_uses) value_at_ = 0;  // another order
  if (uses_ % kRefreshUses == 0) hazard_.refresh();
  age(now_s);
  if (!ids.empty()) use_chain(ids, now_s);
  for (size_t at = 0; at < ids.size(); ++at) {
    if (bit(here, at)) stored(ids[at], now_s);
  }
  while (expected_count_ > kExpectedMax) drop(expected_.tail);
  if (heap_.size() > heap_max_) value_anew(now_s);
}

bool Reuse::stored(uint64_t id, double now_s) {
  const uint32_t index = find_place(id);
  if (index == kNone) return false;
  Place& place = places_[index];
  if (!place.expected) return true;
  take_out(index);
  place.expected = 0;
  insert(index);
  Chain& chain = chains_[place.next];
  if (chain.here == 1 || place.at >= chain.end) {  // it had none, or had lost its end
    chain.end = std::max(chain.end, uint32_t{place.at} + 1);
    note(place.next, now_s);
  }
  return true;
}

void Reuse::discard(uint64_t id) {
  const uint32_t index = find_place(id);
  if (index != kNone && !places_[index].expected) drop(index);
}

void Reuse::set_aside(uint64_t id) {
  const uint32_t index = find_place(id);
  if (index == kNone || places_[index].expected) return;
  take_out(index);
  expect(index);
}

bool Reuse::knows(uint64_t id) const {
  const uint32_t index = find_place(id);
  return index != kNone && !places_[index].expected;
}

// --- sessions ---

void Reuse::use_chain(std::span<const uint64_t> ids, double now_s) {
  const auto [known, before] = find_session(ids);
  if (before != kNone) chains_[before].held = true;
  const uint32_t shared = shared_blocks(ids, known);
  if (shared > 0) use_shared(ids.first(shared), now_s);
  Signals signals;
  signals.blocks = ids.size();
  signals.new_blocks = ids.size() - known;
  if (before != kNone) {
    if (known > shared) {
      signals.gap_s = now_s - chains_[before].used_s;
      signals.turn = continues(before, ids, known, now_s);
    }
    chains_[before].held = false;
    free_if_unused(before);
  }
  if (ids.size() > shared) {
    Chain chain;
    chain.number = 3 * uses_ + 2;
    chain.first = shared;
    chain.used_s = now_s;
    chain.turn = signals.turn;
    chain.klass = static_cast<uint16_t>(class_of(signals));
    own(chain, ids.subspan(shared));
  }
}

void Reuse::use_shared(std::span<const uint64_t> ids, double now_s) {
  const uint32_t before = last_use(ids.back());
  double gap_s = kSharedGapMaxS;
  if (before != kNone) {
    gap_s = now_s - chains_[before].used_s;
    if (chains_[before].klass >= kSharedClass) reused(chains_[before], now_s);
  }
  Chain chain;
  chain.number = 3 * uses_ + 1;
  chain.used_s = now_s;
  chain.klass = static_cast<uint16_t>(shared_class(gap_s));
  own(chain, ids);
}

// The chain that used the block last, as far as that is known.
uint32_t Reuse::last_use(uint64_t id) const {
  const uint32_t place = find_place(id);
  if (place != kNone) return places_[place].next;
  return remembered_.find(mixed(id), [&](uint32_t chain) { return chains_[chain].last_id == id; });
}

uint32_t Reuse::chain_that_expects(std::optional<uint64_t> id) const {
  const uint32_t place = id ? find_place(*id) : kNone;
  return place != kNone && places_[place].expected ? places_[place].next : kNone;
}

// How many leading blocks are known, and the chain that used the last of them last.
std::pair<uint32_t, uint32_t> Reuse::find_session(std::span<const uint64_t> ids) const {
  for (size_t known = ids.size(); known > 0; --known) {
    const uint32_t chain = last_use(ids[known - 1]);
    if (chain != kNone) return {static_cast<uint32_t>(known), chain};
  }
  return {0, kNone};
}

// Blocks at the beginning that other sessions use too.
uint32_t Reuse::shared_blocks(std::span<const uint64_t> ids, uint32_t known) {
  for (uint32_t at = known; at-- > 0;) {
    const uint32_t fork = find_fork(ids[at]);
    if (fork == kNone) continue;
    unlink<kPrevious, kNext>(recent_forks_, forks_, fork);
    push_front<kPrevious, kNext>(recent_forks_, forks_, fork);
    return at + 1;
  }
  return 0;
}

void Reuse::note_fork(uint64_t id) {
  if (find_fork(id) != kNone) return;
  const auto id_of = [&](uint32_t fork) { return mixed(forks_[fork].id); };
  const uint32_t added = forks_.allocate();
  forks_[added].id = id;
  forks_by_id_.insert(mixed(id), added, id_of);
  push_front<kPrevious, kNext>(recent_forks_, forks_, added);
  if (forks_.used() <= kForksMax) return;
  const uint32_t oldest = recent_forks_.tail;
  forks_by_id_.erase(mixed(forks_[oldest].id), oldest, id_of);
  unlink<kPrevious, kNext>(recent_forks_, forks_, oldest);
  forks_.release(oldest);
}

// The session goes on after `known` blocks of `before`; the turn this is.
uint32_t Reuse::continues(uint32_t index, std::span<const uint64_t> ids, uint32_t known, double now_s) {
  Chain& before = chains_[index];
  if (before.has_fork)
    note_fork(before.fork_id);  // left behind and used after all: sessions share its beginning
  reused(before, now_s);
  const bool extends = known + kExtendsBlocks > before.first + before.length;
  if (!extends && !before.has_fork) {
    before.has_fork = true;
    before.fork_id = ids[known - 1];
    before.waits = true;  // for a use of what it left behind
  }
  if (before.klass != kLeftClass) {
    before.klass = kLeftClass;
    if (before.here > 0) note(index, now_s);
  }
  return extends ? before.turn + 1 : std::max(before.turn, 2u);
}

void Reuse::reused(Chain& chain, double now_s) {
  if (!chain.waits) return;
  chain.waits = false;
  const double age_s = now_s - chain.used_s;
  const size_t band = band_of(age_s);
  hazard_.reused(chain.klass, band, age_s - kBandBeginS[band]);
}

// --- chains that are learnt from ---

void Reuse::push(Band& band, uint32_t chain) {
  chains_[chain].next = kNone;
  (band.tail == kNone ? band.head : chains_[band.tail].next) = chain;
  band.tail = chain;
}

uint32_t Reuse::pop(Band& band) {
  const uint32_t chain = band.head;
  band.head = chains_[chain].next;
  if (band.head == kNone) band.tail = kNone;
  return chain;
}

void Reuse::remember(uint32_t index) {
  const uint64_t id = chains_[index].last_id;
  const auto id_of = [&](uint32_t chain) { return mixed(chains_[chain].last_id); };
  const uint32_t there =
      remembered_.find(mixed(id), [&](uint32_t chain) { return chains_[chain].last_id == id; });
  if (there != kNone) remembered_.erase(mixed(id), there, id_of);
  remembered_.insert(mixed(id), index, id_of);
  push(ageing_[0], index);
  if (++ageing_count_ <= limits_.chains_max) return;
  for (size_t band = kBands; band-- > 0;) {
    if (ageing_[band].head == kNone) continue;
    forget(pop(ageing_[band]));
    return;
  }
}

// It was taken out of its band.
void Reuse::forget(uint32_t index) {
  --ageing_count_;
  const uint64_t id = chains_[index].last_id;
  const uint32_t there = remembered_.find(mixed(id), [&](uint32_t chain) { return chain == index; });
  if (there != kNone)
    remembered_.erase(mixed(id), index, [&](uint32_t chain) { return mixed(chains_[chain].last_id); });
  chains_[index].learnt_from = false;
  free_if_unused(index);
}

// Chains that came into another band of age: not used in the one before.
void Reuse::age(double now_s) {
  for (size_t band = 0; band + 1 < kBands; ++band) {
    const double end_s = kBandBeginS[band + 1], seconds = end_s - kBandBeginS[band];
    while (ageing_[band].head != kNone && now_s - chains_[ageing_[band].head].used_s >= end_s) {
      const uint32_t index = pop(ageing_[band]);
      const Chain& chain = chains_[index];
      if (chain.waits) hazard_.waited(chain.klass, band, seconds);
      if (chain.waits && band + 2 < kBands) {
        push(ageing_[band + 1], index);
      } else {
        forget(index);
      }
    }
  }
}

// --- blocks ---

uint32_t Reuse::find_place(uint64_t id) const {
  return by_id_.find(mixed(id), [&](uint32_t place) { return places_[place].id == id; });
}

uint32_t Reuse::find_fork(uint64_t id) const {
  return forks_by_id_.find(mixed(id), [&](uint32_t fork) { return forks_[fork].id == id; });
}

// Makes the blocks the chain's own: those that are here, and the others when they come.
void Reuse::own(Chain chain, std::span<const uint64_t> ids) {
  const uint32_t index = chains_.allocate();
  if (index == kNone) return;  // billions of bytes of chains: it stays unknown
  chain.owner = owner_;
  chain.length = static_cast<uint32_t>(ids.size());
  chain.end = chain.first + chain.length;
  chain.last_id = ids.back();
  chain.learnt_from = true;
  chains_[index] = chain;
  for (size_t at = 0; at < ids.size(); ++at)
    own_block(index, ids[at], chain.first + static_cast<uint32_t>(at));
  if (chains_[index].here > 0) note(index, chain.used_s);
  remember(index);
}

void Reuse::own_block(uint32_t chain, uint64_t id, uint32_t at) {
  uint32_t index = find_place(id);
  bool here = false;
  if (index == kNone) {
    index = places_.allocate();
    if (index == kNone) return;
    places_[index].id = id;
    by_id_.insert(mixed(id), index, [&](uint32_t place) { return mixed(places_[place].id); });
  } else {
    here = !places_[index].expected;
    take_out(index);
    free_if_unused(places_[index].next);
  }
  Place& place = places_[index];
  place.next = chain;
  place.at = at & 0x7fffffffu;
  place.expected = 0;
  if (here) {
    insert(index);
  } else {
    expect(index);
  }
}

// Blocks come in order most of the time: at the end of the list, or at its beginning.
void Reuse::insert(uint32_t index) {
  Place& place = places_[index];
  Chain& chain = chains_[place.next];
  ++chain.here;
  uint32_t above = kNone, below = chain.places.head;
  if (chain.places.tail != kNone && places_[chain.places.tail].at > place.at) {
    above = chain.places.tail;
    below = kNone;
  }
  while (below != kNone && places_[below].at > place.at) {
    above = below;
    below = places_[below].links[kNext];
  }
  place.links[kPrevious] = above;
  place.links[kNext] = below;
  (above == kNone ? chain.places.head : places_[above].links[kNext]) = index;
  (below == kNone ? chain.places.tail : places_[below].links[kPrevious]) = index;
}

// Out of the list that it is in.
void Reuse::take_out(uint32_t index) {
  const Place& place = places_[index];
  Chain& chain = chains_[place.next];
  if (place.expected) {
    --chain.expected;
    --expected_count_;
    unlink<kPrevious, kNext>(expected_, places_, index);
  } else {
    --chain.here;
    unlink<kPrevious, kNext>(chain.places, places_, index);
  }
}

void Reuse::expect(uint32_t index) {
  Place& place = places_[index];
  place.expected = 1;
  ++chains_[place.next].expected;
  ++expected_count_;
  push_front<kPrevious, kNext>(expected_, places_, index);
}

void Reuse::drop(uint32_t index) {
  take_out(index);
  const uint32_t chain = places_[index].next;
  by_id_.erase(mixed(places_[index].id), index, [&](uint32_t place) { return mixed(places_[place].id); });
  places_.release(index);
  free_if_unused(chain);
}

void Reuse::free_if_unused(uint32_t index) {
  Chain& chain = chains_[index];
  if (chain.here > 0 || chain.expected > 0 || chain.learnt_from || chain.held) return;
  chain.number = 0;
  chains_.release(index);
}

// --- victims ---

double Reuse::worth_of(const Chain& chain, double now_s) const {
  return worth_of(chain, now_s, chain.end - chain.first <= kHeadBlocks);
}

double Reuse::worth_of(const Chain& chain, double now_s, bool head) const {
  if (uses_ < limits_.start_uses) return chain.used_s;
  const double worth = hazard_.worth_of(chain.klass, now_s - chain.used_s);
  return head ? worth * kHeadFactor : worth;
}

bool Reuse::outdated(const Bid& bid) const {
  const Chain& chain = chains_[bid.chain];
  return chain.number != bid.number || chain.here == 0 || chain.klass != bid.klass;
}

void Reuse::note(uint32_t index, double now_s) {
  const Chain& chain = chains_[index];
  heap_.push_back({worth_of(chain, now_s), chain.number, index, chain.klass});
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

void Reuse::pop_bid() {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  heap_.pop_back();
}

// Worths move with age; often enough when it is done once in a sixteenth of the chains' number of uses.
void Reuse::value_anew(double now_s) {
  size_t live = 0;
  for (size_t at = 0; at < heap_.size(); ++at) {
    const Bid bid = heap_[at];
    if (outdated(bid) || chains_[bid.chain].held) continue;
    chains_[bid.chain].held = true;  // it has its bid
    heap_[live++] = {worth_of(chains_[bid.chain], now_s), bid.number, bid.chain, bid.klass};
  }
  heap_.resize(live);
  for (const Bid& bid : heap_) chains_[bid.chain].held = false;
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  value_at_ = uses_ + std::max<uint64_t>(kValueUses, live / 16);
  heap_max_ = 2 * live + kHeapMin;
}

std::optional<Reuse::Victim> Reuse::victim(double now_s, std::optional<uint64_t> incoming) {
  // Without uses only bids pile up: of chains that were set aside and came back.
  if (uses_ >= value_at_ || heap_.size() > kHeapSlack * heap_max_) value_anew(now_s);
  const uint32_t own = chain_that_expects(incoming);
  std::optional<Bid> aside;
  std::optional<Victim> found;
  while (!heap_.empty() && !found) {
    const Bid bid = heap_.front();
    if (outdated(bid)) {
      pop_bid();
    } else if (bid.chain != own) {
      found = last_of(bid.chain, bid.worth, now_s);
    } else {  // one of its bids is kept
      if (!aside) aside = bid;
      pop_bid();
    }
  }
  if (!aside) return found;
  heap_.push_back(*aside);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  return found ? found : last_of(aside->chain, aside->worth, now_s);
}

// The chain's last block; none when it has none behind its head: that is worth more than its bid says, and is
// noted anew.
std::optional<Reuse::Victim> Reuse::last_of(uint32_t index, double worth, double now_s) {
  Chain& chain = chains_[index];
  const uint32_t head_end = chain.first + kHeadBlocks;
  const uint32_t floor = chain.end > head_end ? head_end : chain.first;
  const Place& last = places_[chain.places.head];
  if (last.at >= floor) {
    chain.end = uint32_t{last.at} + 1;
    return Victim{last.id, worth};
  }
  chain.end = floor;
  if (!heap_.empty() && heap_.front().chain == index) pop_bid();
  note(index, now_s);
  return std::nullopt;
}

// --- for tests and Store::check ---

uint64_t Reuse::memory_bytes() const {
  return sizeof *this + hazard_.memory_bytes() + places_.memory_bytes() + by_id_.memory_bytes() +
         chains_.memory_bytes() + remembered_.memory_bytes() + forks_.memory_bytes() +
         forks_by_id_.memory_bytes() + heap_.capacity() * sizeof(Bid);
}

bool Reuse::check_chain(uint32_t index, std::string* why) const {
  const Chain& chain = chains_[index];
  if (chain.held) return fail(why, "a chain is held by no call");
  if (chain.here == 0 && chain.expected == 0 && !chain.learnt_from) return fail(why, "an unused chain");
  uint32_t here = 0, above = kNone;
  uint64_t limit = chain.end;
  for (uint32_t at = chain.places.head; at != kNone; above = at, at = places_[at].links[kNext]) {
    const Place& place = places_[at];
    if (place.expected || place.next != index || place.links[kPrevious] != above)
      return fail(why, "a place in the wrong chain");
    if (place.at >= limit || place.at < chain.first) return fail(why, "positions of a chain's places");
    if (find_place(place.id) != at) return fail(why, "a place is not in the index");
    limit = place.at;
    ++here;
  }
  if (here != chain.here || chain.places.tail != above) return fail(why, "a chain's count of places");
  return true;
}

bool Reuse::check(std::string* why) const {
  uint64_t here = 0, expected = 0, used = 0, ageing = 0;
  std::vector<bool> noted(chains_.size());
  for (const Bid& bid : heap_) {
    if (!outdated(bid)) noted[bid.chain] = true;
  }
  for (uint32_t index = 0; index < chains_.size(); ++index) {
    const Chain& chain = chains_[index];
    if (chain.number == 0) continue;
    if (!check_chain(index, why)) return false;
    if (chain.here > 0 && !noted[index]) return fail(why, "a chain with blocks has no bid");
    ++used;
    here += chain.here;
    expected += chain.expected;
    ageing += chain.learnt_from ? 1 : 0;
  }
  uint64_t listed = 0;
  for (uint32_t at = expected_.head; at != kNone; at = places_[at].links[kNext]) {
    if (!places_[at].expected) return fail(why, "an owned place is expected");
    ++listed;
  }
  if (used != chains_.used() || ageing != ageing_count_) return fail(why, "count of chains");
  if (listed != expected_count_ || expected != listed) return fail(why, "count of expected places");
  if (here != blocks() || by_id_.count() != places_.used()) return fail(why, "count of places");
  if (remembered_.count() > ageing_count_ || ageing_count_ > limits_.chains_max)
    return fail(why, "count of remembered chains");
  return true;
}

}  // namespace mooncache::store
