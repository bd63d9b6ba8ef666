// The fixture of the suite for all transports: loopback, shm, tcp and rdma must behave alike, with the
// caller's bytes in this process or in the memory of a GPU (cuda_...).
#pragma once

#include "transport/harness.h"
#include "transport/staged_link.h"

namespace mooncache::testing {

class Conformance : public ::testing::TestWithParam<const char*> {
 protected:
  Conformance() {
    std::string name = GetParam();
    const bool staged = name.starts_with("cuda_");
    if (staged) name = name.substr(5);
    if (name == "loopback")
      peer_ = std::make_unique<LoopbackHarness>();
    else
      peer_ = std::make_unique<NodeHarness>(name);
    link_ = peer_->connect();
    if (!staged) return;
    gpu_ = std::make_unique<FakeGpu>();
    link_ = std::make_unique<StagedLink>(std::move(link_), *gpu_);
  }
  std::vector<Completion> drain(size_t count, int timeout_ms = 5000) {
    return drain_link(*link_, count, timeout_ms);
  }
  static Transfer transfer(TransferId id, Direction direction, RemoteExtent extent,
                           std::span<const Slice> local, uint64_t offset = 0) {
    Transfer t;
    t.id = id;
    t.direction = direction;
    t.remote = extent;
    t.offset = offset;
    t.local = local;
    return t;
  }
  std::unique_ptr<Peer> peer_;
  std::unique_ptr<FakeGpu> gpu_;  // with the caller's memory in it
  std::unique_ptr<Link> link_;
};

inline const auto kTransports =
    ::testing::Values("loopback", "shm", "tcp", "rdma", "cuda_loopback", "cuda_shm", "cuda_tcp", "cuda_rdma");
inline std::string transport_name(const ::testing::TestParamInfo<const char*>& test) {
  return test.param;
}

}  // namespace mooncache::testing
