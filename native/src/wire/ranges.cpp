#include "wire/ranges.h"

#include <algorithm>

#include "mooncache/crc32c.h"

namespace mooncache::wire {

namespace {

constexpr uint32_t kDescriptorMagic = 0x4445434d;  // "MCED"
constexpr uint16_t kDescriptorVersion = 1;
constexpr size_t kCheckBytes = sizeof(uint32_t);
constexpr size_t kLeastRegionBytes = 19;

bool add(uint64_t& total, uint64_t length) {
  if (length > kMaxPayloadBytes - total) return false;
  total += length;
  return true;
}

bool fits(const DescribedRegion& region) {
  return region.size > 0 && region.base <= UINT64_MAX - region.size && region.label.size() <= kMaxLabelBytes;
}

}  // namespace

void EngineRange::encode(Writer& out) const {
  out.u64(address);
  out.u64(length);
}

EngineRange EngineRange::decode(Reader& in) {
  EngineRange range;
  range.address = in.u64();
  range.length = in.u64();
  return range;
}

void EngineWrite::encode(Writer& out) const {
  range.encode(out);
  out.u32(crc32c);
}

EngineWrite EngineWrite::decode(Reader& in) {
  EngineWrite write;
  write.range = EngineRange::decode(in);
  write.crc32c = in.u32();
  return write;
}

std::optional<uint64_t> payload_bytes(std::span<const EngineRange> ranges) {
  uint64_t total = 0;
  for (const EngineRange& range : ranges)
    if (!add(total, range.length)) return std::nullopt;
  return total;
}

std::optional<uint64_t> payload_bytes(std::span<const EngineWrite> writes) {
  uint64_t total = 0;
  for (const EngineWrite& write : writes)
    if (!add(total, write.range.length)) return std::nullopt;
  return total;
}

void OpenRangesRequest::encode(Writer& out) const {
  out.u32(write ? 1 : 0);
  encode_items<EngineRange>(out, ranges);
}

std::optional<OpenRangesRequest> OpenRangesRequest::decode(Meta meta) {
  Reader in(meta);
  OpenRangesRequest request;
  const uint32_t write = in.u32();
  if (!in.ok() || write > 1) return std::nullopt;
  auto ranges = decode_all_items<EngineRange>(meta.subspan(sizeof write));
  if (!ranges) return std::nullopt;
  request.write = write != 0;
  request.ranges = std::move(*ranges);
  return request;
}

void MappedRegion::encode(Writer& out) const {
  out.u64(base);
  out.u64(size);
  out.u8(writable ? 1 : 0);
}

std::optional<MappedRegion> MappedRegion::decode(Reader& in) {
  MappedRegion region;
  region.base = in.u64();
  region.size = in.u64();
  const uint8_t writable = in.u8();
  if (!in.done() || writable > 1 || region.size == 0 || region.base > UINT64_MAX - region.size)
    return std::nullopt;
  region.writable = writable != 0;
  return region;
}

void EngineDescriptor::encode(Writer& out) const {
  const size_t begin = out.size();
  out.u32(kDescriptorMagic);
  out.u16(kDescriptorVersion);
  out.str16(name);
  out.str16(host_id);
  out.u64(incarnation);
  out.str16(tcp_host);
  out.u16(tcp_port);
  out.u8(tls ? 1 : 0);
  out.str16(unix_path);
  out.u32(static_cast<uint32_t>(regions.size()));
  for (const DescribedRegion& region : regions) {
    out.u64(region.base);
    out.u64(region.size);
    out.u8(region.flags);
    out.str16(region.label);
  }
  out.u32(crc32c(out.view().subspan(begin)));
}

std::optional<EngineDescriptor> EngineDescriptor::decode(Meta bytes) {
  if (bytes.size() < kCheckBytes || bytes.size() > kMaxDescriptorBytes) return std::nullopt;
  Reader check(bytes.last(kCheckBytes));
  const Meta body = bytes.first(bytes.size() - kCheckBytes);
  if (crc32c(body) != check.u32()) return std::nullopt;
  Reader in(body);
  if (in.u32() != kDescriptorMagic || in.u16() != kDescriptorVersion) return std::nullopt;
  EngineDescriptor descriptor;
  descriptor.name = in.str16();
  descriptor.host_id = in.str16();
  descriptor.incarnation = in.u64();
  descriptor.tcp_host = in.str16();
  descriptor.tcp_port = in.u16();
  const uint8_t tls = in.u8();
  descriptor.tls = tls != 0;
  descriptor.unix_path = in.str16();
  const uint32_t count = in.u32();
  if (!in.ok() || tls > 1 || count > kMaxRegions || in.remaining() < count * kLeastRegionBytes)
    return std::nullopt;
  descriptor.regions.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    DescribedRegion region;
    region.base = in.u64();
    region.size = in.u64();
    region.flags = in.u8();
    region.label = in.str16();
    if (!in.ok() || !fits(region)) return std::nullopt;
    descriptor.regions.push_back(std::move(region));
  }
  if (!in.done()) return std::nullopt;
  return descriptor;
}

}  // namespace mooncache::wire
