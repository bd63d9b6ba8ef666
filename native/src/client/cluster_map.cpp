// Client::cluster_map: the pages of a node's answer put together. A map that is replaced meanwhile begins
// anew.
#include "wire/cluster_map.h"

#include <utility>

#include "client/impl.h"

namespace mooncache {

namespace {

constexpr int kBeginningsMax = 4;

class MapPages {
 public:
  MapPages(uint64_t known_term, uint64_t known_epoch) : known_term_(known_term), known_epoch_(known_epoch) {}

  wire::ClusterMapRequest next() const {
    if (beginnings_ == 0) return {known_term_, known_epoch_, 0};
    return {map_.term, map_.epoch, static_cast<uint32_t>(map_.nodes.size())};
  }
  // What the peer said makes no sense, or has no end.
  Status take(wire::ClusterMapResponse page, size_t bytes) {
    const auto wrong = [](const char* text) { return Status{Code::kProtocolError, text}; };
    const bool goes_on = beginnings_ > 0 && page.term == map_.term && page.epoch == map_.epoch;
    if (page.first != (goes_on ? map_.nodes.size() : 0))
      return wrong("a page of a cluster map out of its turn");
    if (beginnings_ == 0 && page.term == known_term_ && page.epoch == known_epoch_ && page.nodes.empty()) {
      known_ = true;
      return Status::ok();
    }
    if (!goes_on) {
      if (++beginnings_ > kBeginningsMax)
        return {Code::kIncomplete, "the cluster map changes too fast to be read"};
      map_ = {page.term, page.epoch, {}};
      count_ = page.node_count;
      bytes_ = 0;
    }
    bytes_ += bytes;
    if (page.node_count != count_ || (page.nodes.empty() && count_ > 0) || bytes_ > kMapBytesMax)
      return wrong("malformed pages of a cluster map");
    for (MapNode& node : page.nodes) map_.nodes.push_back(std::move(node));
    if (done() && !wire::map_valid(map_)) return wrong("a cluster map with a node twice");
    return Status::ok();
  }
  bool done() const { return known_ || (beginnings_ > 0 && map_.nodes.size() >= count_); }
  std::optional<ClusterMap> map() && {
    if (known_) return std::nullopt;
    return std::move(map_);
  }

 private:
  const uint64_t known_term_, known_epoch_;
  ClusterMap map_;
  size_t count_ = 0;
  size_t bytes_ = 0;
  int beginnings_ = 0;
  bool known_ = false;
};

}  // namespace

Result<std::optional<ClusterMap>> Client::cluster_map(uint32_t node, uint64_t known_term,
                                                      uint64_t known_epoch, const CallOptions& options) {
  MapPages pages(known_term, known_epoch);
  while (!pages.done()) {
    Writer meta;
    pages.next().encode(meta);
    CallProgram::Call call{wire::Opcode::kClusterMap, 0, meta.take(), {}, wire::AuthResponse::kHasMap};
    Status status = impl_->one_call(node, call, options, [&](size_t, const Status&, Reader& in) {
      const size_t bytes = in.remaining();
      auto page = wire::ClusterMapResponse::decode(in);
      if (!page) return Status{Code::kProtocolError, "malformed CLUSTER_MAP answer"};
      return pages.take(std::move(*page), bytes);
    });
    if (!status) return status;
  }
  return std::move(pages).map();
}

}  // namespace mooncache
