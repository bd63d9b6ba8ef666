// How fast this machine copies, checks, and does both in one pass. Used by `mooncache bench`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mooncache/status.h"

namespace mooncache {

struct MemoryBenchmark {  // medians over the repeats, bytes of payload per second
  double memcpy_bytes_per_s = 0;
  double crc32c_bytes_per_s = 0;
  double memcpy_then_crc32c_bytes_per_s = 0;
  double copy_crc32c_bytes_per_s = 0;
};

inline constexpr uint64_t kMemoryBenchmarkBytesMax = uint64_t{16} << 30;

// Works through `count` distinct buffers of `block_bytes` each, `repeats` times, on one thread.
// INVALID_ARGUMENT for a zero, TOO_LARGE beyond 16 GiB in all or 1,000 repeats, NO_SPACE without memory.
Result<MemoryBenchmark> memory_benchmark(uint64_t block_bytes, uint64_t count, uint64_t repeats);

}  // namespace mooncache
