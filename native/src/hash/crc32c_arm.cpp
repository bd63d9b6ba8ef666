// CRC-32C with the instructions of ARMv8 (optional in 8.0, always there from 8.1), and the empty
// list for architectures that have no version of their own.
#if !defined(__x86_64__)

#include <cstring>

#include "hash/crc32c_impl.h"

#if defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

#define MOONCACHE_ARM_CRC __attribute__((target("+crc")))

namespace mooncache::hash {
namespace {

MOONCACHE_ARM_CRC uint32_t arm_raw(uint32_t state, const std::byte* bytes, size_t size) {
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    state = __crc32cd(state, word);
  }
  for (; size != 0; ++bytes, --size) state = __crc32cb(state, static_cast<uint8_t>(*bytes));
  return state;
}

MOONCACHE_ARM_CRC uint32_t arm_copy_raw(uint32_t state, std::byte* destination, const std::byte* source,
                                        size_t size, bool) {
  constexpr size_t kChunk = 16 << 10;  // stays in the first-level cache between the two steps
  while (size != 0) {
    const size_t step = size < kChunk ? size : kChunk;
    std::memcpy(destination, source, step);
    state = arm_raw(state, destination, step);
    destination += step;
    source += step;
    size -= step;
  }
  return state;
}

}  // namespace

size_t detect_accelerated_crc32c(Crc32cImplementation* list) {
  if ((getauxval(AT_HWCAP) & HWCAP_CRC32) == 0) return 0;
  list[0] = {"armv8", arm_raw, arm_copy_raw};
  return 1;
}

}  // namespace mooncache::hash

#else

namespace mooncache::hash {

size_t detect_accelerated_crc32c(Crc32cImplementation*) {
  return 0;
}

}  // namespace mooncache::hash

#endif
#endif  // !__x86_64__
