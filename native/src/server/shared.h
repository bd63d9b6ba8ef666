// What the loops of one server share: configuration, store, tenants, log and a few totals.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "mooncache/server.h"
#include "mooncache/store.h"
#include "rdma/fabric.h"
#include "server/event_ring.h"
#include "server/published_map.h"
#include "server/secret_ring.h"
#include "server/wait_table.h"
#include "store/arena_view.h"

namespace mooncache::server {

// Tenants seen so far. Written once per connection, read by the reports.
class TenantTable {
 public:
  explicit TenantTable(size_t limit) : limit_(limit) {}

  // False when the table is full and the tenant is not in it.
  bool learn(TenantId id, const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (names_.contains(id)) return true;
    if (names_.size() >= limit_) return false;
    names_.emplace(id, name);
    return true;
  }
  std::map<TenantId, std::string> all() const {
    const std::lock_guard lock(mutex_);
    return names_;
  }

 private:
  mutable std::mutex mutex_;
  const size_t limit_;
  std::map<TenantId, std::string> names_;
};

// What the connections of all loops have on one rail.
struct RailCounters {
  std::atomic<uint64_t> connections{0}, grants{0}, granted_bytes{0}, failures{0};
};

struct Shared {
  explicit Shared(ServerConfig config_in)
      : config(std::move(config_in)),
        secrets(config.secret),
        tenants(config.max_tenants),
        waits({config.max_waits_per_connection, config.max_waited_keys}),
        log(config.log_capacity) {}

  ServerConfig config;
  std::unique_ptr<Store> store;
  bool shares_memory = true;             // with processes of this host
  bool memory_may_go = false;            // the arena is a mapping of a file or a device
  std::atomic<uint64_t> lost_bytes{0};   // of the arena, as they were last looked at
  std::shared_ptr<rdma::Fabric> fabric;  // null: fabric_reason says why
  std::string fabric_reason;
  DeviceArena device_arena;  // where the fabric's devices find the blocks, when they lie on a GPU
  std::deque<RailCounters> rail_counters;  // one for each rail of the fabric
  SecretRing secrets;
  TenantTable tenants;
  WaitTable waits;
  PublishedMap cluster_map;
  EventRing log;
  std::atomic<uint32_t> connections{0};     // open or lingering
  std::atomic<uint64_t> buffered_bytes{0};  // held by connections for what is in hand
  std::atomic<uint32_t> surplus{0};         // of them: beyond max_connections, about to be refused
  // Of them: not proved yet. Strangers on the network have a budget of their own, so that they cannot keep
  // the processes of this host out.
  std::atomic<uint32_t> strangers_tcp{0}, strangers_unix{0};
  std::atomic<uint32_t>& strangers(bool is_unix) { return is_unix ? strangers_unix : strangers_tcp; }
  bool too_many_unauthenticated(bool is_unix) {
    return strangers(is_unix).load() >= config.max_unauthenticated;
  }
  // Requests that wait for space are served in the order of their tickets, the first of which is 1.
  std::atomic<uint64_t> park_tickets{0};
  // How often space may have become free; who failed to get it looks whether that changed meanwhile.
  std::atomic<uint64_t> space_releases{0};
  // Wakes the loop whose longest waiter has the first ticket between these two; false: there is none. Set
  // once, before the loops run.
  std::function<bool(uint64_t after, uint64_t before)> wake_waiter;
  // Every counter of the server and its store; set once, before the loops run.
  std::function<std::vector<std::pair<std::string, uint64_t>>()> node_stat;
};

}  // namespace mooncache::server
