// How many blocks per second one core of this machine handles in the index. Used by `mooncache bench`.
#pragma once

#include <cstdint>

#include "mooncache/status.h"

namespace mooncache {

struct IndexBenchmarkOptions {
  uint64_t blocks = 1'000'000;
  uint64_t holders = 1'000;
  uint64_t operations = 4'000'000;  // block operations for each of apply, locate and match, at least
  uint64_t hash_seed = 1;
};

struct IndexBenchmark {  // rates are per second of processor time of one core
  uint64_t blocks = 0;
  uint64_t replicas = 0;
  uint64_t operations = 0;  // measured for each kind
  double build_per_s = 0;   // adds into the growing index
  double apply_per_s = 0;   // half removes, half adds, in an index that is full, batches of 64
  double locate_per_s = 0;  // keys looked up in batches of 256
  double match_per_s = 0;   // blocks of chains that were walked, chains of 64
  double bytes_per_block = 0;
  double longest_apply_us = 0;  // wall time of one batch of 64 records, growth included
};

// INVALID_ARGUMENT for a zero or more than 65,535 holders, TOO_LARGE beyond 200 million blocks or
// 10^10 operations.
Result<IndexBenchmark> index_benchmark(IndexBenchmarkOptions options);

}  // namespace mooncache
