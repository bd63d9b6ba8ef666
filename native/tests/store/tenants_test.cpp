// What tenants use, may use and lose.
#include "store/tenants.h"

#include <unistd.h>

#include <algorithm>

#include "store/reuse.h"
#include "store/shares.h"
#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

constexpr TenantId kSmall = 1, kGreedy = 2, kOther = 3;
constexpr uint64_t kBlockBytes = 64;

TenantUsage use_of(const Store& store, TenantId tenant) {
  for (const TenantUsage& use : store.tenants()) {
    if (use.tenant == tenant) return use;
  }
  return {};
}

uint64_t count_present(Store& store, uint64_t first, uint64_t count, TenantId tenant) {
  uint64_t found = 0;
  for (uint64_t number = first; number < first + count; ++number)
    found += present(store, number, tenant) ? 1 : 0;
  return found;
}

// Whether these bytes lie anywhere in the memory that other processes can map.
bool lies_in_memory(const Store& store, const std::vector<std::byte>& wanted) {
  for (const SegmentFd& segment : store.segments()) {
    if (segment.kind != SegmentKind::kArena) continue;
    std::vector<std::byte> bytes(segment.size);
    const ssize_t got = ::pread(segment.fd_ro, bytes.data(), bytes.size(), 0);
    EXPECT_EQ(got, static_cast<ssize_t>(bytes.size()));
    if (std::search(bytes.begin(), bytes.end(), wanted.begin(), wanted.end()) != bytes.end()) return true;
  }
  return false;
}

// Bytes that no other block has.
std::vector<std::byte> random_content(uint64_t number, size_t size) {
  std::mt19937_64 random(number);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 56);
  return bytes;
}

void put_content(Store& store, uint64_t number, size_t size, TenantId tenant) {
  const auto bytes = random_content(number, size);
  auto reservation = store.reserve(tenant, key_of(number), size, 0);
  ASSERT_TRUE(reservation);
  ASSERT_TRUE(store.write(reservation->id, 0, {bytes.data(), size}));
  ASSERT_TRUE(store.commit(reservation->id, crc32c({bytes.data(), size}), 0));
}

TEST(Tenants, AShareIsNotEvictedForOthers) {
  for (const char* eviction : {"lru", "2q", "mooncache"}) {
    StoreConfig config = small_config(kBlockBytes * 100);
    config.eviction = eviction;
    auto store = open_store(config);
    store->set_limits(kSmall, {.memory = {.share_bytes = kBlockBytes * 25}});
    for (uint64_t number = 0; number < 25; ++number)
      ASSERT_EQ(put(*store, number, kBlockBytes, number, kSmall), Code::kOk);
    for (uint64_t number = 0; number < 400; ++number)
      ASSERT_EQ(put(*store, 1000 + number, kBlockBytes, 100 + number, kGreedy), Code::kOk);
    EXPECT_EQ(count_present(*store, 0, 25, kSmall), 25u) << eviction;
    EXPECT_EQ(use_of(*store, kGreedy).blocks, 75u) << eviction;
    EXPECT_EQ(use_of(*store, kGreedy).evicted_blocks, 325u) << eviction;
    EXPECT_EQ(use_of(*store, kSmall).evicted_blocks, 0u) << eviction;
    EXPECT_SOUND(*store);
  }
}

TEST(Tenants, WhoIsFurthestOverItsShareLosesFirst) {
  auto store = open_store(small_config(kBlockBytes * 100));
  store->set_limits(kSmall, {.memory = {.share_bytes = kBlockBytes * 40}});
  store->set_limits(kOther, {.memory = {.share_bytes = kBlockBytes * 10}});
  for (uint64_t number = 0; number < 50; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kSmall), Code::kOk);
  for (uint64_t number = 0; number < 50; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kOther), Code::kOk);
  // 10 over and 40 over: what others put comes out of the second one, until both are over by as much.
  for (uint64_t number = 0; number < 30; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kGreedy), Code::kOk);
  EXPECT_EQ(use_of(*store, kSmall).blocks, 50u);
  EXPECT_EQ(use_of(*store, kOther).blocks, 30u);
  EXPECT_EQ(use_of(*store, kGreedy).blocks, 20u) << "it has no share: from here on it pays for itself";
  for (uint64_t number = 30; number < 60; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kGreedy), Code::kOk);
  EXPECT_EQ(use_of(*store, kGreedy).blocks, 20u);
  EXPECT_SOUND(*store);
}

TEST(Tenants, AShareHoldsWhereSlotsRunOutBeforeBytes) {
  StoreConfig config = small_config(1 << 20);
  config.expected_block_bytes = 4096;
  auto store = open_store(config);
  store->set_limits(kSmall, {.memory = {.share_bytes = kBlockBytes * 40}});
  for (uint64_t number = 0; number < 40; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kSmall), Code::kOk);
  uint64_t stored = 0;
  for (uint64_t number = 1000; number < 6000; ++number)
    stored += put(*store, number, kBlockBytes, 0, kGreedy) == Code::kOk ? 1 : 0;
  EXPECT_EQ(stored, 5000u);
  EXPECT_GT(use_of(*store, kGreedy).evicted_blocks, 1000u) << "there were not that many slots";
  EXPECT_EQ(count_present(*store, 0, 40, kSmall), 40u);
  EXPECT_SOUND(*store);
}

TEST(Tenants, APinnedBlockOfTheLoserIsPassedOver) {
  auto store = open_store(small_config(kBlockBytes * 20));
  store->set_limits(kSmall, {.memory = {.share_bytes = kBlockBytes * 5}});
  std::vector<PinId> pins;
  for (uint64_t number = 0; number < 12; ++number) {
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kGreedy), Code::kOk);
    pins.push_back(store->acquire(kGreedy, key_of(number), 0)->id);
  }
  for (uint64_t number = 0; number < 8; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kSmall), Code::kOk);
  EXPECT_EQ(put(*store, 100, kBlockBytes, 0, kOther), Code::kOk) << "the next one over its share pays";
  EXPECT_EQ(use_of(*store, kSmall).blocks, 7u);
  for (const PinId pin : pins) store->release(pin);
  EXPECT_SOUND(*store);
}

// Blocks that were read again are in the protected queue; a flood of others passes through probation.
void put_and_read_again(Store& store, uint64_t first, uint64_t count, TenantId tenant) {
  for (uint64_t number = first; number < first + count; ++number) {
    ASSERT_EQ(put(store, number, kBlockBytes, 0, tenant), Code::kOk);
    store.release(store.acquire(tenant, key_of(number), 10)->id);
  }
}

TEST(Tenants, WithinAQuotaThePolicyChooses) {
  StoreConfig config = small_config(kBlockBytes * 200);
  config.eviction = "2q";
  auto store = open_store(config);
  store->set_limits(kSmall, {.memory = {.quota_bytes = kBlockBytes * 20}});
  put_and_read_again(*store, 0, 10, kSmall);
  for (uint64_t number = 100; number < 200; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 20, kSmall), Code::kOk);
  EXPECT_EQ(count_present(*store, 0, 10, kSmall), 10u) << "older, and read again";
  EXPECT_EQ(count_present(*store, 190, 10, kSmall), 10u);
  EXPECT_EQ(use_of(*store, kSmall).blocks, 20u);
  EXPECT_EQ(store->stats().evicted_quota, 90u);
  EXPECT_SOUND(*store);
}

TEST(Tenants, OfWhoLosesByItsShareThePolicyChooses) {
  StoreConfig config = small_config(kBlockBytes * 100);
  config.eviction = "2q";
  auto store = open_store(config);
  store->set_limits(kSmall, {.memory = {.share_bytes = kBlockBytes * 50}});
  put_and_read_again(*store, 0, 20, kGreedy);
  for (uint64_t number = 100; number < 130; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 20, kGreedy), Code::kOk);
  for (uint64_t number = 0; number < 50; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 30, kSmall), Code::kOk);
  for (uint64_t number = 200; number < 300; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 40, kGreedy), Code::kOk);
  EXPECT_EQ(count_present(*store, 0, 20, kGreedy), 20u) << "older, and read again";
  EXPECT_EQ(count_present(*store, 0, 50, kSmall), 50u);
  EXPECT_SOUND(*store);
}

// Of a tenant's chains the one that is worth least loses its end, whatever was read last.
TEST(Tenants, WithinATenantTheLearntPolicyChoosesTheChain) {
  StoreConfig config = small_config(kBlockBytes * 200);
  config.eviction = "mooncache";
  auto store = open_store(config);
  const auto chain = [&](uint64_t first, uint64_t count, TenantId tenant, uint64_t now_ms) {
    std::vector<Key> keys;
    for (uint64_t number = first; number < first + count; ++number) keys.push_back(key_of(number));
    (void)store->match(tenant, keys, true, now_ms);
    for (uint64_t number = first; number < first + count; ++number)
      ASSERT_EQ(put(*store, number, kBlockBytes, now_ms, tenant), Code::kOk);
  };
  store->set_limits(kSmall, {.memory = {.quota_bytes = kBlockBytes * 40}});
  chain(0, 20, kOther, 1000);  // older still, of another tenant
  chain(0, 20, kSmall, 2000);
  chain(100, 20, kSmall, 3000);
  for (uint64_t number = 0; number < 20; ++number)
    store->release(store->acquire(kSmall, key_of(number), 4000)->id);
  for (uint64_t number = 200; number < 205; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 5000, kSmall), Code::kOk);
  EXPECT_EQ(count_present(*store, 0, 15, kSmall), 15u);
  EXPECT_EQ(count_present(*store, 15, 5, kSmall), 0u) << "the end of its oldest chain";
  EXPECT_EQ(count_present(*store, 100, 20, kSmall), 20u) << "read less recently, by a younger request";
  EXPECT_EQ(count_present(*store, 0, 20, kOther), 20u);
  // A block that is read now is passed over.
  const PinId reader = store->acquire(kSmall, key_of(14), 6000)->id;
  ASSERT_EQ(put(*store, 205, kBlockBytes, 6000, kSmall), Code::kOk);
  EXPECT_TRUE(present(*store, 14, kSmall));
  EXPECT_FALSE(present(*store, 13, kSmall));
  store->release(reader);
  ASSERT_EQ(put(*store, 206, kBlockBytes, 7000, kSmall), Code::kOk);
  EXPECT_FALSE(present(*store, 200, kSmall))
      << "a block of no chain goes when it is older than the chain's end";
  EXPECT_TRUE(present(*store, 14, kSmall)) << "which was read just now";
  EXPECT_SOUND(*store);
}

// A chain that is longer than its tenant's quota keeps its beginning.
TEST(Tenants, AChainBeyondTheQuotaLosesItsEnd) {
  StoreConfig config = small_config(kBlockBytes * 200);
  config.eviction = "mooncache";
  auto store = open_store(config);
  store->set_limits(kSmall, {.memory = {.quota_bytes = kBlockBytes * 20}});
  std::vector<Key> keys;
  for (uint64_t number = 0; number < 30; ++number) keys.push_back(key_of(number));
  (void)store->match(kSmall, keys, true, 1000);
  for (uint64_t number = 0; number < 30; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 1000, kSmall), Code::kOk);
  EXPECT_EQ(count_present(*store, 0, 19, kSmall), 19u);
  EXPECT_TRUE(present(*store, 29, kSmall));
  EXPECT_SOUND(*store);
}

// The chains of others do not hide those of the tenant.
TEST(Tenants, AChainIsFoundAmongManyOfOthers) {
  store::Reuse policy;
  const std::vector<uint64_t> own = {1, 2, 3};
  std::vector<uint64_t> ids(3);
  for (uint64_t at = 0; at < 200; ++at) {
    for (uint64_t place = 0; place < 3; ++place) ids[place] = 1000 + 3 * at + place;
    policy.seen(ids, static_cast<double>(at), std::vector<uint8_t>{0b111}, kOther);
  }
  policy.seen(own, 300, std::vector<uint8_t>{0b111}, kSmall);
  std::vector<store::Reuse::NextVictim> next;
  policy.next_victims(301, 2, next, {{}, kSmall});
  ASSERT_EQ(next.size(), 2u);
  EXPECT_EQ(next[0].id, 3u);
  EXPECT_EQ(next[1].id, 2u);
  next.clear();
  policy.seen(std::vector<uint64_t>{1, 2, 3, 4}, 302, std::vector<uint8_t>{0b111}, kSmall);
  policy.next_victims(303, 4, next, {4, kSmall});
  EXPECT_TRUE(next.empty()) << "its own chain makes no room for a block";
  next.clear();
  policy.next_victims(303, 1, next);
  ASSERT_EQ(next.size(), 1u);
  EXPECT_EQ(next[0].id, 1002u);
}

TEST(Tenants, LimitsEndWhenTheyAreTakenBack) {
  auto store = open_store(small_config(kBlockBytes * 20));
  store->set_limits(kSmall, {.memory = {.share_bytes = kBlockBytes * 10}});
  for (uint64_t number = 0; number < 10; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kSmall), Code::kOk);
  store->set_limits(kSmall, {});
  for (uint64_t number = 0; number < 40; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kGreedy), Code::kOk);
  EXPECT_EQ(use_of(*store, kSmall).blocks, 0u);
}

TEST(Tenants, FiguresSayWhatEachHasDone) {
  auto store = open_store(small_config(kBlockBytes * 100));
  store->tend_tenants(1000, 100);
  for (uint64_t number = 0; number < 10; ++number)
    ASSERT_EQ(put(*store, number, kBlockBytes, 0, kSmall), Code::kOk);
  store->tend_tenants(3000, 100);
  for (int times = 0; times < 3; ++times) store->release(store->acquire(kSmall, key_of(1), 0)->id);
  EXPECT_EQ(store->acquire(kSmall, key_of(99), 0).code(), Code::kNotFound);
  EXPECT_EQ(store->acquire(kOther, key_of(1), 0).code(), Code::kNotFound);
  const TenantUsage use = use_of(*store, kSmall);
  EXPECT_EQ(use.stored_blocks, 10u);
  EXPECT_EQ(use.stored_bytes, 10 * kBlockBytes);
  EXPECT_EQ(use.hits, 3u);
  EXPECT_EQ(use.hit_bytes, 3 * kBlockBytes);
  EXPECT_EQ(use.misses, 1u);
  EXPECT_EQ(use.byte_ms, 2000 * 10 * kBlockBytes);
  EXPECT_EQ(use_of(*store, kOther).misses, 1u);
}

TEST(Tenants, OfVeryManyTheRestIsCountedTogether) {
  auto store = open_store(small_config(kBlockBytes * 4));
  constexpr uint64_t kMany = store::Tenants::kRemembered + 500;
  for (uint64_t tenant = 1; tenant <= kMany; ++tenant)
    ASSERT_EQ(put(*store, 7, kBlockBytes, 0, tenant), Code::kOk);
  EXPECT_LE(store->tenants().size(), store::Tenants::kRemembered + 1);
  uint64_t stored = store->other_tenants().stored_blocks;
  for (const TenantUsage& use : store->tenants()) stored += use.stored_blocks;
  EXPECT_EQ(stored, kMany);
  EXPECT_SOUND(*store);
}

TEST(Tenants, BlocksEndWithTheirTtl) {
  auto store = open_store(small_config(kBlockBytes * 100));
  store->set_limits(kSmall, {.ttl_ms = 5000});
  for (uint64_t number = 0; number < 10; ++number) {
    ASSERT_EQ(put(*store, number, kBlockBytes, 1000 * number, kSmall), Code::kOk);
    ASSERT_EQ(put(*store, number, kBlockBytes, 1000 * number, kOther), Code::kOk);
  }
  for (int turn = 0; turn < 20; ++turn) store->tend_tenants(9999, 64);
  EXPECT_EQ(count_present(*store, 0, 10, kSmall), 5u) << "of 5, 6, 7, 8 and 9 s";
  EXPECT_EQ(use_of(*store, kSmall).expired_blocks, 5u);
  EXPECT_EQ(count_present(*store, 0, 10, kOther), 10u);
  EXPECT_SOUND(*store);
}

TEST(Tenants, ARateIsHeldOverTime) {
  auto store = open_store(small_config(kBlockBytes * 1000));
  store->set_limits(kSmall, {.bytes_per_s = 10 * kBlockBytes});
  uint64_t stored = 0, number = 0;
  for (uint64_t now_ms = 1; now_ms <= 10'001; now_ms += 10) {
    const Code code = put(*store, number++, kBlockBytes, now_ms, kSmall);
    ASSERT_TRUE(code == Code::kOk || code == Code::kBackPressure);
    stored += code == Code::kOk ? 1 : 0;
  }
  EXPECT_GE(stored, 100u);
  EXPECT_LE(stored, 111u) << "ten seconds' worth and the first second's";
  EXPECT_EQ(store->acquire(kSmall, key_of(0), 10'002).code(), Code::kBackPressure);
  EXPECT_EQ(store->acquire(kOther, key_of(0), 10'002).code(), Code::kNotFound);
  EXPECT_GT(use_of(*store, kSmall).throttled, 800u);
}

TEST(Tenants, ALargeBlockPassesOnceAndIsPaidForAfterwards) {
  store::RateMeter meter;
  EXPECT_TRUE(meter.admits(1000, 1));
  meter.take(5000);
  EXPECT_FALSE(meter.admits(1000, 2));
  EXPECT_FALSE(meter.admits(1000, 4001));
  EXPECT_TRUE(meter.admits(1000, 4002));
  EXPECT_TRUE(meter.admits(0, 4003)) << "no limit";
}

TEST(Tenants, APurgeOverwritesTheBytes) {
  auto store = open_store(small_config(1 << 20));
  for (uint64_t number = 0; number < 300; ++number) {
    put_content(*store, number, 512, kSmall);
    put_content(*store, 1000 + number, 512, kOther);
  }
  ASSERT_EQ(store->pin(kSmall, key_of(3), 1000, 0), Code::kOk);
  ASSERT_TRUE(lies_in_memory(*store, random_content(5, 512)));
  const PinId reader = store->acquire(kSmall, key_of(7), 0)->id;
  auto writer = store->reserve(kSmall, key_of(400), 512, 0);
  ASSERT_TRUE(writer);
  const auto written = random_content(400, 512);
  ASSERT_TRUE(store->write(writer->id, 0, {written.data(), written.size()}));

  Purged all;
  do {
    const Purged page = store->purge(kSmall, all.next_cursor);
    all.blocks += page.blocks;
    all.bytes += page.bytes;
    all.held_blocks += page.held_blocks;
    all.next_cursor = page.next_cursor;
  } while (all.next_cursor != 0);
  EXPECT_EQ(all.blocks, 299u);
  EXPECT_EQ(all.bytes, 299u * 512);
  EXPECT_EQ(all.held_blocks, 2u) << "one is read, one is written";
  EXPECT_EQ(count_present(*store, 0, 500, kSmall), 0u);
  EXPECT_EQ(count_present(*store, 1000, 300, kOther), 300u);
  for (const uint64_t number : {0, 3, 5, 299})
    EXPECT_FALSE(lies_in_memory(*store, random_content(number, 512)));
  EXPECT_EQ(std::memcmp(store->readable(reader).data, random_content(7, 512).data(), 512), 0)
      << "a reader keeps what it reads";
  store->release(reader);
  EXPECT_FALSE(lies_in_memory(*store, random_content(7, 512)));
  EXPECT_EQ(store->commit(writer->id, crc32c({written.data(), written.size()}), 0).code,
            Code::kReservationUnknown);
  EXPECT_FALSE(lies_in_memory(*store, random_content(400, 512)));
  EXPECT_TRUE(lies_in_memory(*store, random_content(1005, 512)));
  EXPECT_EQ(use_of(*store, kSmall).bytes, 0u);
  EXPECT_SOUND(*store);
}

}  // namespace
}  // namespace mooncache::test
