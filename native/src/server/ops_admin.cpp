// REMOVE, PIN, UNPIN, STAT, LIST, ATTACH, NODE_STAT, PING.
#include <algorithm>
#include <atomic>
#include <memory>

#include "server/peer_session.h"

namespace mooncache::server {

Next ops::remove(PeerSession& session, wire::Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return session.malformed();
  std::vector<Code> codes;
  codes.reserve(keys->size());
  if (!session.store().has_disk()) {
    for (const Key& key : *keys) {
      codes.push_back(
          session.store().remove(session.who.tenant, key, RemoveReason::kRemoved, session.now_ms()));
    }
    return session.respond_codes(codes);
  }
  constexpr uint64_t kLastsWithinMs = 700;  // less than the silence after which clients give a node up
  const auto left = std::make_shared<std::atomic<size_t>>(keys->size());
  const auto lasts = [&loop = session.loop(), serial = session.serial, left] {
    if (left->fetch_sub(1) == 1) loop.landed(serial);
  };
  for (const Key& key : *keys) {
    codes.push_back(session.store().remove(session.who.tenant, key, RemoveReason::kRemoved, session.now_ms(),
                                           false, lasts));
  }
  return session.begin(RemoveOp{std::move(codes), left, session.now_ms() + kLastsWithinMs}, 0);
}

Next RemoveOp::step(PeerSession& session, uint64_t) {
  if (left->load() > 0 && session.now_ms() < deadline_ms) return Next::kDisk;
  return session.respond_codes(codes);
}

Next ops::pin(PeerSession& session, wire::Meta meta) {
  const auto request = wire::PinRequest::decode(meta);
  if (!request) return session.malformed();
  std::vector<Code> codes;
  codes.reserve(request->keys.size());
  for (const Key& key : request->keys) {
    codes.push_back(session.store().pin(session.who.tenant, key, request->ttl_ms, session.now_ms()));
  }
  return session.respond_codes(codes);
}

Next ops::unpin(PeerSession& session, wire::Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return session.malformed();
  std::vector<Code> codes;
  codes.reserve(keys->size());
  for (const Key& key : *keys) codes.push_back(session.store().unpin(session.who.tenant, key));
  return session.respond_codes(codes);
}

Next ops::stat(PeerSession& session, wire::Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return session.malformed();
  Writer& writer = session.begin_response();
  writer.u32(static_cast<uint32_t>(keys->size()));
  for (const Key& key : *keys) {
    const auto info = session.store().stat(session.who.tenant, key, session.now_ms());
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
  return session.respond(writer);
}

Next ops::list(PeerSession& session, wire::Meta meta) {
  const auto request = wire::ListRequest::decode(meta);
  if (!request) return session.malformed();
  const ListPage page = session.store().list(session.who.tenant, request->cursor,
                                             std::clamp(request->limit, 1u, wire::kMaxItems));
  Writer& writer = session.begin_response();
  writer.u64(page.next_cursor);
  writer.u32(static_cast<uint32_t>(page.items.size()));
  for (const StoredBlock& item : page.items) {
    wire::ListItem out;
    out.key = item.key;
    out.size = item.size;
    out.tier = item.tier;
    out.hits = item.hits;
    out.encode(writer);
  }
  return session.respond(writer);
}

// Hands the arenas to a peer on this host: readable for every one that could open the socket, writable for
// processes of the node's own user. Whoever has them can read every block of every tenant, so a tenant's
// token is not enough: only the node's own user, who can read its memory anyway, and the cluster's own
// sessions get them.
Next ops::attach(PeerSession& session, wire::Meta meta) {
  if (!meta.empty()) return session.malformed();
  if (!session.is_unix)
    return session.respond_status({Code::kUnsupported, "memory can only be shared over the unix socket"});
  if (!session.held.may_write_memory() && session.who.tenant != wire::tenant_id("default")) {
    return session.respond_status(
        {Code::kUnsupported, "memory is not shared with tenants that run as another user than the node"});
  }
  if (session.out.attaching()) {
    return session.respond_status({Code::kLimitExceeded, "an ATTACH is on its way already"});
  }
  if (const ArenaInfo arena = session.store().arena(); !arena.why_not_shared.empty()) {
    return session.respond_status({Code::kUnsupported, arena.why_not_shared});
  }
  const auto& segments = session.store().segments();
  std::vector<wire::SegmentInfo> infos;
  std::vector<int> fds;
  for (const SegmentFd& segment : segments) {
    infos.push_back({segment.id, static_cast<uint32_t>(segment.kind), segment.size});
    fds.push_back(segment.fd_ro);
  }
  for (const SegmentFd& segment : segments) {
    if (session.held.may_write_memory() && segment.kind == SegmentKind::kArena) fds.push_back(segment.fd_rw);
  }
  if (fds.size() > net::kMaxPassedFds) {
    return session.respond_status(
        {Code::kUnsupported, "the node has more arenas than one message can pass; use larger ones"});
  }
  Writer& writer = session.begin_response();
  wire::encode_items<wire::SegmentInfo>(writer, infos);
  const Next next = session.respond(writer);
  session.out.attach(std::move(fds));
  return next;
}

// Totals for every caller; the node's inner counters for the admin.
Next ops::node_stat(PeerSession& session, wire::Meta meta) {
  if (!meta.empty()) return session.malformed();
  wire::NodeStatResponse response;
  if (session.who.admin) {
    response.values = session.loop().shared().node_stat();
    if (response.values.size() > wire::kMaxItems) response.values.resize(wire::kMaxItems);
  } else {
    const StoreStats stats = session.store().stats();
    response.values = {{"store_capacity_bytes", stats.capacity_bytes},
                       {"store_used_bytes", stats.used_bytes},
                       {"store_free_bytes", stats.free_bytes},
                       {"store_blocks", stats.blocks},
                       {"store_draining", stats.draining}};
  }
  Writer& writer = session.begin_response();
  response.encode(writer);
  return session.respond(writer);
}

Next ops::ping(PeerSession& session, wire::Meta meta) {
  return meta.empty() ? session.respond_status(Status::ok()) : session.malformed();
}

}  // namespace mooncache::server
