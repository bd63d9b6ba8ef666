// How bytes are shared out among rails: decisions over plain values, without a device, a clock or a lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncache::rdma {

// A piece never costs more in requests than it gains in balance: below the first size the request itself
// counts, above the second one a rail that stalls holds up too much.
inline constexpr uint32_t kPieceBytesMin = 64 << 10;
inline constexpr uint32_t kPieceBytesMax = 1 << 20;

// Bytes of one piece of a transfer of `length` bytes in registered memory over `rails` rails: four for each
// rail, so that one that is slower than it says ends with fewer of them. Whole packets, and never more than
// a device takes in one message (0: it does not say).
uint32_t piece_bytes(uint64_t length, size_t rails, uint32_t max_message_bytes);

}  // namespace mooncache::rdma
