#include "store/growth_benchmark.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "mooncache/store.h"

namespace mooncache {
namespace {

constexpr uint64_t kBlockBytes = 64;
constexpr TenantId kTenant = 1;

double seconds(clockid_t clock) {
  timespec now{};
  (void)::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

Key key_of(uint64_t number) {
  Key key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

Status put(Store& store, uint64_t number) {
  const auto reservation = store.reserve(kTenant, key_of(number), kBlockBytes, number);
  if (!reservation) return reservation.status();
  return store.commit(reservation->id, 0, number);
}

}  // namespace

Result<StoreGrowth> store_growth_benchmark(StoreGrowthOptions options) {
  if (options.from_blocks >= options.to_blocks || options.to_blocks > 100'000'000)
    return {Code::kInvalidArgument, "from_blocks must be below to_blocks, which is at most 100 million"};
  StoreConfig config;
  config.quantum_bytes = kBlockBytes;
  config.expected_block_bytes = kBlockBytes;
  // A little more, or the last blocks of a full shard are evictions.
  config.capacity_bytes = (options.to_blocks + options.to_blocks / 8) * kBlockBytes;
  auto store = Store::open(config);
  if (!store) return store.status();
  StoreGrowth result;
  double begin_s = 0;
  for (uint64_t number = 0; number < options.to_blocks; ++number) {
    if (number < options.from_blocks) {
      if (Status status = put(**store, number); !status) return status;
      continue;
    }
    const double wall_s = seconds(CLOCK_MONOTONIC), used_s = seconds(CLOCK_THREAD_CPUTIME_ID);
    if (begin_s == 0) begin_s = wall_s;
    if (Status status = put(**store, number); !status) return status;
    result.longest_put_ms =
        std::max(result.longest_put_ms, (seconds(CLOCK_THREAD_CPUTIME_ID) - used_s) * 1e3);
    result.longest_wall_ms = std::max(result.longest_wall_ms, (seconds(CLOCK_MONOTONIC) - wall_s) * 1e3);
  }
  result.blocks = (*store)->stats().blocks;
  result.mean_put_us = (seconds(CLOCK_MONOTONIC) - begin_s) * 1e6 /
                       static_cast<double>(options.to_blocks - options.from_blocks);
  return result;
}

}  // namespace mooncache
