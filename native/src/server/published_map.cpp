#include "server/published_map.h"

#include <algorithm>

namespace mooncache::server {

bool PublishedMap::publish(const ClusterMap& map) {
  if (!wire::map_valid(map)) return false;
  auto fresh = std::make_shared<Encoded>();
  fresh->term = map.term;
  fresh->epoch = map.epoch;
  fresh->ends.reserve(map.nodes.size());
  Writer records;
  for (const MapNode& node : map.nodes) {
    wire::encode_map_node(records, node);
    if (records.size() > kMapBytesMax) return false;
    fresh->ends.push_back(records.size());
  }
  fresh->records = records.take();
  const std::lock_guard lock(mutex_);
  current_ = std::move(fresh);
  return true;
}

bool PublishedMap::write_page(const wire::ClusterMapRequest& request, Writer& out) const {
  std::shared_ptr<const Encoded> map;
  {
    const std::lock_guard lock(mutex_);
    map = current_;
  }
  if (!map) return false;
  const size_t nodes = map->ends.size();
  const bool same = request.known_term == map->term && request.known_epoch == map->epoch;
  const bool goes_on = same && request.first > 0 && request.first <= nodes;
  const size_t first = goes_on ? request.first : 0;
  const size_t begin = first == 0 ? 0 : map->ends[first - 1];
  size_t last = first;
  if (!same || goes_on) {
    const size_t most = std::min<size_t>(nodes, first + wire::kMaxItems);
    while (last < most && (last == first || map->ends[last] - begin <= wire::kMapPageBytes)) ++last;
  }
  out.u64(map->term);
  out.u64(map->epoch);
  out.u32(static_cast<uint32_t>(nodes));
  out.u32(static_cast<uint32_t>(first));
  out.u32(static_cast<uint32_t>(last - first));
  const size_t end = last == 0 ? 0 : map->ends[last - 1];
  out.raw(std::span(map->records).subspan(begin, end - begin));
  return true;
}

}  // namespace mooncache::server
