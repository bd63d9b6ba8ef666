// Messages between transfer engines: ranges of memory that one engine has registered and another one reads or
// writes, and the descriptor by which an engine is found. Checked like those of messages.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "wire/messages.h"

namespace mooncache::wire {

inline constexpr uint32_t kMaxNoticeBytes = 64 << 10;
inline constexpr uint32_t kMaxRegions = 4096;
inline constexpr size_t kMaxLabelBytes = 64;
inline constexpr size_t kMaxDescriptorBytes = kMaxMetaBytes - 1024;

// Item of READ_RANGES. Addresses are those that the owner gave its regions, not pointers of any process.
struct EngineRange {
  static constexpr size_t kWireBytes = 16;
  uint64_t address = 0;
  uint64_t length = 0;
  void encode(Writer& out) const;
  static EngineRange decode(Reader& in);
};

// Item of WRITE_RANGES; its bytes are in the payload.
struct EngineWrite {
  static constexpr size_t kWireBytes = 20;
  EngineRange range;
  uint32_t crc32c = 0;
  void encode(Writer& out) const;
  static EngineWrite decode(Reader& in);
};

// Sum of the lengths; nothing: it is more than one payload may carry.
std::optional<uint64_t> payload_bytes(std::span<const EngineRange> ranges);
std::optional<uint64_t> payload_bytes(std::span<const EngineWrite> writes);

// OPEN_RANGES: the peer is about to copy within mapped memory, and will say CLOSE_RANGES.
struct OpenRangesRequest {
  bool write = false;
  std::vector<EngineRange> ranges;
  void encode(Writer& out) const;
  static std::optional<OpenRangesRequest> decode(Meta meta);
};

// Answer to MAP_REGION. With it come one descriptor to read, and one to write where `writable` says so.
struct MappedRegion {
  uint64_t base = 0;
  uint64_t size = 0;
  bool writable = false;
  void encode(Writer& out) const;
  static std::optional<MappedRegion> decode(Reader& in);
};

struct DescribedRegion {
  static constexpr uint8_t kReadable = 1;  // by whom the descriptor is for, somewhere in it
  static constexpr uint8_t kWritable = 2;
  static constexpr uint8_t kMappable = 4;  // processes of the same host may map it
  uint64_t base = 0;
  uint64_t size = 0;
  uint8_t flags = 0;
  std::string label;
};

// How an engine is reached and what it has registered. It holds no secret: who uses it proves a token. Bytes
// of one end with a CRC-32C; decode() takes exactly one.
struct EngineDescriptor {
  std::string name;
  std::string host_id;
  uint64_t incarnation = 0;
  std::string tcp_host;
  uint16_t tcp_port = 0;
  bool tls = false;
  std::string unix_path;
  std::vector<DescribedRegion> regions;
  void encode(Writer& out) const;
  static std::optional<EngineDescriptor> decode(Meta bytes);
};

}  // namespace mooncache::wire
