#include "server/rdma_peer.h"

#include "wire/rdma_address.h"

namespace mooncache::server {

std::vector<wire::RdmaAddress> RdmaPeer::meet(std::span<const wire::RdmaAddress> peers) {
  std::vector<wire::RdmaAddress> answers;
  std::vector<uint32_t> used(fabric_->rails().size(), 0);
  if (ends_.size() < peers.size()) ends_.resize(peers.size());
  for (size_t i = 0; i < peers.size(); ++i) {
    const Status met = answer(ends_[i], peers[i], used);
    wire::RdmaAddress mine;
    if (met) mine = wire::to_wire(ends_[i].endpoint->address());
    mine.code = met.code;
    answers.push_back(mine);
  }
  return answers;
}

RdmaPeer::~RdmaPeer() {
  for (End& end : ends_) leave(end);
}

void RdmaPeer::leave(End& end) {
  if (end.rail) counters_[end.number].connections.fetch_sub(1, std::memory_order_relaxed);
  end.rail.reset();
}

Status RdmaPeer::answer(End& end, const wire::RdmaAddress& peer, std::vector<uint32_t>& used) {
  end.endpoint.reset();
  const auto address = wire::from_wire<rdma::EndpointAddress>(peer);
  if (!end.rail || !end.rail->up()) {
    const size_t chosen = rdma::choose_rail(fabric_->rails(), address, used);
    if (chosen == SIZE_MAX) {
      return {Code::kTransportUnavailable, "RDMA unavailable, because no port here reaches that of the peer"};
    }
    ++used[chosen];
    // keys belong to a domain and die with it; the peer's device is refused then
    end.domain.reset();
    leave(end);
    end.rail = fabric_->rails()[chosen];
    end.number = chosen;
    counters_[chosen].connections.fetch_add(1, std::memory_order_relaxed);
    auto domain = end.rail->make_domain();
    if (!domain) return domain.status();
    end.domain = std::move(*domain);
  }
  if (!end.domain) return {Code::kTransportUnavailable, "RDMA unavailable, because the port failed before"};
  auto endpoint = end.domain->make_endpoint(0);
  if (!endpoint) return endpoint.status();
  if (Status connected = (*endpoint)->connect(address); !connected) return connected;
  end.endpoint = std::move(*endpoint);
  return Status::ok();
}

wire::Exposure RdmaPeer::expose(uint64_t grant, Slice memory, bool writable) {
  wire::Exposure exposure;
  exposure.code = Code::kTransportUnavailable;
  Memories memories;
  for (size_t i = 0; i < ends_.size(); ++i) {
    if (!ends_[i].domain) continue;
    auto exposed = ends_[i].domain->expose(memory, writable);
    if (!exposed) continue;
    exposure.code = Code::kOk;
    exposure.address = (*exposed)->remote_address();
    exposure.keys[i] = (*exposed)->remote_key();
    counters_[ends_[i].number].grants.fetch_add(1, std::memory_order_relaxed);
    counters_[ends_[i].number].granted_bytes.fetch_add(memory.size, std::memory_order_relaxed);
    memories.push_back(std::move(*exposed));
  }
  if (memories.empty()) return exposure;
  (writable ? writable_ : readable_)[grant] = std::move(memories);
  return exposure;
}

void RdmaPeer::withdraw(uint64_t grant, bool writable) {
  (writable ? writable_ : readable_).erase(grant);
}

}  // namespace mooncache::server
