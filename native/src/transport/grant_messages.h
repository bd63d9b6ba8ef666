// The messages about grants, as every program here speaks them: LOOKUP and RESERVE, which answer an extent
// for each item and, for RDMA, how its device is reached; COMMIT and ABORT, which answer a code for each.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "transport/remote_extent.h"
#include "transport/session.h"

namespace mooncache {

// A pinned block (wire::LookupResult) or a reservation (wire::ReserveResult). Without its code OK there is no
// extent.
template <typename Item>
struct Granted {
  Item result;
  RemoteExtent extent;  // `exposed`: the node opened it to this connection's queue pairs
};

// `expose`: the extents are for RDMA.
inline void encode_reserve(Request& request, const wire::ReserveRequest& items, bool expose) {
  request.opcode = wire::Opcode::kReserve;
  request.flags = expose ? wire::kFlagExpose : 0;
  items.encode(request.meta);
}

inline void encode_lookup(Request& request, std::span<const Key> keys, bool expose) {
  request.opcode = wire::Opcode::kLookup;
  request.flags = expose ? wire::kFlagExpose : 0;
  wire::encode_keys(request.meta, keys);
}

inline void encode_commit(Request& request, std::span<const wire::CommitItem> items) {
  request.opcode = wire::Opcode::kCommit;
  wire::encode_items(request.meta, items);
}

inline void encode_abort(Request& request, std::span<const uint64_t> grants) {
  request.opcode = wire::Opcode::kAbort;
  wire::encode_grants(request.meta, grants);
}

// What a LOOKUP or RESERVE of `count` items answered. A request that was refused gives each item its code.
template <typename Item>
Result<std::vector<Granted<Item>>> decode_granted(const Status& status, Reader& in, size_t count,
                                                  bool exposed) {
  std::vector<Granted<Item>> granted(count);
  if (!status) {
    for (Granted<Item>& one : granted) one.result.code = status.code;
    return granted;
  }
  const auto items = wire::decode_items<Item>(in);
  if (!items || items->size() != count)
    return {Code::kProtocolError, "the node granted another number of extents than were asked for"};
  std::optional<std::vector<wire::Exposure>> exposures;
  if (exposed) exposures = wire::decode_items<wire::Exposure>(in);
  if (exposed && (!exposures || exposures->size() != count))
    return {Code::kProtocolError, "the node's answer does not say of each extent how to reach it"};
  for (size_t i = 0; i < count; ++i) {
    const Item& item = granted[i].result = (*items)[i];
    if (item.code != Code::kOk) continue;
    granted[i].extent = exposed ? remote_extent(item.extent, (*exposures)[i]) : remote_extent(item.extent);
  }
  if (!in.done()) return {Code::kProtocolError, "the node's answer is longer than its extents"};
  return granted;
}

// What a request of `count` items answered that has only codes (PUT, WRITE, COMMIT, ABORT).
inline Result<std::vector<Code>> decode_outcomes(const Status& status, Reader& in, size_t count) {
  if (!status) return std::vector<Code>(count, status.code);
  auto codes = wire::decode_codes(in);
  if (!codes || codes->size() != count || !in.done())
    return {Code::kProtocolError, "the node answered another number of codes than were asked for"};
  return std::move(*codes);
}

}  // namespace mooncache
