// CRC-32C: the portable version, the choice among versions, and combination of two CRCs.
#include "mooncache/crc32c.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

#include "hash/crc32c_impl.h"

namespace mooncache {
namespace hash {
namespace {

// Slicing by eight: row r holds the effect of a byte that is followed by r zero bytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state & 1) ? (state >> 1) ^ kCastagnoli : state >> 1;
    tables[0][byte] = state;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (size_t row = 1; row < 8; ++row) {
      const uint32_t previous = tables[row - 1][byte];
      tables[row][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}
constexpr Tables kTables = make_tables();

uint32_t portable_raw(uint32_t state, const std::byte* bytes, size_t size) {
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    word ^= state;
    state = kTables[7][word & 0xff] ^ kTables[6][(word >> 8) & 0xff] ^ kTables[5][(word >> 16) & 0xff] ^
            kTables[4][(word >> 24) & 0xff] ^ kTables[3][(word >> 32) & 0xff] ^
            kTables[2][(word >> 40) & 0xff] ^ kTables[1][(word >> 48) & 0xff] ^ kTables[0][word >> 56];
  }
  for (; size != 0; ++bytes, --size) {
    state = (state >> 8) ^ kTables[0][(state ^ static_cast<uint32_t>(*bytes)) & 0xff];
  }
  return state;
}

uint32_t portable_copy_raw(uint32_t state, std::byte* destination, const std::byte* source, size_t size,
                           bool) {
  constexpr size_t kChunk = 16 << 10;  // stays in the first-level cache between the two steps
  while (size != 0) {
    const size_t step = size < kChunk ? size : kChunk;
    std::memcpy(destination, source, step);
    state = portable_raw(state, destination, step);
    destination += step;
    source += step;
    size -= step;
  }
  return state;
}

struct Implementations {
  std::array<Crc32cImplementation, 5> list{};
  size_t count = 0;

  Implementations() {
    list[count++] = {"portable", portable_raw, portable_copy_raw};
    count += detect_accelerated_crc32c(&list[count]);
  }
};

const Implementations& implementations() {
  static const Implementations instance;
  return instance;
}

// The best of a few short runs: the scheduler disturbs some of them, never speeds one up.
double cost_of(const Crc32cImplementation& one) {
  static constexpr size_t kBytes = 12 << 10;  // the length of one step of each of them
  static constexpr std::array<std::byte, kBytes> kSample{};
  double best = std::numeric_limits<double>::max();
  for (int run = 0; run < 3; ++run) {
    const auto begun = std::chrono::steady_clock::now();
    [[maybe_unused]] const volatile uint32_t sink = one.raw(0, kSample.data(), kSample.size());
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
  }
  return best;
}

// Measured once, at the first checksum: some tens of microseconds.
const Crc32cImplementation& chosen() {
  static const Crc32cImplementation& one = []() -> const Crc32cImplementation& {
    const auto all = crc32c_implementations();
    std::vector<double> cost;
    for (const Crc32cImplementation& candidate : all) cost.push_back(cost_of(candidate));
    return all[pick_crc32c(all, cost)];
  }();
  return one;
}

// x^(8 * 2^k): shifting a CRC by 2^k bytes. The powers of x repeat after 2^31 - 1 of them, so 64 rows
// cover every length.
constexpr std::array<uint32_t, 64> make_shifts() {
  std::array<uint32_t, 64> shifts{};
  shifts[0] = power_mod(8);
  for (size_t k = 1; k < shifts.size(); ++k) shifts[k] = multiply_mod(shifts[k - 1], shifts[k - 1]);
  return shifts;
}
constexpr std::array<uint32_t, 64> kShifts = make_shifts();

// Below this a copy is likely to be read again soon from the caches; above it the destination would
// only push useful lines out of them.
constexpr size_t kStreamBytes = 256 << 10;
// A piece of more than that, from this size on: the fence behind a smaller one costs what going round the
// caches saves.
constexpr size_t kStreamPieceBytes = 4 << 10;

}  // namespace

std::span<const Crc32cImplementation> crc32c_implementations() {
  return {implementations().list.data(), implementations().count};
}

size_t pick_crc32c(std::span<const Crc32cImplementation> all, std::span<const double> cost) {
  constexpr double kMuchFaster = 2.0;  // real processors: 10 times the other way round
  size_t best = all.size() - 1;
  for (size_t i = best; i-- > 0;) {
    if (cost[i] * kMuchFaster < cost[best]) best = i;
  }
  return best;
}

}  // namespace hash

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  return ~hash::chosen().raw(~seed, bytes.data(), bytes.size());
}

uint32_t copy_crc32c(std::byte* destination, const std::byte* source, size_t size, uint32_t seed,
                     uint64_t together) {
  const bool stream =
      size >= hash::kStreamBytes || (together >= hash::kStreamBytes && size >= hash::kStreamPieceBytes);
  return ~hash::chosen().copy_raw(~seed, destination, source, size, stream);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  for (size_t k = 0; length_b != 0; ++k, length_b >>= 1) {
    if (length_b & 1) crc_a = hash::multiply_mod(crc_a, hash::kShifts[k]);
  }
  return crc_a ^ crc_b;
}

std::string_view crc32c_implementation() {
  return hash::chosen().name;
}

}  // namespace mooncache
