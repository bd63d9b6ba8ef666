// One node as a client knows it: its lanes (authenticated connections), its breaker, its shared memory. Lives
// as long as it is in use, also after it left the map.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "client/breaker.h"
#include "client/counters.h"
#include "client/hedge.h"
#include "client/lane_queue.h"
#include "transport/rdma.h"
#include "transport/shm.h"

namespace mooncache {

// The RDMA transport of a client, opened when the first node offers it.
class RdmaAccess {
 public:
  RdmaAccess(RdmaConfig config, uint64_t staging_bytes)
      : config_(std::move(config)), staging_bytes_(staging_bytes) {}
  // The transport once it was asked for, whether or not it can be used; else null.
  RdmaTransport* opened() { return opened_.load(std::memory_order_acquire); }
  // Null: switched off, or unavailable on this machine.
  RdmaTransport* get() {
    if (!config_.enabled) return nullptr;
    std::call_once(once_, [this] {
      transport_ = std::make_unique<RdmaTransport>(config_, staging_bytes_);
      opened_.store(transport_.get(), std::memory_order_release);
    });
    return transport_->availability() ? transport_.get() : nullptr;
  }

 private:
  const RdmaConfig config_;
  const uint64_t staging_bytes_;
  std::once_flag once_;
  std::unique_ptr<RdmaTransport> transport_;
  std::atomic<RdmaTransport*> opened_{nullptr};
};

struct Lane {
  std::unique_ptr<Session> session;
  LaneUse use = LaneUse::kSmall;
  bool reused = false;  // came out of the pool: may have died there
  uint64_t idle_since_ms = 0;
  RailRenewal renewal;          // of this lane and those that it took the place of
  uint64_t key_generation = 0;  // of the key that it proved
};

// Where a call's lanes come from.
class LaneSource {
 public:
  virtual ~LaneSource() = default;
  // A lane, idle or new; ok() with an empty one when others have it, and perhaps a ticket with which to ask
  // again. CLOSED: there will be none.
  virtual Result<Lane> acquire(Route route, LaneUse use, std::unique_ptr<LaneTicket>& ticket) = 0;
  virtual void release(Lane lane) = 0;
  // What was under way on it was cut short, or it failed.
  virtual void drop(Lane lane) = 0;
};

class Node final : public LaneSource {
 public:
  Node(NodeInfo info, const ClientConfig& config, std::shared_ptr<net::TlsContext> tls, Counters& counters,
       std::shared_ptr<RdmaAccess> rdma);

  const NodeInfo& info() const { return info_; }

  // Shared memory is possible: same host, a unix socket, and no failure of it in the last seconds.
  Route preferred_route(uint64_t now_ms) const;
  void unix_failed(uint64_t now_ms);
  // To use on this session now; null when RDMA is impossible, or failed to this node in the last seconds.
  RdmaTransport* rdma_for(const Session& session, uint64_t now_ms);
  void rdma_failed(uint64_t now_ms);
  uint64_t rdma_failures() const { return rdma_failures_.load(std::memory_order_relaxed); }
  // How often it was given up for the connections to this node for some seconds; of several failures at once
  // one.
  uint64_t rdma_fallbacks() const { return rdma_fallbacks_.load(std::memory_order_relaxed); }
  void rdma_moved(uint64_t bytes);
  // Ranges of local memory that its devices take in one request.
  uint32_t rdma_gathers() const;
  uint64_t rdma_bytes() const { return rdma_bytes_.load(std::memory_order_relaxed); }
  void one_sided_writes_failed() { one_sided_writes_ = false; }
  bool one_sided_writes() const { return one_sided_writes_; }

  // What the gets of this client have under way with the node.
  void reads_begin(uint64_t bytes) { reading_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void reads_end(uint64_t bytes) { reading_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t reading_bytes() const { return reading_bytes_.load(std::memory_order_relaxed); }
  // Whether a get may ask what it has before it reads: not for a while after it did not answer at once.
  bool answers_at_once(uint64_t now_ms) const {
    return now_ms >= slow_until_ms_.load(std::memory_order_relaxed);
  }
  void answered_late(uint64_t now_ms) { slow_until_ms_ = now_ms + kSlowPauseMs; }

  // A connection beside the lanes; drop it like any other object.
  Result<std::unique_ptr<Session>> start_session(Route route) const {
    return Session::start(peer(), route, tls_, limits_);
  }
  // What new connections prove. Idle lanes end now, others after their use.
  void set_key(const std::array<std::byte, 32>& key);
  // Grows with each key.
  uint64_t key_generation() const { return key_generation_.load(std::memory_order_relaxed); }
  // As many as are allowed. Idle ones go back to the pool, others are closed.
  Result<Lane> acquire(Route route, LaneUse use, std::unique_ptr<LaneTicket>& ticket) override;
  void release(Lane lane) override;
  void drop(Lane lane) override;
  // What moved over the lane's connection since the last time.
  void count_bytes(Lane& lane);
  // The client is closed: no call gets a lane from now on.
  void close_idle();
  // It left the map. Calls that began before still get lanes, which are closed after their use.
  void retire();
  // Lanes that were not used since then, with their queue pairs.
  void close_idle_since(uint64_t before_ms);

  bool allow(uint64_t now_ms);
  bool breaker_open(uint64_t now_ms);
  void success(uint64_t now_ms);
  // `took_ms`: from the beginning of the attempt.
  void failure(uint64_t now_ms, const Status& status, uint64_t took_ms);
  // Why the breaker is open.
  Status last_failure();

  // What a read of that class took here; `late`: longer than such reads should, or another holder was faster.
  // After several late ones in a row the node is slow for a while: its blocks are read where else they are.
  void read_took(size_t size_class, uint64_t took_us, bool late, uint64_t now_ms);
  std::optional<uint64_t> read_p99_us(size_t size_class) const { return tails_[size_class].p99_us(); }
  bool slow(uint64_t now_ms);
  // Whether a read that may have another holder goes here: not while the node is slow, and for a growing part
  // of the reads after that, or after its breaker was open. `roll`: a random number. May book a probe.
  bool prefers(uint64_t now_ms, uint64_t roll);

  // Mapped from the node process of that incarnation; null when there is none.
  std::shared_ptr<ShmSegments> segments(uint64_t incarnation);
  void set_segments(std::shared_ptr<ShmSegments> segments, uint64_t incarnation);

 private:
  // The idle lane of that route that was used last, and those that end so that there is room for a new one.
  Lane take_idle(Route route, std::vector<Lane>& ended);

  PeerDescription peer() const {
    const std::lock_guard lock(mutex_);
    return peer_;
  }

  NodeInfo info_;
  PeerDescription peer_;  // its key: guarded by mutex_
  std::atomic<uint64_t> key_generation_{0};
  SessionLimits limits_;
  bool shm_possible_;
  std::shared_ptr<net::TlsContext> tls_;
  Counters& counters_;
  const std::shared_ptr<RdmaAccess> rdma_;

  mutable std::mutex mutex_;
  LaneQueue queue_;
  std::vector<Lane> idle_;  // with the turns under way never more than the queue has turns
  bool closed_ = false;
  bool retired_ = false;
  Breaker breaker_;
  Breaker slowness_;                 // late reads are its failures
  bool slow_probe_ = false;          // a read is under way that shows whether it is still slow
  std::atomic<bool> at_rest_{true};  // both of them, without the lock
  std::array<TailEstimate, kHedgeClassBytes.size()> tails_;
  Status last_failure_;
  std::shared_ptr<ShmSegments> segments_;
  uint64_t segments_incarnation_ = 0;
  static constexpr uint64_t kSlowPauseMs = 10'000;
  std::atomic<uint64_t> reading_bytes_{0};
  std::atomic<uint64_t> slow_until_ms_{0};
  std::atomic<uint64_t> unix_again_ms_{0};
  Detour rdma_detour_;
  std::atomic<bool> rdma_failed_lately_{false};  // as rdma_detour_ says, without the lock
  std::atomic<uint64_t> rdma_bytes_{0}, rdma_failures_{0}, rdma_fallbacks_{0};
  std::atomic<bool> one_sided_writes_{true};
};

// Bytes that a node is asked for count as long as the request is under way.
class ReadUnderWay {
 public:
  ReadUnderWay(Node& node, uint64_t bytes) : node_(&node), bytes_(bytes) { node.reads_begin(bytes); }
  ReadUnderWay(ReadUnderWay&& other) noexcept
      : node_(std::exchange(other.node_, nullptr)), bytes_(other.bytes_) {}
  ReadUnderWay& operator=(ReadUnderWay&&) = delete;
  ~ReadUnderWay() {
    if (node_ != nullptr) node_->reads_end(bytes_);
  }

 private:
  Node* node_;
  uint64_t bytes_;
};

uint64_t steady_ms();

}  // namespace mooncache
