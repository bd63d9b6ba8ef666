// Many threads on one small store: readers race eviction and removal and must never see foreign bytes;
// a fuzzy snapshot taken meanwhile plus the events after its start is the exact state.
#include <atomic>
#include <thread>

#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

void churn(Store& store, uint64_t seed, int steps, std::atomic<uint64_t>& wrong) {
  std::mt19937_64 random(seed);
  for (int step = 0; step < steps; ++step) {
    const uint64_t number = random() % 200;
    const uint64_t now_ms = static_cast<uint64_t>(step);
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
        (void)put(store, number, 100 + number * 13 % 3000, now_ms);
        break;
      case 3:
        (void)store.remove(kTenant, key_of(number), RemoveReason::kRemoved, now_ms);
        break;
      case 4: {
        const std::vector<Key> keys = {key_of(number), key_of(number + 1), key_of(number + 2)};
        (void)store.match(kTenant, keys, true, now_ms);
        (void)store.pin(kTenant, key_of(number), 5, now_ms);
        break;
      }
      default: {
        const auto pinned = store.acquire(kTenant, key_of(number), now_ms);
        if (!pinned) break;
        const ConstSlice bytes = store.readable(pinned->id);
        const bool same =
            store.pin_info(pinned->id, now_ms)->extent.generation == pinned->info.extent.generation;
        if (!holds(bytes, number) || crc32c({bytes.data, bytes.size}) != pinned->info.crc32c || !same)
          ++wrong;
        store.release(pinned->id);
      }
    }
  }
}

class StoreThreads : public ::testing::TestWithParam<const char*> {};

TEST_P(StoreThreads, ReadersNeverSeeForeignBytes) {
  auto config = small_config(64 * 1024);
  config.correlated_ms = 3;
  config.eviction = GetParam();
  auto store = open_store(config);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed)
    threads.emplace_back([&, seed] { churn(*store, seed, 8000, wrong); });
  for (int round = 0; round < 20; ++round) {
    EXPECT_SOUND(*store);
    (void)store->stats();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_GT(store->stats().removed[1], 0u);
  EXPECT_SOUND(*store);
}

// Sessions that grow on several threads, while blocks are pinned, removed and evicted under them.
void talk(Store& store, uint64_t seed, int turns) {
  std::mt19937_64 random(seed);
  std::vector<Key> chain;
  std::vector<PinId> pins;
  for (int turn = 0; turn < turns; ++turn) {
    const uint64_t now_ms = static_cast<uint64_t>(turn) * 700;
    if (chain.size() > 40 || random() % 9 == 0) chain.clear();
    if (chain.empty()) chain.push_back(key_of(random() % 3));  // beginnings that all threads share
    for (uint64_t grown = random() % 6; grown-- > 0;) chain.push_back(key_of(random() % 1500));
    const MatchResult match = store.match(kTenant, chain, true, now_ms);
    for (uint32_t at = 0; at < match.leading_run; ++at) {
      if (auto pinned = store.acquire(kTenant, chain[at], now_ms)) pins.push_back(pinned->id);
    }
    for (const Key& key : chain) {
      const auto reservation = store.reserve(kTenant, key, 64 + random() % 200, now_ms);
      if (reservation)
        (void)store.commit(reservation->id, fill(store.writable(reservation->id), seed), now_ms);
    }
    if (random() % 4 == 0) (void)store.remove(kTenant, chain.back(), RemoveReason::kRemoved, now_ms);
    if (random() % 4 == 0) (void)store.pin(kTenant, chain[0], 2'000, now_ms);
    while (pins.size() > random() % 30) {
      store.release(pins.back());
      pins.pop_back();
    }
  }
  for (const PinId pin : pins) store.release(pin);
}

TEST_P(StoreThreads, ChainsOfManySessions) {
  auto config = small_config(64 * 1024);
  config.eviction = GetParam();
  auto store = open_store(config);
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) threads.emplace_back([&, seed] { talk(*store, seed, 1500); });
  for (int round = 0; round < 20; ++round) {
    EXPECT_SOUND(*store);
    (void)store->stats();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(store->stats().removed[1], 1000u);
  EXPECT_SOUND(*store);
}

TEST_P(StoreThreads, SnapshotPlusEventsConverges) {
  auto config = small_config(64 * 1024);
  config.eviction = GetParam();
  config.event_log_capacity = 1 << 18;
  auto store = open_store(config);
  for (uint64_t number = 0; number < 50; ++number) ASSERT_EQ(put(*store, number, 100, 0), Code::kOk);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed)
    threads.emplace_back([&, seed] { churn(*store, 100 + seed, 6000, wrong); });
  const uint64_t base = store->event_seq();
  Believed believed;
  uint64_t cursor = 0;
  do {
    const SnapshotPage page = store->snapshot(cursor, 5);
    apply_records(believed, page.records);
    cursor = page.next_cursor;
    std::this_thread::yield();
  } while (cursor != 0);
  for (std::thread& thread : threads) thread.join();
  for (;;) {
    EventBatch batch = store->drain_events(1000);
    ASSERT_FALSE(batch.overflow);
    if (batch.records.empty()) break;
    const uint64_t skip = batch.first_seq > base ? 0
                                                 : std::min(base + 1 - batch.first_seq,
                                                            batch.records.size() / kBlockRecordBytes);
    batch.records.erase(batch.records.begin(),
                        batch.records.begin() + static_cast<ptrdiff_t>(skip * kBlockRecordBytes));
    apply_records(believed, batch.records);
  }
  Believed real;
  cursor = 0;
  do {
    const SnapshotPage page = store->snapshot(cursor, 1000);
    apply_records(real, page.records);
    cursor = page.next_cursor;
  } while (cursor != 0);
  EXPECT_EQ(believed, real);
  EXPECT_EQ(real.size(), store->stats().blocks);
}

INSTANTIATE_TEST_SUITE_P(Policies, StoreThreads, ::testing::Values("2q", "lru", "mooncache"),
                         [](const auto& policy) { return std::string("policy_") + policy.param; });

}  // namespace
}  // namespace mooncache::test
