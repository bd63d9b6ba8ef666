#include "hash/memory_benchmark.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "mooncache/crc32c.h"

namespace mooncache {
namespace {

using BenchmarkMemory = std::unique_ptr<std::byte[]>;

template <typename Work>
double median_rate(uint64_t bytes, uint64_t repeats, Work work) {
  std::vector<double> rates;
  for (uint64_t i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    rates.push_back(static_cast<double>(bytes) / std::max(spent.count(), 1e-9));
  }
  std::nth_element(rates.begin(), rates.begin() + static_cast<ptrdiff_t>(rates.size() / 2), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace

Result<MemoryBenchmark> memory_benchmark(uint64_t block_bytes, uint64_t count, uint64_t repeats) {
  if (block_bytes == 0 || count == 0 || repeats == 0) {
    return {Code::kInvalidArgument, "block_bytes, count and repeats must be at least 1"};
  }
  if (block_bytes > kMemoryBenchmarkBytesMax / 2 / count || repeats > 1000) {
    return {Code::kTooLarge, "at most 16 GiB of buffers and 1,000 repeats"};
  }
  const uint64_t total = block_bytes * count;
  const BenchmarkMemory source(new (std::nothrow) std::byte[total]);
  const BenchmarkMemory target(new (std::nothrow) std::byte[total]);
  if (!source || !target) return {Code::kNoSpace, "not enough memory for the buffers"};
  uint64_t state = 0x9e3779b97f4a7c15;  // xorshift: nothing may be able to guess the content
  for (uint64_t at = 0; at < total; ++at) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    source[at] = static_cast<std::byte>(state);
  }
  std::memset(target.get(), 0, total);  // page faults happen here

  const auto each = [&](auto work) {
    return median_rate(total, repeats, [&] {
      for (uint64_t i = 0; i < count; ++i)
        work(target.get() + i * block_bytes, source.get() + i * block_bytes);
    });
  };
  volatile uint32_t sink = 0;  // keeps the results needed
  MemoryBenchmark result;
  result.memcpy_bytes_per_s = each([&](std::byte* to, const std::byte* from) {
    std::memcpy(to, from, block_bytes);
    asm volatile("" : : "r"(to) : "memory");
  });
  result.crc32c_bytes_per_s = each([&](std::byte*, const std::byte* from) {
    sink = crc32c({from, static_cast<size_t>(block_bytes)});
  });
  result.memcpy_then_crc32c_bytes_per_s = each([&](std::byte* to, const std::byte* from) {
    std::memcpy(to, from, block_bytes);
    sink = crc32c({to, static_cast<size_t>(block_bytes)});
  });
  result.copy_crc32c_bytes_per_s =
      each([&](std::byte* to, const std::byte* from) { sink = copy_crc32c(to, from, block_bytes); });
  static_cast<void>(sink);
  return result;
}

}  // namespace mooncache
