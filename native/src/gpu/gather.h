// What the processor does around the gather kernel: its tables, the cutting of slices into pieces, the
// inversions of CRC-32C at the end. And the compiler, opened at run time.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mooncache/gpu.h"

namespace mooncache::gpu {

struct GatherPiece {  // as in gather.cu.inc
  uint64_t from = 0;
  uint64_t to = 0;  // 0: only the checksum is wanted
  uint64_t behind = 0;
  uint32_t size = 0;
  uint32_t block = 0;
};
static_assert(sizeof(GatherPiece) == 32);

inline constexpr uint32_t kPieceBytes = 64
                                        << 10;  // of one warp: long enough that its last step does not count
inline constexpr uint32_t kWarpsPerBlock = 4;
inline constexpr size_t kConstants = 2048 + 48;

// The kernel's tables and powers.
const std::array<uint32_t, kConstants>& gather_constants();

// Slices packed one behind the other at `packed` (out of the slices, or into them when `into`), cut at
// kPieceBytes. blocks[i] slices make block i. INVALID_ARGUMENT when they do not add up.
Result<std::vector<GatherPiece>> cut(std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks,
                                     uint64_t packed, bool into);
// The CRC-32C of a block of `size` bytes from the kernel's sum.
uint32_t finish_crc(uint32_t sum, uint64_t size);

// The kernel for a device of this compute capability, as text for the driver. TRANSPORT_UNAVAILABLE with why
// not.
Result<std::string> compile_gather(const std::string& nvrtc, int major, int minor);

}  // namespace mooncache::gpu
