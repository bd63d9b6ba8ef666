#include "wire/cluster_map.h"

#include <bit>
#include <cmath>

namespace mooncache::wire {

namespace {

constexpr uint8_t kRdma = 1;
constexpr size_t kRecordHeadBytes = sizeof(uint16_t);

bool text_fits(const std::string& text) {
  return text.size() <= kMapTextBytesMax;
}

bool node_valid(const MapNode& node) {
  bool fits = node.index < kMapNodesMax && std::isfinite(node.weight) && node.weight >= 0 &&
              node.labels.size() <= kMapLabelsMax;
  for (const std::string* text : {&node.node_id, &node.host_id, &node.tcp_host, &node.unix_path, &node.arena})
    fits = fits && text_fits(*text);
  for (const auto& [name, value] : node.labels) fits = fits && text_fits(name) && text_fits(value);
  return fits;
}

// What is known of one record; the rest of it is a later version's.
std::optional<MapNode> decode_map_node(Reader& page) {
  Reader in(page.take(page.u16()));
  if (!page.ok()) return std::nullopt;
  MapNode node;
  node.index = in.u32();
  node.incarnation = in.u64();
  const uint8_t state = in.u8();
  const uint8_t flags = in.u8();
  node.tcp_port = in.u16();
  node.free_bytes = in.u64();
  node.weight = std::bit_cast<double>(in.u64());
  node.node_id = in.str16();
  node.host_id = in.str16();
  node.tcp_host = in.str16();
  node.unix_path = in.str16();
  node.arena = in.str16();
  const uint16_t labels = in.u16();
  for (uint16_t i = 0; i < labels && in.ok() && i <= kMapLabelsMax; ++i) {
    std::string name = in.str16();
    node.labels.emplace_back(std::move(name), in.str16());
  }
  // A state that only a later version knows is no reason to write there.
  node.state = state <= static_cast<uint8_t>(NodeHealth::kDead) ? static_cast<NodeHealth>(state)
                                                                : NodeHealth::kSuspect;
  node.rdma = (flags & kRdma) != 0;
  if (!in.ok() || !node_valid(node)) return std::nullopt;
  return node;
}

}  // namespace

bool map_valid(const ClusterMap& map) {
  if (map.nodes.size() > kMapNodesMax) return false;
  std::vector<bool> seen(kMapNodesMax, false);
  for (const MapNode& node : map.nodes) {
    if (!node_valid(node) || seen[node.index]) return false;
    seen[node.index] = true;
  }
  return true;
}

void encode_map_node(Writer& out, const MapNode& node) {
  Writer record(128);
  record.u32(node.index);
  record.u64(node.incarnation);
  record.u8(static_cast<uint8_t>(node.state));
  record.u8(node.rdma ? kRdma : 0);
  record.u16(node.tcp_port);
  record.u64(node.free_bytes);
  record.u64(std::bit_cast<uint64_t>(node.weight));
  for (const std::string* text : {&node.node_id, &node.host_id, &node.tcp_host, &node.unix_path, &node.arena})
    record.str16(*text);
  record.u16(static_cast<uint16_t>(node.labels.size()));
  for (const auto& [name, value] : node.labels) {
    record.str16(name);
    record.str16(value);
  }
  out.u16(static_cast<uint16_t>(record.size()));
  out.raw(record.view());
}

void ClusterMapRequest::encode(Writer& out) const {
  out.u64(known_term);
  out.u64(known_epoch);
  out.u32(first);
}

std::optional<ClusterMapRequest> ClusterMapRequest::decode(Meta meta) {
  Reader in(meta);
  ClusterMapRequest request;
  request.known_term = in.u64();
  request.known_epoch = in.u64();
  request.first = in.u32();
  if (!in.done()) return std::nullopt;
  return request;
}

void ClusterMapResponse::encode(Writer& out) const {
  out.u64(term);
  out.u64(epoch);
  out.u32(node_count);
  out.u32(first);
  out.u32(static_cast<uint32_t>(nodes.size()));
  for (const MapNode& node : nodes) encode_map_node(out, node);
}

std::optional<ClusterMapResponse> ClusterMapResponse::decode(Reader& in) {
  ClusterMapResponse response;
  response.term = in.u64();
  response.epoch = in.u64();
  response.node_count = in.u32();
  response.first = in.u32();
  const uint32_t count = in.u32();
  if (!in.ok() || count > kMaxItems || response.node_count > kMapNodesMax) return std::nullopt;
  if (uint64_t{response.first} + count > response.node_count) return std::nullopt;
  if (in.remaining() < count * kRecordHeadBytes) return std::nullopt;
  response.nodes.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    auto node = decode_map_node(in);
    if (!node) return std::nullopt;
    response.nodes.push_back(std::move(*node));
  }
  if (!in.done()) return std::nullopt;
  return response;
}

}  // namespace mooncache::wire
