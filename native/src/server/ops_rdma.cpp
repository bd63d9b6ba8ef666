// ENDPOINT, and what LOOKUP and RESERVE say about it: the control side of transfers in which this process
// takes no part.
#include <algorithm>

#include "server/connection.h"

namespace mooncache::server {

// Bytes over RDMA are not encrypted: who asked for TLS gets no way around it.
bool Connection::can_rdma() const {
  return loop_.shared().fabric != nullptr && !stream_->is_tls();
}

void Connection::do_endpoint(Meta meta) {
  const auto peers = wire::decode_all_items<wire::RdmaAddress>(meta);
  if (!peers) return void(malformed());
  if (!can_rdma()) {
    return respond_status(
        {Code::kTransportUnavailable, loop_.shared().fabric != nullptr
                                          ? "RDMA unavailable, because this connection uses TLS"
                                          : loop_.shared().fabric_reason});
  }
  if (peers->empty() || peers->size() > wire::kMaxRails) {
    return respond_status({Code::kInvalidArgument, "ENDPOINT names 1 to 8 queue pairs"});
  }
  op_ = EndpointOp{*peers, {}};
  suspend();
}

// One queue pair in a turn: it takes several commands to a device, each of them up to a millisecond.
void Connection::continue_endpoint() {
  auto& op = std::get<EndpointOp>(op_);
  if (!rdma_) rdma_ = std::make_unique<RdmaPeer>(loop_.shared().fabric, loop_.shared().rail_counters);
  op.answers.push_back(rdma_->meet(op.answers.size(), op.peers[op.answers.size()]));
  loop_.spend(loop_.visit().check_bytes);
  if (op.answers.size() < op.peers.size()) return suspend();
  const std::vector<wire::RdmaAddress> answers = std::move(op.answers);
  op_ = std::monostate{};
  active_ms_ = loop_.now_ms();
  Writer& writer = begin_response();
  wire::encode_items<wire::RdmaAddress>(writer, answers);
  respond(writer);
}

// Nothing that costs is done without a budget: only a turn has one, not the visit in which a request arrives,
// of which there may be many in a turn. The first step of a turn may cost more than is left, else it would
// never be taken.
bool Connection::afford(uint64_t& budget, uint64_t cost) {
  if (cost > 0 && budget == 0) return suspend(), false;
  budget -= std::min(budget, cost);
  loop_.spend(cost);
  return true;
}

uint64_t Connection::cost_to_withdraw(uint64_t grant, bool writable) const {
  return rdma_ ? rdma_->cost_to_withdraw(grant, writable) : 0;
}

Slice Connection::host_extent(uint64_t grant, bool writable) {
  if (writable) return store().writable(ReservationId{grant});
  const ConstSlice bytes = store().readable(PinId{grant});
  return {const_cast<std::byte*>(bytes.data), bytes.size};  // the device is told to read only
}

// Only while the GPU answers: a grant on one that does not would be read in vain.
std::optional<rdma::DeviceMemory> Connection::device_extent(uint64_t grant, bool writable) {
  const DeviceArena& arena = loop_.shared().device_arena;
  if (arena.address == 0 || store().arena_gone()) return std::nullopt;
  Extent extent;
  if (writable) {
    const auto reserved = store().reservation_extent(ReservationId{grant});
    if (reserved) extent = *reserved;
  } else if (const auto pinned = store().pin_info(PinId{grant}, loop_.now_ms())) {
    extent = pinned->extent;
  }
  if (extent.size == 0) return std::nullopt;
  return rdma::DeviceMemory{arena.address + extent.offset, extent.size, arena.dma_buf_fd,
                            arena.dma_buf_offset + extent.offset, arena.no_dma_buf};
}

// Answers LOOKUP (pins, to read) or RESERVE (reservations, to write): `writer` holds the answer up to the
// exposures.
template <typename Result>
void Connection::respond_exposed(Writer& writer, std::span<const Result> results, bool writable) {
  if ((header_.flags & wire::kFlagExpose) == 0) return respond(writer);
  ExposeOp op;
  op.writable = writable;
  op.answer.assign(writer.view().begin(), writer.view().end());
  op.exposures.resize(results.size());
  op.grants.resize(results.size());
  bool some = false;
  for (size_t i = 0; i < results.size(); ++i) {
    op.exposures[i].code = Code::kTransportUnavailable;
    if (results[i].code != Code::kOk || !rdma_ || !rdma_->met()) continue;
    op.grants[i] = results[i].extent.grant;
    some = true;
  }
  op_ = std::move(op);
  return some ? suspend() : continue_expose(0);
}
template void Connection::respond_exposed(Writer&, std::span<const wire::LookupResult>, bool);
template void Connection::respond_exposed(Writer&, std::span<const wire::ReserveResult>, bool);

void Connection::continue_expose(uint64_t budget) {
  auto& op = std::get<ExposeOp>(op_);
  for (; op.next < op.grants.size(); ++op.next) {
    const uint64_t grant = op.grants[op.next];
    if (grant == 0) continue;
    if (budget == 0) return suspend();
    op.exposures[op.next] = expose(grant, op.writable, budget);
  }
  const ExposeOp done = std::move(op);
  op_ = std::monostate{};
  active_ms_ = loop_.now_ms();
  Writer& writer = loop_.writer();
  writer.raw(done.answer);
  wire::encode_items<wire::Exposure>(writer, done.exposures);
  respond(writer);
}

wire::Exposure Connection::expose(uint64_t grant, bool writable, uint64_t& budget) {
  wire::Exposure exposure;
  exposure.code = Code::kTransportUnavailable;
  if (const auto device = device_extent(grant, writable)) {
    (void)afford(budget, rdma_->cost_to_expose(device->size));
    exposure = rdma_->expose(grant, *device, writable);
  } else if (const Slice memory = host_extent(grant, writable); memory.size > 0) {
    (void)afford(budget, rdma_->cost_to_expose(memory.size));
    exposure = rdma_->expose(grant, memory, writable);
  }
  metrics().rdma_exposed.add(exposure.code == Code::kOk ? 1 : 0);
  return exposure;
}

void Connection::withdraw(uint64_t grant, bool writable) {
  if (rdma_) rdma_->withdraw(grant, writable);
}

}  // namespace mooncache::server
