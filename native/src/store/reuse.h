// Eviction by the hits that blocks will still bring: policy "mooncache". The idea and the reasons are in
// services/simulate/cache/reuse.py; both make the same decisions, bit for bit (tests/native/test_reuse.py).
//
// Sessions use ever longer chains. Each use makes a Chain, which owns the blocks of the request as far as
// they are here; the victim is the end of the chain that is worth least now. Blocks that were asked for and
// are not here are expected: when one comes, the chain that asked for it last owns it. Who stores blocks
// calls
//   seen       a chain was asked for (and which of its blocks are here),
//   stored     a block is here now; false when no chain of it is known: then it stays unknown,
//   discard    a block is gone,
//   victim     which block should go next; it stays until discard() or set_aside(),
//   set_aside  that block cannot go now: counts as gone until stored(),
//   next_victims  which blocks will go after it, while nothing else happens; changes nothing.
// No clock (now_s never falls), no randomness, no exceptions but bad_alloc, not thread-safe.
//
// Invariants (check()): a place is owned or expected, never both; owned places are in their chain's list by
// falling position and lie before its `end`; every chain with owned places has an entry in the heap; a chain
// that owns nothing, expects nothing and is not learnt from is free.
//
// Memory: a known block 24 B and 5-9 B in the index; a chain 88 B and up to 2 x 24 B in the heap; a chain
// that is learnt from 5-9 B more. Chains are at most blocks here + kExpectedMax + chains_max. Tables 250 KB.
// Nothing is allocated per block or chain once the tables have grown.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "store/eviction.h"
#include "store/reuse_hazard.h"
#include "store/slab.h"
#include "store/slot_index.h"

namespace mooncache::store {

struct ReuseLimits {
  uint32_t chains_max = 1u << 16;  // chains that are learnt from at one time
  uint64_t start_uses = 512;       // uses during which age alone decides
};

class Reuse {
 public:
  struct Victim {
    uint64_t id = 0;
    double worth = 0;  // hits per second that it may still bring; while age decides: its last use
  };
  struct NextVictim {
    uint64_t id = 0;
    double chance = 0;  // that it is used again in the next two hours
  };
  // Which victims are asked for.
  struct Which {
    std::optional<uint64_t> incoming;  // none of the chain that this block belongs to
    std::optional<uint64_t> owner;     // none of other owners
  };
  static constexpr uint32_t kExpectedMax = 1u << 13;
  // Chains of all owners that are looked at for the victims of one.
  static constexpr uint32_t kOwnerLooks = 1024;

  explicit Reuse(ReuseLimits limits = {});
  Reuse(const Reuse&) = delete;
  Reuse& operator=(const Reuse&) = delete;
  // `here`: bit at % 8 of byte at / 8 says that ids[at] is stored; bits that are missing are 0.
  // `owner`: whose chain it is.
  void seen(std::span<const uint64_t> ids, double now_s, std::span<const uint8_t> here = {},
            uint64_t owner = 0);
  bool stored(uint64_t id, double now_s);
  void discard(uint64_t id);
  void set_aside(uint64_t id);
  // The last block of the chain that is worth least. `incoming` is the block that room is made for: its own
  // chain gives nothing unless no other can.
  std::optional<Victim> victim(double now_s, std::optional<uint64_t> incoming = {});

  // Appends `limit` of them at most, the first one first.
  void next_victims(double now_s, uint32_t limit, std::vector<NextVictim>& out, const Which& which) const;
  void next_victims(double now_s, uint32_t limit, std::vector<NextVictim>& out) const {
    next_victims(now_s, limit, out, {});
  }

  bool knows(uint64_t id) const;
  uint32_t blocks() const { return places_.used() - expected_count_; }
  uint32_t chains() const { return chains_.used(); }
  uint64_t memory_bytes() const;
  bool check(std::string* why) const;

 private:
  struct Place {
    uint64_t id = 0;
    uint32_t next = kNone;  // free chain; while in use: the chain that used the block last
    uint32_t at : 31 = 0;   // position in the whole chain
    uint32_t expected : 1 = 0;
    uint32_t links[2] = {kNone, kNone};  // in the chain's list, or in that of all expected places
  };
  struct Chain {
    uint64_t number = 0;  // running: the older chain has the lower one; 0 = free
    uint64_t owner = 0;
    double used_s = 0;
    uint64_t last_id = 0;   // its last block
    uint64_t fork_id = 0;   // the block after which the session went another way
    uint32_t next = kNone;  // free chain; while it is learnt from: the next in its band of age
    uint32_t first = 0;     // position of its first block
    uint32_t length = 0;
    uint32_t end = 0;
    uint32_t here = 0;      // places it owns
    uint32_t expected = 0;  // places it expects
    uint32_t turn = 1;
    EntryList places;  // highest position at the head
    uint16_t klass = 0;
    bool waits = true;  // not used again yet
    bool has_fork = false;
    bool learnt_from = false;
    bool held = false;  // of a call that still needs it
  };
  struct Bid {
    double worth;
    uint64_t number;
    uint32_t chain;
    uint16_t klass;
    bool operator>(const Bid& other) const {
      if (worth != other.worth) return worth > other.worth;
      return number != other.number ? number > other.number : klass > other.klass;
    }
  };
  struct Fork {
    uint64_t id = 0;
    uint32_t next = kNone;
    uint32_t links[2] = {kNone, kNone};
  };
  struct Band {  // chains by their last use, oldest first
    uint32_t head = kNone;
    uint32_t tail = kNone;
  };

  uint32_t find_place(uint64_t id) const;
  uint32_t find_fork(uint64_t id) const;
  uint32_t last_use(uint64_t id) const;
  uint32_t chain_that_expects(std::optional<uint64_t> id) const;
  std::pair<uint32_t, uint32_t> find_session(std::span<const uint64_t> ids) const;
  uint32_t shared_blocks(std::span<const uint64_t> ids, uint32_t known);
  void note_fork(uint64_t id);
  void use_chain(std::span<const uint64_t> ids, double now_s);
  void use_shared(std::span<const uint64_t> ids, double now_s);
  uint32_t continues(uint32_t before, std::span<const uint64_t> ids, uint32_t known, double now_s);
  void reused(Chain& chain, double now_s);

  void age(double now_s);
  void remember(uint32_t chain);
  void forget(uint32_t chain);
  void push(Band& band, uint32_t chain);
  uint32_t pop(Band& band);

  void own(Chain chain, std::span<const uint64_t> ids);
  void own_block(uint32_t chain, uint64_t id, uint32_t at);
  void insert(uint32_t place);  // into its chain's list
  void take_out(uint32_t place);
  void expect(uint32_t place);  // newest
  void drop(uint32_t place);
  void free_if_unused(uint32_t chain);

  double worth_of(const Chain& chain, double now_s) const;
  double worth_of(const Chain& chain, double now_s, bool head) const;
  bool outdated(const Bid& bid) const;
  void note(uint32_t chain, double now_s);
  void pop_bid();
  void value_anew(double now_s);
  std::optional<Victim> last_of(uint32_t chain, double worth, double now_s);
  bool check_chain(uint32_t chain, std::string* why) const;

  static constexpr uint32_t kHeadBlocks = 10;  // of a chain; they are worth more
  static constexpr double kHeadFactor = 1.15;
  static constexpr uint32_t kPrevious = 0, kNext = 1;  // of Place::links

  ReuseLimits limits_;
  Hazard hazard_;
  Slab<Place, 64> places_{SlotIndex::kMaxEntries};
  SlotIndex by_id_;
  Slab<Chain, 32> chains_{SlotIndex::kMaxEntries};
  SlotIndex remembered_;  // chains that are learnt from, by their last block
  EntryList expected_;    // newest at the head
  uint32_t expected_count_ = 0;
  Band ageing_[kBands];
  uint32_t ageing_count_ = 0;
  Slab<Fork, 32> forks_;  // blocks after which several sessions go on
  SlotIndex forks_by_id_;
  EntryList recent_forks_;
  std::vector<Bid> heap_;  // least worth on top; some are out of date
  uint64_t uses_ = 0;
  uint64_t owner_ = 0;  // of the call that is under way
  uint64_t value_at_ = 0;
  static constexpr size_t kHeapMin = 1024;
  size_t heap_max_ = kHeapMin;
};

}  // namespace mooncache::store
