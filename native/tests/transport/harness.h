// Peers for tests of transports: fake ones, and real nodes in this process with grants on them.
#pragma once

#include <cstdlib>

#include "client/pool.h"
#include "mooncache/crc32c.h"
#include "transport/one_request.h"
#include "transport/rdma.h"
#include "transport/remote_extent.h"

namespace mooncache::testing {

// Completions until there are `count`, or fewer when the time is over.
// What a link of RDMA says of itself between two calls.
inline void expect_sound(const Link& link) {
  const auto* rdma = dynamic_cast<const RdmaLink*>(&link);
  std::string why;
  EXPECT_TRUE(rdma == nullptr || rdma->check(&why)) << why;
}

inline std::vector<Completion> drain_link(Link& link, size_t count, int timeout_ms) {
  std::vector<Completion> all;
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  while (all.size() < count && !deadline.expired()) {
    std::array<Completion, 7> some;
    const size_t got = link.poll(some, deadline);
    expect_sound(link);
    all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(got));
  }
  return all;
}

// A peer with granted extents, however the transport gets them.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual Transport& transport() = 0;  // of this side
  virtual std::unique_ptr<Link> connect() = 0;
  virtual RemoteExtent readable(Link& link, const std::vector<std::byte>& bytes) = 0;
  virtual RemoteExtent writable(Link& link, size_t size) = 0;
  // What lies in a writable extent, seen from the peer's side.
  virtual std::span<const std::byte> stored(const RemoteExtent& extent) = 0;
  virtual void kill() = 0;
};

class LoopbackHarness final : public Peer {
 public:
  Transport& transport() override { return *transport_; }
  std::unique_ptr<Link> connect() override {
    auto link = transport_->connect({}, Deadline::after_ms(1000));
    return std::move(*link);
  }
  RemoteExtent readable(Link&, const std::vector<std::byte>& bytes) override {
    memory_.push_back(std::make_unique<std::vector<std::byte>>(bytes));
    return peer_->grant(peer_->add_segment(*memory_.back()), 0, bytes.size(), false);
  }
  RemoteExtent writable(Link&, size_t size) override {
    memory_.push_back(std::make_unique<std::vector<std::byte>>(size));
    return peer_->grant(peer_->add_segment(*memory_.back()), 0, size, true);
  }
  std::span<const std::byte> stored(const RemoteExtent& extent) override { return *memory_[extent.segment]; }
  void kill() override { peer_->kill(); }

 private:
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
  std::shared_ptr<LoopbackPeer> peer_ = make_loopback_peer();
  std::unique_ptr<Transport> transport_ = make_loopback_transport(peer_);
};

class NodeHarness final : public Peer {
 public:
  explicit NodeHarness(std::string name, RdmaConfig client = test_rdma(true))
      : name_(std::move(name)), node_(0, 256 << 20, "host-a", true, rdma_for(name_)) {
    if (name_ == "rdma") {
      transport_ = std::make_unique<RdmaTransport>(client);
    } else {
      auto made = make_transport(name_);
      EXPECT_TRUE(made);
      transport_ = std::move(*made);
    }
  }
  Transport& transport() override { return *transport_; }
  RdmaTransport& rdma() { return static_cast<RdmaTransport&>(*transport_); }
  TestNode& node() { return node_; }
  std::unique_ptr<Link> connect() override {
    PeerDescription peer;
    peer.tcp_host = node_.info.tcp_host;
    peer.tcp_port = node_.info.tcp_port;
    peer.unix_path = node_.info.unix_path;
    peer.credentials.key = wire::tenant_key(secret(), "default");
    auto link = transport_->connect(peer, Deadline::after_ms(5000));
    EXPECT_TRUE(link) << link.status().message;
    return std::move(*link);
  }
  RemoteExtent readable(Link& link, const std::vector<std::byte>& bytes) override {
    auto& store = node_.server->store();
    const Key key = key_of(next_++);
    auto reservation = store.reserve(node_.tenant(), key, bytes.size(), 0);
    EXPECT_TRUE(reservation);
    const Slice memory = store.writable(reservation->id);
    std::copy(bytes.begin(), bytes.end(), memory.data);
    EXPECT_TRUE(store.commit(reservation->id, crc32c(bytes), 0));
    Writer meta;
    wire::encode_keys(meta, std::span(&key, 1));
    return extent_of<wire::LookupResult>(link, wire::Opcode::kLookup, std::move(meta));
  }
  RemoteExtent writable(Link& link, size_t size) override {
    wire::ReserveRequest request;
    request.items.push_back({key_of(next_++), size});
    Writer meta;
    request.encode(meta);
    return extent_of<wire::ReserveResult>(link, wire::Opcode::kReserve, std::move(meta));
  }
  std::span<const std::byte> stored(const RemoteExtent& extent) override {
    const Slice memory = node_.server->store().writable(ReservationId{extent.grant});
    return {memory.data, memory.size};
  }
  void kill() override { node_.stop(); }

 private:
  static RdmaConfig rdma_for(const std::string& name) {
    RdmaConfig config = test_rdma(false);
    config.enabled = name == "rdma";
    return config;
  }
  template <typename Item>
  RemoteExtent extent_of(Link& link, wire::Opcode opcode, Writer meta) const {
    const uint16_t flags = name_ == "rdma" ? wire::kFlagExpose : 0;
    const auto answer =
        exchange(*link.session(), {opcode, flags, std::move(meta), {}}, Deadline::after_ms(5000));
    EXPECT_TRUE(answer) << answer.status().message;
    Reader in(*answer);
    const wire::WireExtent extent = wire::decode_items<Item>(in)->front().extent;
    if (name_ != "rdma") return remote_extent(extent);
    return remote_extent(extent, wire::decode_items<wire::Exposure>(in)->front());
  }

  std::string name_;
  TestNode node_;
  std::unique_ptr<Transport> transport_;
  uint64_t next_ = 1;
};

}  // namespace mooncache::testing
