// Data-plane framing, version 1. A connection carries frames: a fixed 32-byte header, then `meta` (small,
// always read whole and covered by the header's check), then `payload` (block bytes, never buffered: it moves
// between the socket and its final place, and each item's own CRC-32C travels in the meta).
//
//   0 u32 magic "MCK1"   4 u8 version   5 u8 opcode (response = request | 0x80)   6 u16 flags
//   8 u64 request id    16 u64 payload bytes   24 u32 meta bytes   28 u32 check = CRC-32C(header[0..28) +
//   meta)
//
// Everything is little endian. Lengths are checked against the limits below before anything is allocated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "mooncache/status.h"

namespace mooncache::wire {

inline constexpr uint32_t kMagic = 0x314b434d;  // "MCK1"
inline constexpr uint8_t kVersion = 1;
inline constexpr uint16_t kMinorVersion = 0;
inline constexpr size_t kHeaderBytes = 32;
inline constexpr uint32_t kMaxMetaBytes = 1u << 20;
inline constexpr uint32_t kMaxItems = 4096;
inline constexpr uint64_t kMaxPayloadBytes = 1ull << 30;
inline constexpr uint32_t kMaxWaitMs = 60'000;
inline constexpr uint32_t kMaxKeyWaitMs = 600'000;  // of a WAIT; longer ones are cut to it

enum class Opcode : uint8_t {
  kHello = 1,
  kAuth = 2,
  kPut = 3,
  kGet = 4,
  kLookup = 5,
  kRelease = 6,
  kReserve = 7,
  kWrite = 8,
  kCommit = 9,
  kAbort = 10,
  kMatch = 11,
  kRemove = 12,
  kPin = 13,
  kUnpin = 14,
  kStat = 15,
  kRead = 16,
  kAttach = 17,
  kList = 18,
  kNodeStat = 19,
  kPing = 20,
  kEndpoint = 21,  // RDMA: exchange of queue pairs, one per rail
  kWait = 22,      // answered later, by any number of frames: see WaitNews
  kGiveUp = 23,
  kPrefetch = 24,
  // Between transfer engines; store nodes refuse them (wire/ranges.h).
  kReadRanges = 25,
  kWriteRanges = 26,
  kOpenRanges = 27,   // the peer copies within memory that it has mapped
  kCloseRanges = 28,  // it has done so
  kMapRegion = 29,    // with descriptors of a region's memory
  kNotify = 30,
  kDescribe = 31,
  kClusterMap = 32,  // of a store node (wire/cluster_map.h)
};
inline constexpr uint8_t kMaxOpcode = 32;
inline constexpr uint8_t kResponseBit = 0x80;

// "PUT", "GET", …; "UNKNOWN" for a number without a meaning.
std::string_view opcode_name(Opcode opcode);

enum Flags : uint16_t {
  kFlagWhole = 1u << 0,     // GET: the destination must hold the whole block
  kFlagNoReply = 1u << 1,   // RELEASE: send no response
  kFlagTouch = 1u << 2,     // MATCH: counts as a use for eviction
  kFlagVerify = 1u << 3,    // GET: check the whole block first, also when no byte of it is asked for
  kFlagExpose = 1u << 4,    // LOOKUP, RESERVE: behind the results, how RDMA reaches each extent
  kFlagWithdraw = 1u << 5,  // WAIT: ends the open one with this request id; no other answer
  // WRITE: ranges of several reservations, each with its own (capability kWritesSeveral)
  kFlagSeveral = 1u << 6,
  // WAIT: behind the keys, how often the peer wants a sign of life (capability kHeartbeats)
  kFlagHeartbeats = 1u << 7,
  // MATCH: behind the answer, which of the blocks are on a disk alone; a node that does not know it says
  // nothing
  kFlagTiers = 1u << 8,
  // MATCH, with kFlagTiers: behind that, which of these are in the shared directory; the same of older nodes
  kFlagShared = 1u << 9,
};

struct FrameHeader {
  Opcode opcode = Opcode::kPing;
  bool response = false;
  uint16_t flags = 0;
  uint64_t request_id = 0;
  uint64_t payload_bytes = 0;
  uint32_t meta_bytes = 0;
  uint32_t check = 0;
};

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

// Header bytes for `header` followed by `meta`; fills in meta_bytes and check.
HeaderBytes encode_header(FrameHeader header, std::span<const std::byte> meta);

// Checks magic, version, opcode and every length. PROTOCOL_ERROR or VERSION_SKEW otherwise.
Result<FrameHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes);

// Checks the header's CRC once the meta has arrived. PROTOCOL_ERROR when bytes were damaged.
Status verify_check(std::span<const std::byte, kHeaderBytes> header_bytes, std::span<const std::byte> meta);

}  // namespace mooncache::wire
