// How long the longest put takes while a store fills up. Used by `mooncache bench`.
#pragma once

#include <cstdint>

#include "mooncache/status.h"

namespace mooncache {

struct StoreGrowthOptions {
  uint64_t from_blocks = 100'000;  // puts before are not measured
  uint64_t to_blocks = 10'000'000;
};

struct StoreGrowth {
  uint64_t blocks = 0;
  // Of one put. Processor time tells what the store does, whatever else runs on the machine.
  double longest_put_ms = 0;
  double longest_wall_ms = 0;
  double mean_put_us = 0;
};

// Blocks of 64 bytes in a store with the default number of shards, about 240 bytes of memory each.
// INVALID_ARGUMENT unless from_blocks < to_blocks <= 100 million. NO_SPACE.
Result<StoreGrowth> store_growth_benchmark(StoreGrowthOptions options);

}  // namespace mooncache
