#include "index/index_benchmark.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

#include "mooncache/block_index.h"

namespace mooncache {
namespace {

constexpr uint64_t kBatch = 256;
constexpr uint64_t kChain = 64;
constexpr TenantId kTenant = 1;
constexpr uint64_t kBlockBytes = 1 << 20;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::max(std::chrono::duration<double>(Clock::now() - start).count(), 1e-9);
}

uint64_t scramble(uint64_t value) {  // a bijection, so distinct blocks have distinct keys
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

void write_key(std::byte* to, uint64_t block) {
  for (uint64_t word = 0; word < 4; ++word) {
    const uint64_t value = scramble(block * 4 + word + 1);
    std::memcpy(to + word * 8, &value, sizeof value);
  }
}

void write_record(std::byte* to, uint8_t kind, uint64_t block) {
  std::memset(to, 0, 24);
  to[0] = static_cast<std::byte>(kind);
  to[1] = static_cast<std::byte>(Tier::kDram);
  std::memcpy(to + 8, &kTenant, sizeof kTenant);
  std::memcpy(to + 16, &kBlockBytes, sizeof kBlockBytes);
  write_key(to + 24, block);
}

// Chains live whole on one holder, and a second holder has every other chain too.
struct Bench {
  explicit Bench(IndexBenchmarkOptions options_in)
      : options(options_in), index({.hash_seed = options_in.hash_seed}), records(kBatch * kIndexRecordBytes) {}

  uint32_t holder_of(uint64_t block, uint64_t copy) const {
    return static_cast<uint32_t>(scramble(block / kChain + (copy << 40)) % options.holders);
  }

  // Only the index is timed, not the making of the records.
  void apply(uint32_t holder, uint64_t count) {
    const auto start = Clock::now();
    ok = ok && index.apply(holder, std::span(records).first(count * kIndexRecordBytes)).is_ok();
    const double seconds = seconds_since(start);
    spent_s += seconds;
    longest_s = std::max(longest_s, seconds);
    done += count;
  }
  double take_rate() {
    const double rate = static_cast<double>(done) / std::max(spent_s, 1e-9);
    done = 0;
    spent_s = 0;
    return rate;
  }

  // A node reports in batches: the chains of one batch go to one holder.
  void build() {
    for (uint64_t copy = 0; copy < 2; ++copy) {
      for (uint64_t chain = 0; chain * kChain < options.blocks; ++chain) {
        if (copy == 1 && chain % 2 == 1) continue;
        const uint64_t first = chain * kChain;
        const uint64_t count = std::min(kChain, options.blocks - first);
        for (uint64_t i = 0; i < count; ++i) write_record(&records[i * kIndexRecordBytes], kRecordAdd, first + i);
        apply(holder_of(first, copy), count);
      }
    }
  }

  // Removes a batch of scattered blocks from a holder of theirs and adds it back.
  void churn() {
    uint64_t turn = 0;
    while (done < options.operations) {
      const uint64_t chain = scramble(++turn) % ((options.blocks + kChain - 1) / kChain);
      const uint64_t first = chain * kChain;
      const uint64_t count = std::min(kChain, options.blocks - first);
      for (const uint8_t kind : {kRecordRemove, kRecordAdd}) {
        for (uint64_t i = 0; i < count; ++i) write_record(&records[i * kIndexRecordBytes], kind, first + i);
        apply(holder_of(first, 0), count);
        evict_caches(turn);
      }
    }
  }

  // The remove has just brought the chain into the caches; walk elsewhere so that the add finds it cold.
  void evict_caches(uint64_t turn) {
    std::array<std::byte, 32 * kKeyBytes> keys;
    for (uint64_t i = 0; i < 32; ++i) {
      write_key(&keys[i * kKeyBytes], scramble(turn * 32 + i + (1ull << 50)) % options.blocks);
    }
    sink += index.present(kTenant, keys).value().size();
  }

  void locate() {
    std::vector<std::byte> keys(kBatch * kKeyBytes);
    uint64_t number = 0;
    while (done < options.operations) {
      for (uint64_t i = 0; i < kBatch; ++i) write_key(&keys[i * kKeyBytes], scramble(++number) % options.blocks);
      const auto start = Clock::now();
      sink += index.locate_packed(kTenant, keys).value().size();
      spent_s += seconds_since(start);
      done += kBatch;
    }
  }

  void match() {
    std::vector<std::byte> keys(kChain * kKeyBytes);
    const uint64_t chains = std::max<uint64_t>(options.blocks / kChain, 1);
    uint64_t number = 0;
    while (done < options.operations) {
      const uint64_t first = scramble(++number) % chains * kChain;
      for (uint64_t i = 0; i < kChain; ++i) write_key(&keys[i * kKeyBytes], first + i);
      const auto start = Clock::now();
      const auto result = index.match(kTenant, keys);
      spent_s += seconds_since(start);
      done += result->leading_run;
      ok = ok && result->leading_run == std::min(kChain, options.blocks - first);
    }
  }

  IndexBenchmarkOptions options;
  BlockIndex index;
  std::vector<std::byte> records;
  uint64_t done = 0;
  uint64_t sink = 0;
  double spent_s = 0;
  double longest_s = 0;
  bool ok = true;
};

}  // namespace

Result<IndexBenchmark> index_benchmark(IndexBenchmarkOptions options) {
  if (options.blocks == 0 || options.holders == 0 || options.operations == 0 || options.holders > kIndexHoldersMax) {
    return {Code::kInvalidArgument, "blocks and operations must be at least 1, holders from 1 to 65,535"};
  }
  if (options.blocks > 200'000'000 || options.operations > 10'000'000'000) {
    return {Code::kTooLarge, "at most 200 million blocks and 10^10 operations"};
  }
  Bench bench(options);
  IndexBenchmark result;
  bench.build();
  result.build_per_s = bench.take_rate();
  result.longest_apply_us = bench.longest_s * 1e6;
  const IndexStats stats = bench.index.stats();
  result.blocks = stats.blocks;
  result.replicas = stats.replicas;
  result.bytes_per_block = static_cast<double>(stats.memory_bytes) / static_cast<double>(stats.blocks);
  bench.churn();
  result.operations = bench.done;
  result.apply_per_s = bench.take_rate();
  bench.locate();
  result.locate_per_s = bench.take_rate();
  bench.match();
  result.match_per_s = bench.take_rate();
  if (!bench.ok) return {Code::kInternal, "the index gave a wrong answer during the benchmark"};
  return result;
}

}  // namespace mooncache
