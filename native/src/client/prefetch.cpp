// prefetch: blocks that lie on a disk alone, as the last match said, begin to come up at their nodes.
#include "client/impl.h"

namespace mooncache {

Result<PrefetchReport> Client::prefetch(std::span<const Key> keys, const PrefetchLimits& limits,
                                        const CallOptions& options) {
  Impl& impl = *impl_;
  if (Status status = impl.check_call(keys.size(), options); !status) return status;
  const auto map = impl.map();
  std::vector<Question> asked;
  for (uint32_t position = 0; position < map->nodes.size(); ++position) asked.push_back({position, {}});
  for (uint32_t i = 0; i < keys.size(); ++i) {
    const uint32_t position = impl.cold_place(*map, keys[i]);
    if (position != kNoNode) asked[position].items.push_back(i);
  }
  std::erase_if(asked, [&](const Question& question) {
    return question.items.empty() || !impl.may_use(*map, question.position);
  });
  Writer head;
  head.u32(limits.timeout_ms);
  head.u64(limits.max_bytes);
  PrefetchReport report;
  std::vector<Status> ends;
  impl.request_keys(
      *map, asked, keys, wire::Opcode::kPrefetch, 0, head.view(), options,
      [&](const Question&, std::span<const uint32_t>, const Status& status, Reader& in) {
        if (!status) return status;
        const auto answer = wire::PrefetchResponse::decode(in);
        if (!answer) return Status{Code::kProtocolError, "malformed PREFETCH answer"};
        report.blocks += answer->blocks;
        report.bytes += answer->bytes;
        return Status::ok();
      },
      ends);
  for (const Status& end : ends) {
    if (end.code == Code::kCancelled || end.code == Code::kClosed) return end;
  }
  return report;
}

// With one node nothing is remembered, and it knows itself what it has where.
uint32_t Client::Impl::cold_place(const NodeMap& map, const Key& key) {
  if (map.nodes.size() == 1) return 0;
  Nearest nearest;
  const LocationCache::Places places = locations.find(key);
  for (size_t i = 0; i < places.nodes.size() && places.nodes[i] != LocationCache::kNowhere; ++i) {
    const uint32_t position = map.position(places.nodes[i]);
    if (position == kNoNode) continue;
    nearest.offer(position, places.on_disk[i],
                  [&](uint32_t at, bool on_disk) { return rank(map, at) | (on_disk ? kDiskRank : 0u); });
  }
  return nearest.count > 0 && nearest.on_disk[0] ? nearest.first() : kNoNode;
}

}  // namespace mooncache
