// The reference transport: a fake node in this process, with faults drawn from a seed.
#include <algorithm>
#include <mutex>

#include "mooncache/crc32c.h"
#include "transport/plain_regions.h"
#include "transport/queued_link.h"

namespace mooncache {

namespace {

const Capabilities& loopback_capabilities() {
  static const Capabilities capabilities = [] {
    Capabilities facts;
    facts.name = "loopback";
    facts.one_sided = true;
    facts.same_host_only = true;
    facts.max_slices = 65'536;
    facts.max_in_flight = 1024;
    return facts;
  }();
  return capabilities;
}

class Peer final : public LoopbackPeer {
 public:
  uint32_t add_segment(std::span<std::byte> memory) override {
    const std::lock_guard lock(mutex_);
    segments_.push_back(memory);
    return static_cast<uint32_t>(segments_.size() - 1);
  }

  RemoteExtent grant(uint32_t segment, uint64_t offset, uint64_t size, bool writable) override {
    const std::lock_guard lock(mutex_);
    const auto slot = static_cast<uint32_t>(generations_.size());
    generations_.push_back(2);
    writable_.push_back(writable);
    return {uint64_t{slot} + 1, segment, slot, 2, offset, size};
  }

  void invalidate(const RemoteExtent& extent) override {
    const std::lock_guard lock(mutex_);
    if (extent.slot < generations_.size()) generations_[extent.slot] += 2;
  }

  void kill() override {
    const std::lock_guard lock(mutex_);
    dead_ = true;
  }

  Code check(const RemoteExtent& extent, bool write) {
    const std::lock_guard lock(mutex_);
    if (dead_) return Code::kConnectionLost;
    if (extent.segment >= segments_.size() || extent.slot >= generations_.size() ||
        !inside(extent.offset, extent.size, segments_[extent.segment].size()) ||
        (write && !writable_[extent.slot])) {
      return Code::kInvalidArgument;
    }
    return generations_[extent.slot] == extent.generation ? Code::kOk : Code::kGenerationChanged;
  }

  std::byte* bytes_at(uint32_t segment, uint64_t offset) {
    const std::lock_guard lock(mutex_);
    return segments_[segment].data() + offset;
  }

 private:
  std::mutex mutex_;
  std::vector<std::span<std::byte>> segments_;
  std::vector<uint64_t> generations_;
  std::vector<bool> writable_;
  bool dead_ = false;
};

class LoopbackLink final : public QueuedLink {
 public:
  LoopbackLink(std::shared_ptr<Peer> peer, LoopbackFaults faults)
      : QueuedLink(loopback_capabilities()), peer_(std::move(peer)), faults_(faults), state_(faults.seed) {}
  Session* session() override { return nullptr; }

 protected:
  size_t step_bytes() const override {
    return static_cast<size_t>(std::max<uint64_t>(faults_.chunk_bytes, 1));
  }

  Code begin(const Pending& pending) override {
    if (faults_.die_after_transfers != 0 && begun_++ >= faults_.die_after_transfers) peer_->kill();
    if (happens(faults_.error_per_million)) return Code::kIncomplete;
    flip_ = happens(faults_.bit_flip_per_million);
    return peer_->check(pending.transfer.remote, pending.transfer.direction == Direction::kWrite);
  }

  Code end(const Pending& pending) override {
    return peer_->check(pending.transfer.remote, pending.transfer.direction == Direction::kWrite);
  }

  Code move(Pending& pending, Slice piece) override {
    const RemoteExtent& remote = pending.transfer.remote;
    const Code code = peer_->check(remote, pending.transfer.direction == Direction::kWrite);
    if (code != Code::kOk) return code;
    std::byte* memory =
        peer_->bytes_at(remote.segment, remote.offset + pending.transfer.offset + pending.moved);
    const bool read = pending.transfer.direction == Direction::kRead;
    pending.crc =
        copy_crc32c(read ? piece.data : memory, read ? memory : piece.data, piece.size, pending.crc);
    if (flip_) {  // on the way: the receiver's memory differs, and a reader's CRC shows it
      (read ? piece.data : memory)[0] ^= std::byte{1};
      if (read) pending.crc ^= 1;
      flip_ = false;
    }
    return Code::kOk;
  }

 private:
  uint64_t random() {
    state_ += 0x9e3779b97f4a7c15ull;
    uint64_t value = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
  }
  bool happens(uint32_t per_million) { return per_million != 0 && random() % 1'000'000 < per_million; }

  std::shared_ptr<Peer> peer_;
  LoopbackFaults faults_;
  uint64_t state_;
  uint64_t begun_ = 0;
  bool flip_ = false;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Peer> peer, LoopbackFaults faults)
      : peer_(std::move(peer)), faults_(faults) {}
  const Capabilities& capabilities() const override { return loopback_capabilities(); }
  Status availability() const override { return Status::ok(); }
  Result<RegionHandle> register_region(const Region& region) override { return regions_.add(region); }
  Status unregister_region(RegionHandle handle) override { return regions_.remove(handle); }
  Result<std::unique_ptr<Link>> connect(const PeerDescription&, Deadline) override {
    return std::unique_ptr<Link>(new LoopbackLink(peer_, faults_));
  }

 private:
  std::shared_ptr<Peer> peer_;
  LoopbackFaults faults_;
  PlainRegions regions_;
};

}  // namespace

std::shared_ptr<LoopbackPeer> make_loopback_peer() {
  return std::make_shared<Peer>();
}

std::unique_ptr<Transport> make_loopback_transport(std::shared_ptr<LoopbackPeer> peer,
                                                   LoopbackFaults faults) {
  return std::make_unique<LoopbackTransport>(std::static_pointer_cast<Peer>(std::move(peer)), faults);
}

}  // namespace mooncache
