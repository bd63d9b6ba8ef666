#include "index/index_benchmark.h"

#include <time.h>

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
constexpr uint64_t kChainsAtOnce = 2048;  // 7 MiB of records
constexpr uint64_t kKeysAtOnce = 65'536;
constexpr TenantId kTenant = 1;
constexpr uint64_t kBlockBytes = 1 << 20;

// Processor time of this thread: the rate of one core, whatever else the machine is doing.
double thread_s() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double wall_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
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

// Chains live whole on one holder, and a second holder has every other chain too. Requests are made
// in advance, a few megabytes at a time, so that only the index is timed and the caches have moved on.
struct Bench {
  explicit Bench(IndexBenchmarkOptions options_in)
      : options(options_in),
        index({.hash_seed = options_in.hash_seed}),
        chains((options_in.blocks + kChain - 1) / kChain) {}

  uint32_t holder_of(uint64_t chain, uint64_t copy) const {
    return static_cast<uint32_t>(scramble(chain + (copy << 40)) % options.holders);
  }
  uint64_t chain_blocks(uint64_t chain) const { return std::min(kChain, options.blocks - chain * kChain); }

  // Packed records of one chain.
  std::span<const std::byte> records_of(uint8_t kind, uint64_t chain, std::byte* room) const {
    const uint64_t count = chain_blocks(chain);
    for (uint64_t i = 0; i < count; ++i) write_record(room + i * kIndexRecordBytes, kind, chain * kChain + i);
    return {room, static_cast<size_t>(count * kIndexRecordBytes)};
  }

  template <typename Work>
  void timed(Work work) {
    const double start_s = thread_s();
    work();
    spent_s += thread_s() - start_s;
  }
  double take_rate() {
    const double rate = static_cast<double>(done) / std::max(spent_s, 1e-9);
    done = 0;
    spent_s = 0;
    return rate;
  }

  void build() {
    std::vector<std::byte> room(kChain * kIndexRecordBytes);
    for (uint64_t copy = 0; copy < 2; ++copy) {
      for (uint64_t chain = 0; chain < chains; chain += copy + 1) {
        const auto records = records_of(kRecordAdd, chain, room.data());
        const double start_s = wall_s();
        timed([&] { ok = ok && index.apply(holder_of(chain, copy), records).is_ok(); });
        longest_s = std::max(longest_s, wall_s() - start_s);
        done += chain_blocks(chain);
      }
    }
  }

  // Takes many chains away from their first holders, then gives them back.
  void churn() {
    const uint64_t per_pass = std::min(chains, kChainsAtOnce);
    std::vector<std::byte> room(per_pass * kChain * kIndexRecordBytes);
    std::vector<std::span<const std::byte>> batches(per_pass);
    for (uint64_t first = 0; done < options.operations; first = (first + per_pass) % chains) {
      for (const uint8_t kind : {kRecordRemove, kRecordAdd}) {
        for (uint64_t i = 0; i < per_pass; ++i) {
          batches[i] = records_of(kind, (first + i) % chains, &room[i * kChain * kIndexRecordBytes]);
          done += batches[i].size() / kIndexRecordBytes;
        }
        timed([&] {
          for (uint64_t i = 0; i < per_pass; ++i) {
            ok = ok && index.apply(holder_of((first + i) % chains, 0), batches[i]).is_ok();
          }
        });
      }
    }
  }

  void locate() {
    std::vector<std::byte> keys(kKeysAtOnce * kKeyBytes);
    uint64_t number = 0;
    while (done < options.operations) {
      for (uint64_t i = 0; i < kKeysAtOnce; ++i)
        write_key(&keys[i * kKeyBytes], scramble(++number) % options.blocks);
      timed([&] {
        for (uint64_t at = 0; at < kKeysAtOnce; at += kBatch) {
          const auto found =
              index.locate_packed(kTenant, std::span(keys).subspan(at * kKeyBytes, kBatch * kKeyBytes));
          ok = ok && found->size() > kBatch * 2;
        }
      });
      done += kKeysAtOnce;
    }
  }

  void match() {
    std::vector<std::byte> keys(kKeysAtOnce * kKeyBytes);
    uint64_t number = 0;
    while (done < options.operations) {
      uint64_t used = 0;
      std::array<uint64_t, kKeysAtOnce / kChain> counts;
      for (uint64_t& count : counts) {
        const uint64_t chain = scramble(++number) % chains;
        count = chain_blocks(chain);
        for (uint64_t i = 0; i < count; ++i) write_key(&keys[(used + i) * kKeyBytes], chain * kChain + i);
        used += count;
      }
      timed([&] {
        uint64_t at = 0;
        for (const uint64_t count : counts) {
          const auto result =
              index.match(kTenant, std::span(keys).subspan(at * kKeyBytes, count * kKeyBytes));
          ok = ok && result->leading_run == count;
          at += count;
        }
      });
      done += used;
    }
  }

  IndexBenchmarkOptions options;
  BlockIndex index;
  uint64_t chains;
  uint64_t done = 0;
  double spent_s = 0;
  double longest_s = 0;
  bool ok = true;
};

}  // namespace

Result<IndexBenchmark> index_benchmark(IndexBenchmarkOptions options) {
  if (options.blocks == 0 || options.holders == 0 || options.operations == 0 ||
      options.holders > kIndexHoldersMax) {
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
