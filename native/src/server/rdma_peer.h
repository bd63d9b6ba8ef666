// What a node opens to one connection over RDMA: endpoints that only answer, and the extents of its grants.
//
// The invariant: a peer's device reaches exactly the bytes of the grants that this connection holds now, in
// the direction of the grant. Every connection has protection domains of its own, so a key is worth nothing
// on another one; withdraw() returns when the device has forgotten the key, or has lost the queue pair that
// it worked on, before the store may use the extent again.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "mooncache/bytes.h"
#include "rdma/fabric.h"
#include "server/shared.h"
#include "wire/messages.h"

namespace mooncache::server {

class RdmaPeer {
 public:
  // `counters`: one for each rail of the fabric.
  RdmaPeer(std::shared_ptr<rdma::Fabric> fabric, std::deque<RailCounters>& counters)
      : fabric_(std::move(fabric)), counters_(counters) {}
  ~RdmaPeer();

  // Answers endpoint `at` of the peer with one of ours. May be called again when the old one has failed: what
  // is exposed stays exposed under the same keys.
  wire::RdmaAddress connect(size_t at, const wire::RdmaAddress& peer);
  bool connected() const { return !ends_.empty(); }

  // Grants to read are pins, grants to write are reservations; their numbers may be equal.
  wire::Exposure expose(uint64_t grant, Slice memory, bool writable);
  wire::Exposure expose(uint64_t grant, const rdma::DeviceRange& memory, bool writable);
  void withdraw(uint64_t grant, bool writable);
  void withdraw_all();
  bool is_exposed(uint64_t grant, bool writable) const { return table(writable).contains(grant); }

  // What it costs the loop to expose so many bytes, and to withdraw a grant, in bytes that it could check in
  // that time: pinning and unpinning pages, once for each queue pair, and a command to each device.
  uint64_t cost_to_expose(uint64_t size) const { return ends_.size() * (kRegistrationBytes + size); }
  uint64_t cost_to_withdraw(uint64_t grant, bool writable) const {
    const auto found = table(writable).find(grant);
    return found == table(writable).end() ? 0 : cost_to_expose(found->second.size / 2);
  }

 private:
  // A command to a device takes about as long as looking at so many bytes.
  static constexpr uint64_t kRegistrationBytes = 64 << 10;
  struct Exposed {
    std::vector<std::unique_ptr<rdma::Registration>> memories;
    uint64_t size = 0;
  };
  using Table = std::unordered_map<uint64_t, Exposed>;
  struct End {
    std::shared_ptr<rdma::Rail> rail;
    size_t number = 0;  // of the rail in the fabric
    std::unique_ptr<rdma::Domain> domain;
    std::unique_ptr<rdma::Endpoint> endpoint;
  };

  // `register_in` registers the extent in one domain.
  template <typename Open>
  wire::Exposure expose_by(uint64_t grant, uint64_t size, bool writable, const Open& register_in);
  void hang_up(End& end);
  void hang_up_unsound();
  void count_failure(const End& end);
  Status answer(End& end, const wire::RdmaAddress& peer);
  // Queue pairs of this connection on a rail of the fabric.
  size_t ends_on(size_t rail) const;
  std::vector<uint32_t> load_of_rails() const;
  const Table& table(bool writable) const { return writable ? writable_ : readable_; }

  const std::shared_ptr<rdma::Fabric> fabric_;
  std::deque<RailCounters>& counters_;
  std::vector<End> ends_;
  Table readable_, writable_;  // after ends_: the keys go before their domains
};

}  // namespace mooncache::server
