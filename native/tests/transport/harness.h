// Peers for tests of transports: pretended ones, and real nodes in this process with grants on them.
#pragma once

#include <cstdlib>

#include "client/pool.h"
#include "mooncache/crc32c.h"
#include "transport/rdma.h"
#include "transport/session.h"

namespace mooncache::testing {

// A peer with granted extents, however the transport gets them.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::unique_ptr<Link> connect() = 0;
  virtual RemoteExtent readable(Link& link, const std::vector<std::byte>& bytes) = 0;
  virtual RemoteExtent writable(Link& link, size_t size) = 0;
  virtual void kill() = 0;
};

class LoopbackHarness final : public Peer {
 public:
  std::unique_ptr<Link> connect() override {
    auto link = make_loopback_transport(peer_)->connect({}, Deadline::after_ms(1000));
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
  void kill() override { peer_->kill(); }

 private:
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
  std::shared_ptr<LoopbackPeer> peer_ = make_loopback_peer();
};

class OneAnswer final : public Program {
 public:
  OneAnswer(wire::Opcode opcode, std::vector<std::byte> meta, uint16_t flags = 0)
      : opcode_(opcode), flags_(flags), meta_(std::move(meta)) {}
  bool next(Request& request) override {
    if (sent_) return false;
    sent_ = true;
    request.opcode = opcode_;
    request.flags = flags_;
    request.meta.raw(meta_);
    return true;
  }
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader&, const Status& status, Reader& in, PayloadSink&) override {
    answered_ = true;
    if (!status) return status;
    const auto rest = in.take(in.remaining());
    answer.assign(rest.begin(), rest.end());
    return Status::ok();
  }
  std::vector<std::byte> answer;

 private:
  wire::Opcode opcode_;
  uint16_t flags_;
  std::vector<std::byte> meta_;
  bool sent_ = false;
  bool answered_ = false;
};

inline RemoteExtent remote(const wire::WireExtent& e) {
  RemoteExtent extent;
  extent.grant = e.grant;
  extent.segment = e.segment;
  extent.slot = e.slot;
  extent.generation = e.generation;
  extent.offset = e.offset;
  extent.size = e.size;
  return extent;
}

class NodeHarness final : public Peer {
 public:
  explicit NodeHarness(std::string name)
      : name_(std::move(name)), node_(0, 256 << 20, "host-a", true, rdma_for(name_)) {
    if (name_ == "rdma") rdma_ = std::make_unique<RdmaTransport>(test_rdma(true));
  }
  RdmaTransport& rdma() { return *rdma_; }
  TestNode& node() { return node_; }
  std::unique_ptr<Link> connect() override {
    PeerDescription peer;
    peer.tcp_host = node_.info.tcp_host;
    peer.tcp_port = node_.info.tcp_port;
    peer.unix_path = node_.info.unix_path;
    peer.credentials.key = wire::tenant_key(secret(), "default");
    if (!rdma_) {
      auto transport = make_transport(name_);
      EXPECT_TRUE(transport);
      auto link = (*transport)->connect(peer, Deadline::after_ms(5000));
      EXPECT_TRUE(link) << link.status().message;
      return std::move(*link);
    }
    auto link = rdma_->connect(peer, Deadline::after_ms(5000));
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
    OneAnswer lookup(wire::Opcode::kLookup, meta.take(), expose());
    EXPECT_TRUE(link.session()->run(lookup, Deadline::after_ms(5000)));
    Reader in(lookup.answer);
    return extent_of<wire::LookupResult>(in);
  }
  RemoteExtent writable(Link& link, size_t size) override {
    wire::ReserveRequest request;
    request.items.push_back({key_of(next_++), size});
    Writer meta;
    request.encode(meta);
    OneAnswer reserve(wire::Opcode::kReserve, meta.take(), expose());
    EXPECT_TRUE(link.session()->run(reserve, Deadline::after_ms(5000)));
    Reader in(reserve.answer);
    return extent_of<wire::ReserveResult>(in);
  }
  void kill() override { node_.stop(); }

 private:
  static RdmaConfig rdma_for(const std::string& name) {
    RdmaConfig config = test_rdma(false);
    config.enabled = name == "rdma";
    return config;
  }
  uint16_t expose() const { return rdma_ ? wire::kFlagExpose : 0; }
  template <typename Item>
  RemoteExtent extent_of(Reader& in) const {
    RemoteExtent extent = remote(wire::decode_items<Item>(in)->front().extent);
    if (!rdma_) return extent;
    const wire::Exposure exposure = wire::decode_items<wire::Exposure>(in)->front();
    extent.exposed = exposure.code == Code::kOk;
    extent.address = exposure.address;
    extent.keys = exposure.keys;
    return extent;
  }

  std::string name_;
  TestNode node_;
  std::unique_ptr<RdmaTransport> rdma_;
  uint64_t next_ = 1;
};

}  // namespace mooncache::testing
