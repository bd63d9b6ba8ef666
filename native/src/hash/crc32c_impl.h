// What the CRC-32C implementations share: arithmetic modulo the Castagnoli polynomial and the
// table through which one of them is chosen at run time. A CRC here is "reflected": bit 31 is the
// coefficient of x^0. Functions named *_raw work on the bare register; the public API complements
// it before and after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace mooncache::hash {

inline constexpr uint32_t kCastagnoli = 0x82f63b78;  // reflected, without the x^32 term

// a * b modulo the polynomial.
constexpr uint32_t multiply_mod(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kCastagnoli : b >> 1;
  }
  return product;
}

// x^exponent modulo the polynomial.
constexpr uint32_t power_mod(uint64_t exponent) {
  uint32_t result = 0x80000000u;  // x^0
  uint32_t square = 0x40000000u;  // x^1
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = multiply_mod(result, square);
    square = multiply_mod(square, square);
  }
  return result;
}

// One way to compute. `copy_raw` also writes the bytes to `destination`; `stream` asks for stores
// that go round the caches (they are fenced before the function returns). It reads each byte of the source
// once: the source may be memory of another process that writes meanwhile, and the checksum has to be that
// of the bytes which were delivered.
struct Crc32cImplementation {
  std::string_view name;
  uint32_t (*raw)(uint32_t state, const std::byte* bytes, size_t size);
  uint32_t (*copy_raw)(uint32_t state, std::byte* destination, const std::byte* source, size_t size,
                       bool stream);
};

// Those that this processor can run, the plainest first. Never empty.
std::span<const Crc32cImplementation> crc32c_implementations();

// Which of `all` to use when each takes `cost` (in any unit) for the same bytes: the last one, unless another
// is much faster. Then instructions are emulated, which makes the processor's own the slowest way of all.
size_t pick_crc32c(std::span<const Crc32cImplementation> all, std::span<const double> cost);

// Per architecture: appends what the processor supports to `list` (room for 4) and returns how many.
size_t detect_accelerated_crc32c(Crc32cImplementation* list);

}  // namespace mooncache::hash
