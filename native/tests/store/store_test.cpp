// One behaviour per test: visibility, pins, reservations, eviction, quotas, events, descriptors.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

TEST(Store, BlockIsInvisibleUntilCommit) {
  auto store = open_store(small_config(1 << 16));
  auto reservation = store->reserve(kTenant, key_of(1), 1000, 5);
  ASSERT_TRUE(reservation);
  EXPECT_EQ(reservation->extent.generation % 2, 1u);
  EXPECT_FALSE(present(*store, 1));
  const uint32_t crc = fill(store->writable(reservation->id), 1);
  ASSERT_TRUE(store->commit(reservation->id, crc, 5));
  EXPECT_EQ(store->commit(reservation->id, crc, 5).code, Code::kReservationUnknown);
  EXPECT_EQ(store->writable(reservation->id).data, nullptr);
  auto pinned = store->acquire(kTenant, key_of(1), 9);
  ASSERT_TRUE(pinned);
  EXPECT_EQ(pinned->info.crc32c, crc);
  EXPECT_EQ(pinned->info.age_ms, 4u);
  EXPECT_EQ(pinned->info.hits, 1u);
  EXPECT_EQ(pinned->info.extent.generation % 2, 0u);
  EXPECT_TRUE(holds(store->readable(pinned->id), 1));
  EXPECT_FALSE(store->acquire(kTenant + 1, key_of(1), 9));
  EXPECT_SOUND(*store);
  store->release(pinned->id);
  store->release(pinned->id);
  EXPECT_EQ(store->readable(pinned->id).data, nullptr);
  EXPECT_EQ(store->stats().pins, 0u);
  EXPECT_SOUND(*store);
}

TEST(Store, RefusalsAreCodes) {
  auto config = small_config(1 << 16);
  config.max_block_bytes = 4096;
  auto store = open_store(config);
  EXPECT_EQ(store->reserve(kTenant, key_of(1), 0, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(store->reserve(kTenant, key_of(1), 4097, 0).code(), Code::kTooLarge);
  EXPECT_EQ(put(*store, 1, 10, 0), Code::kOk);
  EXPECT_EQ(put(*store, 1, 10, 0), Code::kAlreadyExists);
  store->set_draining(true);
  EXPECT_EQ(put(*store, 2, 10, 0), Code::kDraining);
  EXPECT_TRUE(present(*store, 1));
  config.quantum_bytes = 100;
  EXPECT_EQ(Store::open(config).code(), Code::kConfigInvalid);
  EXPECT_EQ(store->remove(kTenant, key_of(9), RemoveReason::kRemoved, 0), Code::kNotFound);
  store->abort(ReservationId{~uint64_t{0}});
  store->release(PinId{~uint64_t{0}});
  EXPECT_SOUND(*store);
}

TEST(Store, FirstCommitOfARaceWins) {
  auto store = open_store(small_config(1 << 16));
  auto one = store->reserve(kTenant, key_of(1), 100, 0);
  auto two = store->reserve(kTenant, key_of(1), 100, 0);
  ASSERT_TRUE(one && two);
  EXPECT_TRUE(store->commit(two->id, fill(store->writable(two->id), 2), 0));
  EXPECT_EQ(store->commit(one->id, fill(store->writable(one->id), 1), 0).code, Code::kAlreadyExists);
  EXPECT_EQ(store->stats().used_bytes, 128u);
  auto pinned = store->acquire(kTenant, key_of(1), 0);
  ASSERT_TRUE(pinned);
  EXPECT_TRUE(holds(store->readable(pinned->id), 2));
  EXPECT_SOUND(*store);
}

TEST(Store, RemovedBlockLivesUntilItsLastRelease) {
  auto store = open_store(small_config(4096));
  ASSERT_EQ(put(*store, 1, 4096, 0), Code::kOk);
  auto first = store->acquire(kTenant, key_of(1), 0);
  auto second = store->acquire(kTenant, key_of(1), 0);
  EXPECT_EQ(store->remove(kTenant, key_of(1), RemoveReason::kRemoved, 0), Code::kOk);
  EXPECT_FALSE(present(*store, 1));
  EXPECT_EQ(put(*store, 2, 64, 0), Code::kNoSpace);
  store->release(first->id);
  EXPECT_TRUE(holds(store->readable(second->id), 1));
  EXPECT_EQ(store->pin_info(second->id, 0)->extent.generation, second->info.extent.generation);
  EXPECT_SOUND(*store);
  int calls = 0;
  store->set_space_callback([&] { ++calls; });
  store->release(second->id);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(put(*store, 2, 64, 0), Code::kOk);
  EXPECT_SOUND(*store);
}

TEST(Store, RetentionPinStopsEvictionUntilItsEnd) {
  auto store = open_store(small_config(1024));
  ASSERT_EQ(put(*store, 1, 1024, 0), Code::kOk);
  EXPECT_EQ(store->pin(kTenant, key_of(1), 100, 0), Code::kOk);
  EXPECT_EQ(put(*store, 2, 64, 99), Code::kNoSpace);
  EXPECT_EQ(store->remove(kTenant, key_of(1), RemoveReason::kRemoved, 99), Code::kPinned);
  EXPECT_EQ(store->pin(kTenant, key_of(1), 200, 0), Code::kOk);
  EXPECT_EQ(put(*store, 2, 64, 150), Code::kNoSpace);
  EXPECT_EQ(put(*store, 2, 1024, 200), Code::kOk);
  EXPECT_FALSE(present(*store, 1));
  EXPECT_EQ(store->pin(kTenant, key_of(2), 1000, 200), Code::kOk);
  EXPECT_EQ(store->pin(kTenant, key_of(2), 10, 200), Code::kOk);  // shortened
  EXPECT_EQ(put(*store, 3, 1024, 210), Code::kOk);
  EXPECT_EQ(store->pin(kTenant, key_of(3), 1000, 210), Code::kOk);
  EXPECT_EQ(store->unpin(kTenant, key_of(3)), Code::kOk);
  EXPECT_EQ(put(*store, 4, 1024, 211), Code::kOk);
  EXPECT_EQ(store->pin(kTenant, key_of(4), 1000, 211), Code::kOk);
  EXPECT_EQ(store->remove(kTenant, key_of(4), RemoveReason::kRemoved, 212, true), Code::kOk);
  EXPECT_EQ(store->pin(kTenant, key_of(4), 0, 0), Code::kInvalidArgument);
  EXPECT_SOUND(*store);
}

TEST(Store, ManyRepeatedPinsStayBounded) {
  auto store = open_store(small_config(1 << 16));
  for (uint64_t number = 0; number < 10; ++number) ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
  for (uint64_t step = 0; step < 5000; ++step) {
    ASSERT_EQ(store->pin(kTenant, key_of(step % 10), step % 2 == 0 ? 100000 : 50000, 0), Code::kOk);
    if (step % 7 == 0) {
      ASSERT_EQ(store->unpin(kTenant, key_of(step % 10)), Code::kOk);
    }
  }
  EXPECT_SOUND(*store);
}

TEST(Store, RangedWritesMustCoverExactly) {
  auto store = open_store(small_config(1 << 16));
  const auto write = [&](ReservationId id, uint64_t offset, uint64_t length) {
    const Slice slice = store->writable(id);
    const bool inside = offset <= slice.size && length <= slice.size - offset;
    const uint32_t crc = inside ? crc32c({slice.data + offset, length}) : 0;
    return store->note_written(id, offset, length, crc).code;
  };
  auto good = store->reserve(kTenant, key_of(1), 1000, 0);
  const uint32_t crc = fill(store->writable(good->id), 1);
  EXPECT_EQ(write(good->id, 600, 400), Code::kOk);
  EXPECT_EQ(write(good->id, 0, 100), Code::kOk);
  EXPECT_EQ(write(good->id, 100, 500), Code::kOk);
  EXPECT_TRUE(store->commit_written(good->id, crc, 0));
  auto hole = store->reserve(kTenant, key_of(2), 1000, 0);
  EXPECT_EQ(write(hole->id, 0, 999), Code::kOk);
  EXPECT_EQ(write(hole->id, 990, 10), Code::kInvalidArgument);
  EXPECT_EQ(write(hole->id, 990, 11), Code::kInvalidArgument);
  EXPECT_EQ(write(hole->id, ~uint64_t{0}, 2), Code::kInvalidArgument);
  EXPECT_EQ(store->commit_written(hole->id, 0, 0).code, Code::kIncomplete);
  EXPECT_EQ(store->commit_written(hole->id, 0, 0).code, Code::kReservationUnknown);
  auto wrong = store->reserve(kTenant, key_of(3), 1000, 0);
  EXPECT_EQ(write(wrong->id, 0, 1000), Code::kOk);
  EXPECT_EQ(store->commit_written(wrong->id, crc ^ 1u, 0).code, Code::kChecksumMismatch);
  auto damaged = store->reserve(kTenant, key_of(3), 1000, 0);
  const uint32_t damaged_crc = fill(store->writable(damaged->id), 3);
  EXPECT_EQ(write(damaged->id, 100, 800), Code::kOk);
  EXPECT_EQ(store->note_damaged(damaged->id, 0, 100).code, Code::kOk);
  EXPECT_EQ(store->note_damaged(damaged->id, 900, 100).code, Code::kOk);
  EXPECT_EQ(store->note_damaged(damaged->id, 900, 101).code, Code::kInvalidArgument);
  EXPECT_EQ(write(damaged->id, 0, 100), Code::kOk);
  EXPECT_EQ(write(damaged->id, 900, 100), Code::kOk);
  EXPECT_EQ(store->note_damaged(damaged->id, 999, 1).code, Code::kOk);
  EXPECT_EQ(store->commit_written(damaged->id, damaged_crc, 0).code, Code::kIncomplete);
  EXPECT_EQ(store->note_damaged(damaged->id, 0, 1).code, Code::kReservationUnknown);
  auto never = store->reserve(kTenant, key_of(4), 10, 0);
  EXPECT_EQ(store->commit_written(never->id, 0, 0).code, Code::kIncomplete);
  EXPECT_EQ(store->stats().reservations, 0u);
  EXPECT_EQ(store->stats().used_bytes, 1024u);
  EXPECT_SOUND(*store);
}

TEST(Store, QuarantineHidesAndChangesTheGeneration) {
  auto store = open_store(small_config(1 << 16));
  ASSERT_EQ(put(*store, 1, 100, 0), Code::kOk);
  EXPECT_EQ(store->flip_bit(kTenant, key_of(1), 13), Code::kOk);
  EXPECT_EQ(store->flip_bit(kTenant, key_of(1), 800), Code::kInvalidArgument);
  auto pinned = store->acquire(kTenant, key_of(1), 0);
  const ConstSlice bytes = store->readable(pinned->id);
  EXPECT_NE(crc32c({bytes.data, bytes.size}), pinned->info.crc32c);
  store->quarantine(pinned->id);
  EXPECT_FALSE(present(*store, 1));
  EXPECT_NE(store->pin_info(pinned->id, 0)->extent.generation, pinned->info.extent.generation);
  EXPECT_SOUND(*store);
  store->quarantine(pinned->id);
  store->release(pinned->id);
  EXPECT_EQ(store->stats().removed[3], 1u);
  EXPECT_EQ(store->stats().used_bytes, 0u);
  EXPECT_SOUND(*store);
}

TEST(Store, UnknownPoliciesAreRefused) {
  auto config = small_config(64 * 100);
  config.eviction = "fifo";
  EXPECT_EQ(Store::open(config).code(), Code::kConfigInvalid);
  config.eviction = "mooncache";
  config.eviction_speed = 0;
  EXPECT_EQ(Store::open(config).code(), Code::kConfigInvalid);
}

TEST(Store, LruEvictsTheColdestAndTailsBeforeHeads) {
  auto config = small_config(64 * 100);
  config.eviction = "lru";
  auto store = open_store(config);
  std::vector<Key> chain;
  for (uint64_t number = 0; number < 100; ++number) {
    ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
    chain.push_back(key_of(number));
  }
  const auto all = store->match(kTenant, chain, true, 1);
  EXPECT_EQ(all.leading_run, 100u);
  for (uint64_t number = 1000; number < 1030; ++number) ASSERT_EQ(put(*store, number, 64, 2), Code::kOk);
  const auto after = store->match(kTenant, chain, false, 3);
  EXPECT_EQ(after.leading_run, 70u);
  EXPECT_EQ(after.present, 70u);
  EXPECT_SOUND(*store);
}

std::vector<Key> keys_of(uint64_t first, uint64_t count) {
  std::vector<Key> keys;
  for (uint64_t number = first; number < first + count; ++number) keys.push_back(key_of(number));
  return keys;
}

std::unique_ptr<Store> open_for_chains(uint64_t blocks) {
  auto config = small_config(64 * blocks);
  config.eviction = "mooncache";
  config.shards = 1;
  return open_store(config);
}

void ask_and_put(Store& store, uint64_t first, uint64_t count, uint64_t now_ms) {
  (void)store.match(kTenant, keys_of(first, count), true, now_ms);
  for (uint64_t number = first; number < first + count; ++number) (void)put(store, number, 64, now_ms);
}

TEST(StoreChains, TheOldestChainGoesFromItsEnd) {
  auto store = open_for_chains(30);
  ask_and_put(*store, 100, 15, 1'000);
  ask_and_put(*store, 200, 15, 2'000);
  EXPECT_EQ(store->stats().probation_bytes, 0u);
  ask_and_put(*store, 300, 6, 3'000);
  EXPECT_EQ(store->match(kTenant, keys_of(100, 15), false, 3'000).leading_run, 9u);
  EXPECT_EQ(store->match(kTenant, keys_of(200, 15), false, 3'000).leading_run, 15u);
  EXPECT_SOUND(*store);
}

TEST(StoreChains, WithoutChainsTheLeastRecentlyUsedGoes) {
  auto store = open_for_chains(100);
  for (uint64_t number = 0; number < 100; ++number) ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
  for (uint64_t number = 0; number < 50; ++number)
    store->release(store->acquire(kTenant, key_of(number), 1)->id);
  for (uint64_t number = 1000; number < 1050; ++number) ASSERT_EQ(put(*store, number, 64, 2), Code::kOk);
  for (uint64_t number = 0; number < 100; ++number) EXPECT_EQ(present(*store, number), number < 50);
  EXPECT_EQ(store->stats().probation_bytes, 64u * 100);
  EXPECT_SOUND(*store);
}

TEST(StoreChains, BlocksOfNoChainGoWhenTheyAreOlderThanTheVictim) {
  auto store = open_for_chains(20);
  for (uint64_t number = 0; number < 5; ++number) ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
  ask_and_put(*store, 100, 10, 1'000);
  for (uint64_t number = 5; number < 10; ++number) ASSERT_EQ(put(*store, number, 64, 2'000), Code::kOk);
  ask_and_put(*store, 200, 8, 3'000);
  for (uint64_t number = 0; number < 10; ++number) EXPECT_EQ(present(*store, number), number >= 5);
  EXPECT_EQ(store->match(kTenant, keys_of(100, 10), false, 3'000).leading_run, 7u);
  EXPECT_SOUND(*store);
}

TEST(StoreChains, WhatIsReadOrRetainedStaysAndMayGoLater) {
  auto store = open_for_chains(20);
  ask_and_put(*store, 100, 10, 1'000);
  ask_and_put(*store, 200, 10, 2'000);
  const PinId pin = store->acquire(kTenant, key_of(109), 2'000)->id;
  ASSERT_EQ(store->pin(kTenant, key_of(108), 10'000, 2'000), Code::kOk);
  ask_and_put(*store, 300, 4, 3'000);
  for (uint64_t number = 100; number < 110; ++number)
    EXPECT_EQ(present(*store, number), number < 104 || number >= 108) << number;
  EXPECT_SOUND(*store);
  store->release(pin);
  ASSERT_EQ(store->unpin(kTenant, key_of(108)), Code::kOk);
  EXPECT_SOUND(*store);
  ask_and_put(*store, 400, 2, 4'000);
  EXPECT_FALSE(present(*store, 109));
  EXPECT_FALSE(present(*store, 108));
  EXPECT_EQ(store->match(kTenant, keys_of(100, 10), false, 3'000).leading_run, 4u);
  EXPECT_SOUND(*store);
}

TEST(StoreChains, AChainMakesNoRoomForItself) {
  auto store = open_for_chains(20);
  ask_and_put(*store, 100, 10, 1'000);
  ask_and_put(*store, 200, 10, 2'000);
  ask_and_put(*store, 100, 20, 3'000);
  EXPECT_EQ(store->match(kTenant, keys_of(100, 20), false, 3'000).leading_run, 20u);
  ask_and_put(*store, 500, 25, 4'000);  // larger than the store: its own end goes when nothing else is there
  EXPECT_EQ(store->stats().blocks, 20u);
  EXPECT_SOUND(*store);
}

TEST(StoreChains, TenantsWithEqualKeysAreApart) {
  auto store = open_for_chains(20);
  for (const TenantId tenant : {TenantId{1}, TenantId{2}}) {
    (void)store->match(tenant, keys_of(100, 10), true, 1'000 * tenant);
    for (uint64_t number = 100; number < 110; ++number)
      ASSERT_EQ(put(*store, number, 64, 1'000 * tenant, tenant), Code::kOk);
  }
  ASSERT_EQ(put(*store, 1, 64, 3'000, 2), Code::kOk);
  EXPECT_EQ(store->match(1, keys_of(100, 10), false, 3'000).leading_run, 9u);
  EXPECT_EQ(store->match(2, keys_of(100, 10), false, 3'000).leading_run, 10u);
}

TEST(Store, FloodOfSingleUseBlocksLeavesReusedOnesAlone) {
  StoreConfig config = small_config(64 * 100);
  config.eviction = "2q";
  auto store = open_store(config);
  for (uint64_t number = 0; number < 40; ++number) ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
  for (uint64_t number = 0; number < 40; ++number)
    store->release(store->acquire(kTenant, key_of(number), 1)->id);
  for (uint64_t number = 1000; number < 3000; ++number) ASSERT_EQ(put(*store, number, 64, 2), Code::kOk);
  for (uint64_t number = 0; number < 40; ++number) EXPECT_TRUE(present(*store, number));
  EXPECT_FALSE(store->acquire(kTenant, key_of(2890), 3));
  EXPECT_EQ(store->stats().misses_evicted, 1u);
  ASSERT_EQ(put(*store, 2890, 64, 3), Code::kOk);
  EXPECT_EQ(store->stats().admitted_by_ghost, 1u);
  EXPECT_SOUND(*store);
}

TEST(Store, QuotaEvictsOnlyTheTenantsOwnBlocks) {
  auto store = open_store(small_config(64 * 100));
  for (uint64_t number = 0; number < 50; ++number) ASSERT_EQ(put(*store, number, 64, 0, 1), Code::kOk);
  store->set_limits(2, {.memory = {.quota_bytes = 64 * 10}});
  for (uint64_t number = 0; number < 30; ++number) ASSERT_EQ(put(*store, number, 64, 0, 2), Code::kOk);
  for (uint64_t number = 0; number < 50; ++number) EXPECT_TRUE(present(*store, number, 1));
  for (const TenantUsage& use : store->tenants()) {
    if (use.tenant == 2) {
      EXPECT_EQ(use.bytes, 640u);
    }
  }
  EXPECT_EQ(put(*store, 99, 641, 0, 2), Code::kQuotaExceeded);
  std::vector<PinId> pins;
  for (uint64_t number = 0; number < 30; ++number) {
    if (auto pinned = store->acquire(2, key_of(number), 0)) pins.push_back(pinned->id);
  }
  EXPECT_EQ(pins.size(), 10u);
  EXPECT_EQ(put(*store, 99, 64, 0, 2), Code::kQuotaExceeded);
  for (const PinId id : pins) store->release(id);
  EXPECT_EQ(put(*store, 99, 64, 0, 2), Code::kOk);
  EXPECT_EQ(store->stats().evicted_quota, 21u);
  EXPECT_SOUND(*store);
}

// More victims than one call may take: refused for now, and who waits is woken to take the next ones.
TEST(Store, QuotaThatNeedsManyVictimsIsRetried) {
  StoreConfig config = small_config(64 * 1000);
  config.max_victims = 16;
  auto store = open_store(config);
  int woken = 0;
  store->set_space_callback([&] { ++woken; });
  store->set_limits(2, {.memory = {.quota_bytes = 64 * 100}});
  for (uint64_t number = 0; number < 100; ++number) ASSERT_EQ(put(*store, number, 64, 0, 2), Code::kOk);
  int refused = 0;
  Code code = Code::kNoSpace;
  while (refused < 20 && (code = put(*store, 999, 64 * 80, 0, 2)) == Code::kNoSpace) {
    ++refused;
    EXPECT_EQ(woken, refused);
  }
  EXPECT_EQ(code, Code::kOk);
  EXPECT_EQ(refused, 4);
  EXPECT_EQ(store->stats().quota_refusals, 0u);
  EXPECT_EQ(put(*store, 1000, 64 * 101, 0, 2), Code::kQuotaExceeded);
  EXPECT_SOUND(*store);
}

TEST(Store, ListPagesOneTenant) {
  auto store = open_store(small_config(1 << 16));
  for (uint64_t number = 0; number < 100; ++number)
    ASSERT_EQ(put(*store, number, 64, 0, number % 2), Code::kOk);
  size_t seen = 0;
  uint64_t cursor = 0;
  do {
    const ListPage page = store->list(1, cursor, 7);
    EXPECT_LE(page.items.size(), 7u);
    seen += page.items.size();
    cursor = page.next_cursor;
  } while (cursor != 0);
  EXPECT_EQ(seen, 50u);
}

TEST(Store, EventLogTellsWhenItOverflowed) {
  auto config = small_config(1 << 16);
  config.event_log_capacity = 16;
  auto store = open_store(config);
  EXPECT_EQ(store->drain_events(10).first_seq, 1u);
  for (uint64_t number = 0; number < 5; ++number) ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
  const EventBatch batch = store->drain_events(3);
  EXPECT_EQ(batch.first_seq, 1u);
  EXPECT_EQ(batch.last_seq, 3u);
  EXPECT_EQ(batch.records.size(), 3 * kBlockRecordBytes);
  for (uint64_t number = 5; number < 30; ++number) ASSERT_EQ(put(*store, number, 64, 0), Code::kOk);
  const EventBatch late = store->drain_events(100);
  EXPECT_TRUE(late.overflow);
  EXPECT_EQ(late.first_seq, 15u);
  EXPECT_EQ(late.last_seq, 30u);
  EXPECT_FALSE(store->drain_events(100).overflow);
  EXPECT_EQ(store->event_seq(), 30u);
}

TEST(Store, DescriptorsShareTheBytesAndCannotBeResized) {
  auto config = small_config(1 << 16);
  config.arena_bytes = 1 << 15;
  auto store = open_store(config);
  ASSERT_EQ(store->segments().size(), 3u);
  ASSERT_EQ(put(*store, 1, 500, 0), Code::kOk);
  auto pinned = store->acquire(kTenant, key_of(1), 0);
  const Extent extent = pinned->info.extent;
  const SegmentFd& arena = store->segments()[extent.segment];
  EXPECT_EQ(::mmap(nullptr, arena.size, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd_ro, 0), MAP_FAILED);
  EXPECT_NE(::ftruncate(arena.fd_rw, 0), 0);
  void* map = ::mmap(nullptr, arena.size, PROT_READ, MAP_SHARED, arena.fd_ro, 0);
  ASSERT_NE(map, MAP_FAILED);
  EXPECT_TRUE(holds({static_cast<const std::byte*>(map) + extent.offset, extent.size}, 1));
  const SegmentFd& table = store->segments()[2];
  EXPECT_EQ(table.kind, SegmentKind::kGenerationTable);
  uint64_t generation = 0;
  ASSERT_EQ(::pread(table.fd_ro, &generation, 8, extent.slot * 8), 8);
  EXPECT_EQ(generation, extent.generation);
  store->release(pinned->id);
  store->remove(kTenant, key_of(1), RemoveReason::kRemoved, 0);
  ASSERT_EQ(::pread(table.fd_ro, &generation, 8, extent.slot * 8), 8);
  EXPECT_NE(generation, extent.generation);
  ::munmap(map, arena.size);
}

TEST(Store, MixedSizesAlwaysFindRoomWhenNothingIsPinned) {
  std::mt19937_64 random(11);
  auto config = small_config(4 << 20);
  auto store = open_store(config);
  for (uint64_t number = 0; number < 20000; ++number) {
    const uint64_t size = random() % 20 == 0 ? 100'000 + random() % 900'000 : 64 + random() % 5000;
    ASSERT_EQ(put(*store, number, size, number), Code::kOk) << number;
    if (number % 2000 == 0) {
      EXPECT_SOUND(*store);
    }
  }
  EXPECT_EQ(store->stats().no_space, 0u);
}

TEST(Store, BookkeepingStaysBelow200BytesPerBlock) {
  StoreConfig config;
  config.capacity_bytes = 64ull << 20;
  config.quantum_bytes = 64;
  config.expected_block_bytes = 512;
  auto store = open_store(config);
  for (uint64_t number = 0; number < 150'000; ++number) {
    auto reservation = store->reserve(kTenant, key_of(number), 512, 0);
    ASSERT_TRUE(reservation);
    ASSERT_TRUE(store->commit(reservation->id, 0, 0));
  }
  const StoreStats stats = store->stats();
  EXPECT_EQ(stats.blocks, 131072u);
  EXPECT_LE(stats.bookkeeping_bytes / stats.blocks, 200u);
  RecordProperty("bookkeeping_bytes_per_block", static_cast<int>(stats.bookkeeping_bytes / stats.blocks));
  EXPECT_SOUND(*store);
}

}  // namespace
}  // namespace mooncache::test
