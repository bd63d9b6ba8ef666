// Small helpers shared by the store's tests: keys by number, stores of a given size, filled blocks.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mooncache/crc32c.h"
#include "mooncache/store.h"

namespace mooncache::test {

inline constexpr TenantId kTenant = 7;
inline constexpr uint64_t kMiB = 1 << 20;

// A folder of the running test alone, for files; nothing is made there.
inline std::filesystem::path test_folder() {
  return std::filesystem::temp_directory_path() /
         ("mooncache-" + std::to_string(::getpid()) + "-" +
          ::testing::UnitTest::GetInstance()->current_test_info()->name());
}

inline Key key_of(uint64_t number) {
  Key key;
  const uint64_t mixed = number * 0x9e3779b97f4a7c15ull;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  std::memcpy(key.bytes.data() + 8, &mixed, sizeof mixed);
  return key;
}

inline StoreConfig small_config(uint64_t capacity_bytes) {
  StoreConfig config;
  config.capacity_bytes = capacity_bytes;
  config.quantum_bytes = 64;
  config.expected_block_bytes = 64;
  config.shards = 8;
  config.event_log_capacity = 1 << 16;
  config.correlated_ms = 0;
  return config;
}

inline std::unique_ptr<Store> open_store(const StoreConfig& config) {
  auto store = Store::open(config);
  EXPECT_TRUE(store.is_ok()) << store.status().message;
  return store ? std::move(*store) : nullptr;
}

// Bytes that depend on seed and position, so that foreign or shifted bytes are seen.
inline uint32_t fill(Slice slice, uint64_t seed) {
  for (size_t at = 0; at < slice.size; ++at)
    slice.data[at] = static_cast<std::byte>((seed * 131 + at * 7 + (at >> 8)) & 0xff);
  return crc32c({slice.data, slice.size});
}
inline bool holds(ConstSlice slice, uint64_t seed) {
  for (size_t at = 0; at < slice.size; ++at) {
    if (slice.data[at] != static_cast<std::byte>((seed * 131 + at * 7 + (at >> 8)) & 0xff)) return false;
  }
  return slice.size > 0;
}

inline Code put(Store& store, uint64_t number, uint64_t size, uint64_t now_ms, TenantId tenant = kTenant) {
  auto reservation = store.reserve(tenant, key_of(number), size, now_ms);
  if (!reservation) return reservation.code();
  return store.commit(reservation->id, fill(store.writable(reservation->id), number), now_ms).code;
}

// As the store's owner has it: of a clock that never jumps.
inline uint64_t clock_ms() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// A counter of the tiers below the memory.
inline uint64_t disk_counter(Store& store, const std::string& name) {
  for (const auto& [found, value] : store.stats().disk) {
    if (found == name) return value;
  }
  ADD_FAILURE() << name;
  return 0;
}

// Whether it comes true within 20 s.
template <typename Until>
bool eventually(const Until& until) {
  for (int tries = 0; tries < 4000; ++tries) {
    if (until()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

inline bool present(Store& store, uint64_t number, TenantId tenant = kTenant) {
  return store.stat(tenant, key_of(number), 0).is_ok();
}

#define EXPECT_SOUND(store)                  \
  do {                                       \
    std::string why;                         \
    EXPECT_TRUE((store).check(&why)) << why; \
  } while (false)

// What a reader of records believes to be visible: (tenant, key) -> size.
using Believed = std::map<std::pair<TenantId, Key>, uint64_t>;
inline void apply_records(Believed& believed, const std::vector<std::byte>& records) {
  for (size_t at = 0; at + kBlockRecordBytes <= records.size(); at += kBlockRecordBytes) {
    Reader reader({records.data() + at, kBlockRecordBytes});
    const auto kind = static_cast<RecordKind>(reader.u8());
    reader.take(7);
    const TenantId tenant = reader.u64();
    const uint64_t size = reader.u64();
    const Key key = reader.key();
    if (kind == RecordKind::kAdd) believed[{tenant, key}] = size;
    if (kind == RecordKind::kRemove) believed.erase({tenant, key});
  }
}

}  // namespace mooncache::test
