#include "wire/messages.h"

namespace mooncache::wire {

namespace {

template <size_t N>
void put_array(Writer& out, const std::array<std::byte, N>& bytes) {
  out.raw(bytes);
}

template <size_t N>
void take_array(Reader& in, std::array<std::byte, N>& bytes) {
  const auto taken = in.take(N);
  if (taken.size() == N) std::memcpy(bytes.data(), taken.data(), N);
}

void encode_extent(Writer& out, const WireExtent& extent) {
  out.u64(extent.grant);
  out.u32(extent.segment);
  out.u32(extent.slot);
  out.u64(extent.generation);
  out.u64(extent.offset);
  out.u64(extent.size);
}

WireExtent decode_extent(Reader& in) {
  WireExtent extent;
  extent.grant = in.u64();
  extent.segment = in.u32();
  extent.slot = in.u32();
  extent.generation = in.u64();
  extent.offset = in.u64();
  extent.size = in.u64();
  return extent;
}

Code take_code(Reader& in) {
  return static_cast<Code>(in.u16());
}
void put_code(Writer& out, Code code) {
  out.u16(static_cast<uint16_t>(code));
}

template <typename Item, typename Size>
std::optional<uint64_t> sum_bytes(std::span<const Item> items, Size size) {
  uint64_t total = 0;
  for (const Item& item : items) {
    const uint64_t bytes = size(item);
    if (bytes > kMaxPayloadBytes || total + bytes > kMaxPayloadBytes) return std::nullopt;
    total += bytes;
  }
  return total;
}

}  // namespace

void HelloResponse::encode(Writer& out) const {
  put_array(out, server_nonce);
}

std::optional<HelloResponse> HelloResponse::decode(Reader& in) {
  HelloResponse response;
  take_array(in, response.server_nonce);
  if (!in.ok()) return std::nullopt;
  return response;
}

void AuthRequest::encode(Writer& out) const {
  put_array(out, mac);
}

std::optional<AuthRequest> AuthRequest::decode(Meta meta) {
  Reader in(meta);
  AuthRequest request;
  take_array(in, request.mac);
  if (!in.done()) return std::nullopt;
  return request;
}

void AuthResponse::encode(Writer& out) const {
  put_array(out, server_mac);
  out.u16(minor);
  out.u32(capabilities);
  out.u64(incarnation);
  out.str16(node_id);
  out.str16(host_id);
  out.u32(max_items);
  out.u32(max_meta_bytes);
  out.u64(max_payload_bytes);
}

std::optional<AuthResponse> AuthResponse::decode(Reader& in) {
  AuthResponse response;
  take_array(in, response.server_mac);
  response.minor = in.u16();
  response.capabilities = in.u32();
  response.incarnation = in.u64();
  response.node_id = in.str16();
  response.host_id = in.str16();
  response.max_items = in.u32();
  response.max_meta_bytes = in.u32();
  response.max_payload_bytes = in.u64();
  if (!in.ok()) return std::nullopt;  // trailing bytes allowed: see HelloRequest
  return response;
}

void PutItem::encode(Writer& out) const {
  out.key(key);
  out.u64(size);
  out.u32(crc32c);
  out.u32(wait_ms);
}
PutItem PutItem::decode(Reader& in) {
  PutItem item;
  item.key = in.key();
  item.size = in.u64();
  item.crc32c = in.u32();
  item.wait_ms = in.u32();
  return item;
}

void GetItem::encode(Writer& out) const {
  out.key(key);
  out.u64(offset);
  out.u64(max_length);
}
GetItem GetItem::decode(Reader& in) {
  GetItem item;
  item.key = in.key();
  item.offset = in.u64();
  item.max_length = in.u64();
  return item;
}

void GetResult::encode(Writer& out) const {
  put_code(out, code);
  out.u8(static_cast<uint8_t>(tier));
  out.u8(0);
  out.u32(crc32c);
  out.u64(block_size);
  out.u64(length);
}
GetResult GetResult::decode(Reader& in) {
  GetResult result;
  result.code = take_code(in);
  result.tier = static_cast<Tier>(in.u8());
  in.u8();
  result.crc32c = in.u32();
  result.block_size = in.u64();
  result.length = in.u64();
  return result;
}

void LookupResult::encode(Writer& out) const {
  put_code(out, code);
  out.u8(static_cast<uint8_t>(tier));
  out.u8(0);
  out.u32(crc32c);
  out.u64(size);
  encode_extent(out, extent);
}
LookupResult LookupResult::decode(Reader& in) {
  LookupResult result;
  result.code = take_code(in);
  result.tier = static_cast<Tier>(in.u8());
  in.u8();
  result.crc32c = in.u32();
  result.size = in.u64();
  result.extent = decode_extent(in);
  return result;
}

void ReserveItem::encode(Writer& out) const {
  out.key(key);
  out.u64(size);
}
ReserveItem ReserveItem::decode(Reader& in) {
  ReserveItem item;
  item.key = in.key();
  item.size = in.u64();
  return item;
}

void ReserveResult::encode(Writer& out) const {
  put_code(out, code);
  out.u16(0);
  out.u32(0);
  encode_extent(out, extent);
}
ReserveResult ReserveResult::decode(Reader& in) {
  ReserveResult result;
  result.code = take_code(in);
  in.u16();
  in.u32();
  result.extent = decode_extent(in);
  return result;
}

void WriteRange::encode(Writer& out) const {
  out.u64(offset);
  out.u64(length);
  out.u32(crc32c);
  out.u32(0);
}
WriteRange WriteRange::decode(Reader& in) {
  WriteRange range;
  range.offset = in.u64();
  range.length = in.u64();
  range.crc32c = in.u32();
  in.u32();
  return range;
}

void ReservedRange::encode(Writer& out) const {
  out.u64(reservation);
  range.encode(out);
}
ReservedRange ReservedRange::decode(Reader& in) {
  const uint64_t reservation = in.u64();
  return {reservation, WriteRange::decode(in)};
}

void CommitItem::encode(Writer& out) const {
  out.u64(reservation);
  out.u32(crc32c);
  out.u32(flags);
}
CommitItem CommitItem::decode(Reader& in) {
  CommitItem item;
  item.reservation = in.u64();
  item.crc32c = in.u32();
  item.flags = in.u32();
  return item;
}

void StatResult::encode(Writer& out) const {
  put_code(out, code);
  out.u8(static_cast<uint8_t>(tier));
  out.u8(0);
  out.u32(crc32c);
  out.u64(size);
  out.u32(pins);
  out.u32(hits);
  out.u64(age_ms);
}
StatResult StatResult::decode(Reader& in) {
  StatResult result;
  result.code = take_code(in);
  result.tier = static_cast<Tier>(in.u8());
  in.u8();
  result.crc32c = in.u32();
  result.size = in.u64();
  result.pins = in.u32();
  result.hits = in.u32();
  result.age_ms = in.u64();
  return result;
}

void ListItem::encode(Writer& out) const {
  out.key(key);
  out.u64(size);
  out.u32(static_cast<uint32_t>(tier));
  out.u32(hits);
}
ListItem ListItem::decode(Reader& in) {
  ListItem item;
  item.key = in.key();
  item.size = in.u64();
  item.tier = static_cast<Tier>(in.u32() & 0xff);
  item.hits = in.u32();
  return item;
}

void SegmentInfo::encode(Writer& out) const {
  out.u32(segment);
  out.u32(kind);
  out.u64(size);
}
SegmentInfo SegmentInfo::decode(Reader& in) {
  SegmentInfo info;
  info.segment = in.u32();
  info.kind = in.u32();
  info.size = in.u64();
  return info;
}

void RdmaAddress::encode(Writer& out) const {
  put_code(out, code);
  out.u16(lid);
  out.u8(layer);
  out.u8(mtu);
  out.u8(outstanding_reads);
  out.u8(0);
  out.u32(queue_pair);
  out.u32(first_packet);
  put_array(out, gid);
}
RdmaAddress RdmaAddress::decode(Reader& in) {
  RdmaAddress address;
  address.code = take_code(in);
  address.lid = in.u16();
  address.layer = in.u8();
  address.mtu = in.u8();
  address.outstanding_reads = in.u8();
  (void)in.u8();
  address.queue_pair = in.u32();
  address.first_packet = in.u32();
  take_array(in, address.gid);
  return address;
}

void Exposure::encode(Writer& out) const {
  put_code(out, code);
  out.u16(0);
  out.u32(0);
  out.u64(address);
  for (const uint32_t key : keys) out.u32(key);
}
Exposure Exposure::decode(Reader& in) {
  Exposure exposure;
  exposure.code = take_code(in);
  (void)in.u16();
  (void)in.u32();
  exposure.address = in.u64();
  for (uint32_t& key : exposure.keys) key = in.u32();
  return exposure;
}

void encode_keys(Writer& out, std::span<const Key> keys) {
  out.u32(static_cast<uint32_t>(keys.size()));
  out.raw(std::as_bytes(keys));
}

std::optional<std::vector<Key>> decode_keys(Reader& in) {
  const uint32_t count = in.u32();
  if (!in.ok() || count > kMaxItems || in.remaining() < count * kKeyBytes) return std::nullopt;
  std::vector<Key> keys(count);
  const auto bytes = in.take(count * kKeyBytes);
  if (!bytes.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

void encode_codes(Writer& out, std::span<const Code> codes) {
  out.u32(static_cast<uint32_t>(codes.size()));
  for (const Code code : codes) put_code(out, code);
}

std::optional<std::vector<Code>> decode_codes(Reader& in) {
  const uint32_t count = in.u32();
  if (!in.ok() || count > kMaxItems || in.remaining() < count * sizeof(uint16_t)) return std::nullopt;
  std::vector<Code> codes(count);
  for (Code& code : codes) code = take_code(in);
  return codes;
}

void encode_grants(Writer& out, std::span<const uint64_t> grants) {
  out.u32(static_cast<uint32_t>(grants.size()));
  for (const uint64_t grant : grants) out.u64(grant);
}

std::optional<std::vector<uint64_t>> decode_grants(Reader& in) {
  const uint32_t count = in.u32();
  if (!in.ok() || count > kMaxItems || in.remaining() < count * sizeof(uint64_t)) return std::nullopt;
  std::vector<uint64_t> grants(count);
  for (uint64_t& grant : grants) grant = in.u64();
  return grants;
}

std::optional<std::vector<Key>> decode_all_keys(Meta meta) {
  Reader in(meta);
  auto keys = decode_keys(in);
  return in.done() ? keys : std::nullopt;
}

std::optional<std::vector<uint64_t>> decode_all_grants(Meta meta) {
  Reader in(meta);
  auto grants = decode_grants(in);
  return in.done() ? grants : std::nullopt;
}

void ReserveRequest::encode(Writer& out) const {
  out.u32(static_cast<uint32_t>(items.size()));
  out.u32(wait_ms);
  for (const ReserveItem& item : items) item.encode(out);
}

std::optional<ReserveRequest> ReserveRequest::decode(Meta meta) {
  Reader in(meta);
  ReserveRequest request;
  const uint32_t count = in.u32();
  request.wait_ms = in.u32();
  if (!in.ok() || count > kMaxItems || in.remaining() != count * ReserveItem::kWireBytes) return std::nullopt;
  request.items.reserve(count);
  for (uint32_t i = 0; i < count; ++i) request.items.push_back(ReserveItem::decode(in));
  return request;
}

void WriteRequest::encode(Writer& out) const {
  out.u64(reservation);
  encode_items<WriteRange>(out, ranges);
}

std::optional<WriteRequest> WriteRequest::decode(Meta meta) {
  Reader in(meta);
  WriteRequest request;
  request.reservation = in.u64();
  auto ranges = decode_items<WriteRange>(in);
  if (!ranges || !in.done()) return std::nullopt;
  request.ranges = std::move(*ranges);
  return request;
}

void PinRequest::encode(Writer& out) const {
  out.u32(ttl_ms);
  encode_keys(out, keys);
}

std::optional<PinRequest> PinRequest::decode(Meta meta) {
  Reader in(meta);
  PinRequest request;
  request.ttl_ms = in.u32();
  auto keys = decode_keys(in);
  if (!keys || !in.done()) return std::nullopt;
  request.keys = std::move(*keys);
  return request;
}

void WaitRequest::encode(Writer& out) const {
  out.u32(timeout_ms);
  out.u32(news_ms);
  encode_keys(out, keys);
  if (heartbeat_ms != 0) out.u32(heartbeat_ms);
}

std::optional<WaitRequest> WaitRequest::decode(Meta meta, bool heartbeats) {
  Reader in(meta);
  WaitRequest request{.timeout_ms = in.u32(), .news_ms = in.u32(), .keys = {}};
  auto keys = decode_keys(in);
  if (heartbeats) request.heartbeat_ms = in.u32();
  if (!keys || keys->empty() || !in.done() || heartbeats != (request.heartbeat_ms != 0)) return std::nullopt;
  request.keys = std::move(*keys);
  return request;
}

void ReadRequest::encode(Writer& out) const {
  out.u64(grant);
  out.u64(offset);
  out.u64(length);
}

std::optional<ReadRequest> ReadRequest::decode(Meta meta) {
  Reader in(meta);
  ReadRequest request;
  request.grant = in.u64();
  request.offset = in.u64();
  request.length = in.u64();
  if (!in.done()) return std::nullopt;
  return request;
}

void ListRequest::encode(Writer& out) const {
  out.u64(cursor);
  out.u32(limit);
}

std::optional<ListRequest> ListRequest::decode(Meta meta) {
  Reader in(meta);
  ListRequest request;
  request.cursor = in.u64();
  request.limit = in.u32();
  if (!in.done() || request.limit > kMaxItems) return std::nullopt;
  return request;
}

void WaitNews::encode(Writer& out) const {
  out.u32(static_cast<uint32_t>(state));
  out.u32(static_cast<uint32_t>(positions.size()));
  for (const uint32_t position : positions) out.u32(position);
}

std::optional<WaitNews> WaitNews::decode(Reader& in, uint32_t key_count) {
  WaitNews news;
  const uint32_t state = in.u32();
  const uint32_t count = in.u32();
  if (!in.ok() || state > static_cast<uint32_t>(WaitState::kWithdrawn) || count > key_count ||
      count > kMaxItems || in.remaining() != count * sizeof(uint32_t))
    return std::nullopt;
  news.state = static_cast<WaitState>(state);
  news.positions.resize(count);
  for (uint32_t& position : news.positions) {
    position = in.u32();
    if (position >= key_count) return std::nullopt;
  }
  return news;
}

void ListResponse::encode(Writer& out) const {
  out.u64(next_cursor);
  encode_items<ListItem>(out, items);
}

std::optional<ListResponse> ListResponse::decode(Reader& in) {
  ListResponse response;
  response.next_cursor = in.u64();
  auto items = decode_items<ListItem>(in);
  if (!items || !in.done()) return std::nullopt;
  response.items = std::move(*items);
  return response;
}

void NodeStatResponse::encode(Writer& out) const {
  out.u32(static_cast<uint32_t>(values.size()));
  for (const auto& [name, value] : values) {
    out.str16(name);
    out.u64(value);
  }
}

std::optional<NodeStatResponse> NodeStatResponse::decode(Reader& in) {
  NodeStatResponse response;
  const uint32_t count = in.u32();
  // the smallest value takes ten bytes: an empty name and its number
  if (!in.ok() || count > kMaxItems || in.remaining() < count * 10ull) return std::nullopt;
  response.values.reserve(count);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    std::string name = in.str16();
    const uint64_t value = in.u64();
    response.values.emplace_back(std::move(name), value);
  }
  if (!in.done()) return std::nullopt;
  return response;
}

void encode_status(Writer& out, const Status& status) {
  put_code(out, status.code);
  out.str16(status.message);
}

std::optional<Status> decode_status(Reader& in) {
  Status status;
  status.code = take_code(in);
  status.message = in.str16();
  if (!in.ok()) return std::nullopt;
  return status;
}

std::optional<uint64_t> payload_bytes(std::span<const PutItem> items) {
  return sum_bytes(items, [](const PutItem& item) { return item.size; });
}
std::optional<uint64_t> payload_bytes(std::span<const ReservedRange> ranges) {
  return sum_bytes(ranges, [](const ReservedRange& item) { return item.range.length; });
}
std::optional<uint64_t> payload_bytes(std::span<const GetResult> results) {
  return sum_bytes(results, [](const GetResult& result) { return result.length; });
}

}  // namespace mooncache::wire
