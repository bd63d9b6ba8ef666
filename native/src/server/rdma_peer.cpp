#include "server/rdma_peer.h"

#include <algorithm>

#include "wire/rdma_address.h"

namespace mooncache::server {

namespace {

constexpr unsigned kOwnShift = 24;  // own queue pairs on a rail weigh more than any number of connections

}  // namespace

wire::RdmaAddress RdmaPeer::connect(size_t at, const wire::RdmaAddress& peer) {
  if (ends_.size() <= at) ends_.resize(at + 1);
  End& end = ends_[at];
  const Status connected = answer(end, peer);
  wire::RdmaAddress mine;
  if (connected) mine = wire::to_wire(end.endpoint->address());
  if (!connected && end.rail) count_failure(end);
  mine.code = connected.code;
  return mine;
}

RdmaPeer::~RdmaPeer() {
  for (End& end : ends_) hang_up(end);
}

size_t RdmaPeer::ends_on(size_t rail) const {
  return static_cast<size_t>(std::count_if(ends_.begin(), ends_.end(), [rail](const End& end) {
    return end.endpoint != nullptr && end.number == rail;
  }));
}

void RdmaPeer::hang_up(End& end) {
  if (!end.endpoint) return;
  end.endpoint.reset();
  if (ends_on(end.number) == 0) counters_[end.number].connections.fetch_sub(1, std::memory_order_relaxed);
}

void RdmaPeer::count_failure(const End& end) {
  counters_[end.number].failures.fetch_add(1, std::memory_order_relaxed);
}

// First the ports that this connection does not use yet, then those with the fewest connections.
std::vector<uint32_t> RdmaPeer::load_of_rails() const {
  std::vector<uint32_t> load;
  for (size_t i = 0; i < fabric_->rails().size(); ++i) {
    const uint64_t others = counters_[i].connections.load(std::memory_order_relaxed);
    load.push_back(
        static_cast<uint32_t>((ends_on(i) << kOwnShift) + std::min<uint64_t>(others, (1u << kOwnShift) - 1)));
  }
  return load;
}

Status RdmaPeer::answer(End& end, const wire::RdmaAddress& peer) {
  hang_up(end);
  const auto address = wire::from_wire<rdma::EndpointAddress>(peer);
  if (!end.rail || !end.rail->up() || !end.domain) {
    const size_t chosen = rdma::choose_rail(fabric_->rails(), address, load_of_rails());
    if (chosen == SIZE_MAX) {
      return {Code::kTransportUnavailable, "RDMA unavailable, because no port here reaches that of the peer"};
    }
    // keys belong to a domain and die with it; the peer's device is refused then
    end.domain.reset();
    end.rail = fabric_->rails()[chosen];
    end.number = chosen;
    auto domain = end.rail->make_domain();
    if (!domain) return domain.status();
    end.domain = std::move(*domain);
  }
  auto endpoint = end.domain->make_endpoint(0);
  if (!endpoint) return endpoint.status();
  if (Status connected = (*endpoint)->connect(address); !connected) return connected;
  if (ends_on(end.number) == 0) counters_[end.number].connections.fetch_add(1, std::memory_order_relaxed);
  end.endpoint = std::move(*endpoint);
  return Status::ok();
}

wire::Exposure RdmaPeer::expose(uint64_t grant, Slice memory, bool writable) {
  return expose_by(grant, memory.size, writable,
                   [&](rdma::Domain& domain) { return domain.expose(memory, writable); });
}

wire::Exposure RdmaPeer::expose(uint64_t grant, const rdma::DeviceRange& memory, bool writable) {
  return expose_by(grant, memory.size, writable,
                   [&](rdma::Domain& domain) { return domain.expose_device(memory, writable); });
}

template <typename Open>
wire::Exposure RdmaPeer::expose_by(uint64_t grant, uint64_t size, bool writable, const Open& register_in) {
  wire::Exposure exposure;
  exposure.code = Code::kTransportUnavailable;
  Exposed open;
  open.size = size;
  for (size_t i = 0; i < ends_.size(); ++i) {
    if (!ends_[i].domain) continue;
    auto exposed = register_in(*ends_[i].domain);
    if (!exposed) {
      count_failure(ends_[i]);
      continue;
    }
    exposure.code = Code::kOk;
    exposure.address = (*exposed)->remote_address();
    exposure.keys[i] = (*exposed)->remote_key();
    open.memories.push_back(std::move(*exposed));
    const size_t rail = ends_[i].number;
    if (std::any_of(ends_.begin(), ends_.begin() + static_cast<std::ptrdiff_t>(i),
                    [rail](const End& end) { return end.domain && end.number == rail; }))
      continue;  // open on this rail already, for another queue pair
    counters_[rail].grants.fetch_add(1, std::memory_order_relaxed);
    counters_[rail].granted_bytes.fetch_add(size, std::memory_order_relaxed);
  }
  if (open.memories.empty()) return exposure;
  (writable ? writable_ : readable_)[grant] = std::move(open);
  return exposure;
}

void RdmaPeer::withdraw(uint64_t grant, bool writable) {
  if ((writable ? writable_ : readable_).erase(grant) > 0) hang_up_unsound();
}

void RdmaPeer::withdraw_all() {
  readable_.clear();
  writable_.clear();
  hang_up_unsound();
}

// A key that the device did not forget opens nothing without a queue pair.
void RdmaPeer::hang_up_unsound() {
  for (End& end : ends_) {
    if (!end.domain || end.domain->sound()) continue;
    count_failure(end);
    hang_up(end);
    end.domain.reset();
  }
}

}  // namespace mooncache::server
