// What holds of an RDMA link between two calls, as code: rdma_link.cpp and rdma_pieces.cpp rely on it.
#include <map>
#include <set>

#include "transport/rdma.h"

namespace mooncache {

bool RdmaLink::check(std::string* why) const {
  const auto broken = [why](const std::string& what) {
    *why = what;
    return false;
  };
  const std::set<uint32_t> free(free_.begin(), free_.end());
  const std::set<uint32_t> again(again_.begin(), again_.end());
  const std::set<uint32_t> unchecked(unchecked_.begin(), unchecked_.end());
  if (free.size() != free_.size() || again.size() != again_.size() || unchecked.size() != unchecked_.size())
    return broken("a piece is in a queue twice");

  std::map<uint64_t, const Pending*> transfers;
  uint64_t last_serial = 0;
  for (const Pending& pending : queue_) {
    if (pending.serial <= last_serial) return broken("transfers are out of order");
    last_serial = pending.serial;
    transfers[pending.serial] = &pending;
    uint64_t cut = 0;
    for (const auto& [length, crc] : pending.crcs) cut += length;
    if (cut != pending.cut || cut > pending.length || pending.moved > cut)
      return broken("a transfer's pieces do not add up to what was cut off it");
  }

  std::map<uint64_t, uint32_t> open;
  std::set<uint32_t> slots;
  std::vector<size_t> flying(ends_.size());
  for (uint32_t number = 0; number < pieces_.size(); ++number) {
    const Piece& piece = pieces_[number];
    const std::string name = "piece " + std::to_string(number);
    if ((piece.serial == 0) != free.contains(number)) return broken(name + " is free and used");
    if (piece.unchecked != unchecked.contains(number)) return broken(name + " is not where it is checked");
    if (piece.serial == 0) {
      if (again.contains(number)) return broken(name + " is free and to be posted again");
      continue;
    }
    if (piece.flying + piece.landed + again.contains(number) != 1)
      return broken(name + " is not in exactly one of: flying, landed, to be posted again");
    if (piece.landed && !piece.unchecked) return broken(name + " is through and still there");
    if (piece.direct != (piece.slot == kNoSlot)) return broken(name + " is neither in a slot nor in place");
    if (piece.slot != kNoSlot && !slots.insert(piece.slot).second)
      return broken(name + " shares its staging slot");
    if (piece.flying && (piece.end >= ends_.size() || !ends_[piece.end].endpoint))
      return broken(name + " flies where there is no queue pair");
    if (piece.flying) ++flying[piece.end];
    const auto transfer = transfers.find(piece.serial);
    if (transfer == transfers.end()) {
      // Its transfer was cancelled: only what lands in staging memory may still be under way.
      if (!piece.flying || piece.direct) return broken(name + " has no transfer");
      continue;
    }
    ++open[piece.serial];
    if (piece.index >= transfer->second->crcs.size() ||
        transfer->second->crcs[piece.index].first != piece.length)
      return broken(name + " is not one of its transfer's");
  }
  for (const auto& [serial, pending] : transfers) {
    const auto found = open.find(serial);
    if ((found == open.end() ? 0 : found->second) != pending->open)
      return broken("transfer " + std::to_string(serial) + " counts other pieces than there are");
  }
  for (size_t i = 0; i < ends_.size(); ++i) {
    const End& end = ends_[i];
    if (!end.outbox.empty() || end.outbox_bytes != 0) return broken("an outbox was not given to its device");
    if (end.endpoint && end.endpoint->outstanding() != flying[i])
      return broken("a queue pair has other requests than the pieces that fly");
  }
  return true;
}

}  // namespace mooncache
