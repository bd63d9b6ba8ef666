// ENDPOINT, and what LOOKUP and RESERVE say about it: the control side of transfers in which this process
// takes no part.
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
  if (!rdma_) rdma_ = std::make_unique<RdmaPeer>(loop_.shared().fabric, loop_.shared().rail_counters);
  const std::vector<wire::RdmaAddress> answers = rdma_->meet(*peers);
  Writer& writer = begin_response();
  wire::encode_items<wire::RdmaAddress>(writer, answers);
  respond(writer);
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

// Behind the results of LOOKUP (pins, to read) and RESERVE (reservations, to write).
template <typename Result>
void Connection::encode_exposures(Writer& writer, std::span<const Result> results, bool writable) {
  if ((header_.flags & wire::kFlagExpose) == 0) return;
  std::vector<wire::Exposure> exposures(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    exposures[i].code = Code::kTransportUnavailable;
    if (results[i].code != Code::kOk || !rdma_ || !rdma_->met()) continue;
    const uint64_t grant = results[i].extent.grant;
    if (const auto device = device_extent(grant, writable)) {
      exposures[i] = rdma_->expose(grant, *device, writable);
    } else {
      const Slice memory = host_extent(grant, writable);
      if (memory.size == 0) continue;
      exposures[i] = rdma_->expose(grant, memory, writable);
    }
    metrics().rdma_exposed.add(exposures[i].code == Code::kOk ? 1 : 0);
  }
  wire::encode_items<wire::Exposure>(writer, exposures);
}
template void Connection::encode_exposures(Writer&, std::span<const wire::LookupResult>, bool);
template void Connection::encode_exposures(Writer&, std::span<const wire::ReserveResult>, bool);

void Connection::withdraw(uint64_t grant, bool writable) {
  if (rdma_) rdma_->withdraw(grant, writable);
}

}  // namespace mooncache::server
