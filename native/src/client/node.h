// One node as a client knows it: its lanes (authenticated connections), its breaker, its shared memory. Lives
// as long as anybody uses it, also after it left the map.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "client/breaker.h"
#include "client/counters.h"
#include "transport/shm.h"

namespace mooncache {

struct Lane {
  std::unique_ptr<Session> session;
  bool reused = false;  // came out of the pool: may have died there
};

class Node {
 public:
  Node(NodeInfo info, const ClientConfig& config, std::shared_ptr<net::TlsContext> tls, Counters& counters);

  const NodeInfo& info() const { return info_; }
  const PeerDescription& peer() const { return peer_; }

  // Shared memory is possible: same host, a unix socket, and no failure of it in the last seconds.
  Route preferred_route(uint64_t now_ms) const;
  void unix_failed(uint64_t now_ms);
  void one_sided_writes_failed() { one_sided_writes_ = false; }
  bool one_sided_writes() const { return one_sided_writes_; }

  // An idle or a new lane; ok() with an empty lane when all allowed ones are in use.
  Result<Lane> acquire(Route route);
  void release(Lane lane);  // idle lanes go back to the pool, others are closed
  void drop(Lane lane);
  void close_idle();

  bool allow(uint64_t now_ms);
  bool breaker_open(uint64_t now_ms);
  void success();
  void failure(uint64_t now_ms, const Status& status);
  // Why the breaker is open.
  Status last_failure();

  // Mapped from the node process of that incarnation; null when there is none.
  std::shared_ptr<ShmSegments> segments(uint64_t incarnation);
  void set_segments(std::shared_ptr<ShmSegments> segments, uint64_t incarnation);

 private:
  void count_bytes(Lane& lane);

  NodeInfo info_;
  PeerDescription peer_;
  SessionLimits limits_;
  uint32_t lanes_max_;
  bool shm_possible_;
  std::shared_ptr<net::TlsContext> tls_;
  Counters& counters_;

  mutable std::mutex mutex_;
  std::vector<Lane> idle_;
  uint32_t open_ = 0;
  bool closed_ = false;
  Breaker breaker_;
  Status last_failure_;
  std::shared_ptr<ShmSegments> segments_;
  uint64_t segments_incarnation_ = 0;
  std::atomic<uint64_t> unix_again_ms_{0};
  std::atomic<bool> one_sided_writes_{true};
};

uint64_t steady_ms();

}  // namespace mooncache
