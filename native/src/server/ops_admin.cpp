// REMOVE, PIN, UNPIN, STAT, LIST, ATTACH, NODE_STAT.
#include <algorithm>

#include "server/connection.h"

namespace mooncache::server {

void Connection::do_remove(Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return void(malformed());
  std::vector<Code> codes;
  codes.reserve(keys->size());
  for (const Key& key : *keys) {
    codes.push_back(store().remove(tenant_, key, RemoveReason::kRemoved, loop_.now_ms()));
  }
  respond_codes(codes);
}

void Connection::do_pin(Meta meta) {
  const auto request = wire::PinRequest::decode(meta);
  if (!request) return void(malformed());
  std::vector<Code> codes;
  codes.reserve(request->keys.size());
  for (const Key& key : request->keys) {
    codes.push_back(store().pin(tenant_, key, request->ttl_ms, loop_.now_ms()));
  }
  respond_codes(codes);
}

void Connection::do_unpin(Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return void(malformed());
  std::vector<Code> codes;
  codes.reserve(keys->size());
  for (const Key& key : *keys) codes.push_back(store().unpin(tenant_, key));
  respond_codes(codes);
}

void Connection::do_stat(Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return void(malformed());
  Writer& writer = begin_response();
  writer.u32(static_cast<uint32_t>(keys->size()));
  for (const Key& key : *keys) {
    const auto info = store().stat(tenant_, key, loop_.now_ms());
    wire::StatResult result;
    result.code = info.code();
    if (info) {
      result.tier = info->tier;
      result.crc32c = info->crc32c;
      result.size = info->extent.size;
      result.pins = info->pins;
      result.hits = info->hits;
      result.age_ms = info->age_ms;
    }
    result.encode(writer);
  }
  respond(writer);
}

void Connection::do_list(Meta meta) {
  const auto request = wire::ListRequest::decode(meta);
  if (!request) return void(malformed());
  const ListPage page =
      store().list(tenant_, request->cursor, std::clamp(request->limit, 1u, wire::kMaxItems));
  Writer& writer = begin_response();
  writer.u64(page.next_cursor);
  writer.u32(static_cast<uint32_t>(page.items.size()));
  for (const ListItem& item : page.items) {
    wire::ListItem out;
    out.key = item.key;
    out.size = item.size;
    out.tier = item.tier;
    out.hits = item.hits;
    out.encode(writer);
  }
  respond(writer);
}

// Hands the arenas to a peer on this host: readable for every one that could open the socket, writable for
// processes of the node's own user.
void Connection::do_attach(Meta meta) {
  if (!meta.empty()) return void(malformed());
  if (!is_unix_)
    return respond_status({Code::kUnsupported, "memory can only be shared over the unix socket"});
  if (!attach_fds_.empty()) {
    return respond_status({Code::kLimitExceeded, "an ATTACH is on its way already"});
  }
  if (const ArenaInfo arena = store().arena(); !arena.why_not_shared.empty()) {
    return respond_status({Code::kUnsupported, arena.why_not_shared});
  }
  const auto& segments = store().segments();
  std::vector<wire::SegmentInfo> infos;
  for (const SegmentFd& segment : segments) {
    infos.push_back({segment.id, static_cast<uint32_t>(segment.kind), segment.size});
    attach_fds_.push_back(segment.fd_ro);
  }
  for (const SegmentFd& segment : segments) {
    if (may_write_memory_ && segment.kind == SegmentKind::kArena) attach_fds_.push_back(segment.fd_rw);
  }
  if (attach_fds_.size() > net::kMaxPassedFds) {
    attach_fds_.clear();
    return respond_status(
        {Code::kUnsupported, "the node has more arenas than one message can pass; use larger ones"});
  }
  Writer& writer = begin_response();
  wire::encode_items<wire::SegmentInfo>(writer, infos);
  respond(writer);
  out_.back().with_fds = true;
}

// Totals for everybody; the node's inner counters for the admin.
void Connection::do_node_stat(Meta meta) {
  if (!meta.empty()) return void(malformed());
  wire::NodeStatResponse response;
  if (admin_) {
    response.values = loop_.shared().node_stat();
    if (response.values.size() > wire::kMaxItems) response.values.resize(wire::kMaxItems);
  } else {
    const StoreStats stats = store().stats();
    response.values = {{"store_capacity_bytes", stats.capacity_bytes},
                       {"store_used_bytes", stats.used_bytes},
                       {"store_free_bytes", stats.free_bytes},
                       {"store_blocks", stats.blocks},
                       {"store_draining", stats.draining}};
  }
  Writer& writer = begin_response();
  response.encode(writer);
  respond(writer);
}

}  // namespace mooncache::server
