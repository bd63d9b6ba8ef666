// CRC-32C (Castagnoli), the integrity check that travels with every block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace mooncache {

// CRC of `bytes`, continuing from `seed` (the CRC of what came before; 0 at the start).
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);

// CRC of A followed by B from crc(A), crc(B) and the length of B in bytes.
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

// Copies `size` bytes and returns their CRC in one pass over memory. Ranges must not overlap. They are a
// piece of `together` bytes (0: these alone) that are copied in one go: what is more than caches hold is
// written round them.
uint32_t copy_crc32c(std::byte* destination, const std::byte* source, size_t size, uint32_t seed = 0,
                     uint64_t together = 0);

// The version in use, the fastest that this processor runs: "portable", "sse42", "avx512" or "armv8".
std::string_view crc32c_implementation();

}  // namespace mooncache
