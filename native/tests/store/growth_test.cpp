// The index and the memory of evicted keys grow in small steps, and nothing gets lost on the way.
#include <unordered_map>

#include "store/shard.h"
#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

using store::kNone;

uint64_t scrambled(uint64_t number) {
  number = (number ^ (number >> 31)) * 0x9e3779b97f4a7c15ull;
  return (number ^ (number >> 29)) * 0xbf58476d1ce4e5b9ull;
}

// The index over entries whose hashes it asks for, against a plain map.
class CountedIndex {
 public:
  explicit CountedIndex(uint64_t seed) : random_(seed) {}

  void insert() {
    const auto entry = static_cast<uint32_t>(hashes_.size());
    hashes_.push_back(scrambled(random_()));
    places_[entry] = live_.size();
    live_.push_back(entry);
    asked_ = 0;
    index_.insert(hashes_[entry], entry, [this](uint32_t at) { return ++asked_, hashes_[at]; });
    longest_ = std::max(longest_, asked_);
  }
  void erase() {
    if (live_.empty()) return;
    const size_t at = random_() % live_.size();
    const uint32_t entry = live_[at];
    index_.erase(hashes_[entry], entry, [this](uint32_t other) { return hashes_[other]; });
    places_[live_.back()] = at;
    live_[at] = live_.back();
    live_.pop_back();
    places_.erase(entry);
  }
  bool whole() const {
    for (uint32_t entry = 0; entry < hashes_.size(); ++entry) {
      const uint32_t found = index_.find(hashes_[entry], [entry](uint32_t at) { return at == entry; });
      if (found != (places_.contains(entry) ? entry : kNone)) return false;
    }
    return index_.count() == live_.size();
  }
  bool growing() const { return index_.growing(); }
  void reserve(uint32_t entries) { index_.reserve(entries); }
  size_t size() const { return live_.size(); }
  uint64_t longest() const { return longest_; }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64 random_;
  store::SlotIndex index_;
  std::vector<uint64_t> hashes_;
  std::vector<uint32_t> live_;
  std::unordered_map<uint32_t, size_t> places_;
  uint64_t asked_ = 0, longest_ = 0;
};

TEST(Growth, NoInsertMovesMoreThanAFewEntries) {
  CountedIndex index(1);
  for (int count = 0; count < 300'000; ++count) index.insert();
  EXPECT_TRUE(index.whole());
  // A table at seven eighths has runs of neighbours, hence more than the eight cells of one step.
  EXPECT_LT(index.longest(), 3'000u) << "one insert waited for the whole table";
}

TEST(Growth, TheIndexIsWholeWhileItGrows) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    CountedIndex index(seed);
    int seen_growing = 0;
    while (index.size() < 3'000) {
      const bool was_growing = index.growing();
      index.random()() % 4 == 0 ? index.erase() : index.insert();
      if (!index.growing() && !was_growing) continue;
      ++seen_growing;
      if (seen_growing % 8 == 0) {
        ASSERT_TRUE(index.whole()) << "seed " << seed << ", " << index.size();
      }
    }
    EXPECT_GT(seen_growing, 500);
    while (index.size() > 0) index.erase();
    EXPECT_TRUE(index.whole());
  }
}

TEST(Growth, AnIndexWithRoomDoesNotGrow) {
  for (const uint32_t entries : {1u, 14u, 15u, 5'000u}) {
    CountedIndex index(entries);
    index.reserve(entries);
    for (uint32_t count = 0; count < entries; ++count) {
      index.insert();
      ASSERT_FALSE(index.growing()) << count << " of " << entries;
    }
    EXPECT_TRUE(index.whole());
    for (int more = 0; more < 200; ++more) index.insert();  // and behind that it grows as ever
    EXPECT_TRUE(index.whole());
  }
}

TEST(Growth, GhostsRememberWhileTheyGrow) {
  store::Ghosts ghosts;
  std::vector<uint32_t> prints;
  bool grew = false;
  for (uint32_t number = 1; number <= 40'000; ++number) {
    prints.push_back(static_cast<uint32_t>(scrambled(number) >> 16) | 1u);
    // Room for many times more than it holds: no row overflows, so that nothing may be forgotten.
    ghosts.remember(prints.back(), 64 + uint64_t{number} * 64);
    grew = grew || ghosts.growing();
    if (number % 997 != 0) continue;
    for (const uint32_t print : prints) ASSERT_TRUE(ghosts.contains(print)) << number;
  }
  EXPECT_TRUE(grew);
  for (const uint32_t print : prints) {
    ghosts.forget(print);
    EXPECT_FALSE(ghosts.contains(print));
  }
}

TEST(Growth, TheStoreIsSoundAllTheWay) {
  for (const char* eviction : {"2q", "lru", "mooncache"}) {
    StoreConfig config = small_config(4'000 * 64);
    config.eviction = eviction;
    config.shards = 1;
    auto store = open_store(config);
    // Twice as many as there is room for: the second half evicts, and ghosts grow.
    for (uint64_t number = 0; number < 8'000; ++number) {
      ASSERT_EQ(put(*store, number, 64, number), Code::kOk);
      if (number % 101 == 0) EXPECT_SOUND(*store);
    }
    EXPECT_EQ(store->stats().blocks, 4'000u);
  }
}

// The slot of a neighbour may hold another block by the time its lock is taken.
TEST(Growth, OnlyTheBlockThatLiesInTheWayIsEvictedForIt) {
  store::BlockEntry entry;
  entry.state = store::State::kVisible;
  entry.linked = 1;
  entry.arena = 1;
  entry.offset = 40;
  EXPECT_TRUE(store::is_victim_at(entry, 1, 40));
  EXPECT_FALSE(store::is_victim_at(entry, 1, 48));
  EXPECT_FALSE(store::is_victim_at(entry, 0, 40));
  entry.linked = 0;
  EXPECT_FALSE(store::is_victim_at(entry, 1, 40));
}

}  // namespace
}  // namespace mooncache::test
