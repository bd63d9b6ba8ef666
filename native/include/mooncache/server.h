// The data-plane server of a store node: listeners, connections and a Store behind them.
//
// A few epoll loops own the connections, one loop per connection, and never block: bytes go from the
// socket straight into reserved extents and from pinned extents straight to the socket. Everything a
// peer says is checked before it is trusted, everything a peer can make the node hold has a limit, and
// every wait has a deadline. What a connection holds (pins, reservations) ends with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mooncache/cluster_map.h"
#include "mooncache/rdma_config.h"
#include "mooncache/status.h"
#include "mooncache/store.h"
#include "mooncache/types.h"

namespace mooncache {

namespace server {
class RangeTable;
}

struct ServerConfig {
  std::string node_id = "node";
  std::string host_id = "host";
  // Of the cluster; tenants' keys are derived from it. StoreServer::set_secrets() replaces it.
  std::array<std::byte, 32> secret{};
  uint64_t incarnation = 0;  // new at each start of the node

  std::string tcp_host = "127.0.0.1";  // "" = no TCP listener
  uint16_t tcp_port = 0;               // 0 = any free port
  // "" = no unix listener. The folder is created with mode 0700 when it is missing, the socket has mode 0600.
  std::string unix_path;
  std::string tls_cert, tls_key;  // PEM files; both set = TLS on TCP
  std::string tls_client_ca;      // set = clients must show a certificate of this CA

  uint32_t io_threads = 0;  // 0 = 1 on one or two cores, else 2
  uint32_t max_connections = 16'384;
  // Connections that have not proved themselves yet, of TCP and of the unix socket each; beyond it those that
  // were refused and the oldest go, the others wait in the backlog.
  uint32_t max_unauthenticated = 1024;
  uint32_t handshake_timeout_ms = 5'000;
  uint32_t idle_timeout_ms = 600'000;  // no request at all for this long: closed. 0 = never
  // The same for a TCP connection that holds pins or reservations: its peer may be gone without a word, and
  // what it holds is missing to the others. Clients send a PING meanwhile. 0 = idle_timeout_ms holds.
  uint32_t grant_timeout_ms = 30'000;
  // A peer whose host does not answer for this long is gone (keepalive probes, unacknowledged bytes).
  uint32_t peer_timeout_ms = 15'000;
  uint32_t frame_timeout_ms = 10'000;  // from a frame's first byte until its meta is complete
  // A payload in either direction that moves less than min_progress_bytes in this time is given up.
  uint32_t progress_timeout_ms = 30'000;
  uint32_t min_progress_bytes = 65'536;
  uint32_t max_wait_ms = 60'000;  // cap of what a PUT or RESERVE may ask to wait for space

  uint32_t max_pins_per_connection = 65'536;
  uint32_t max_reservations_per_connection = 16'384;
  uint64_t max_reserved_bytes_per_connection = 0;         // 0 = the capacity
  uint64_t max_queued_bytes_per_connection = 8ull << 20;  // of responses, before reading stops
  // Memory for frames, answers and operations in hand, of all connections together: 64 KiB for each of
  // 16,384. Each has limits of its own, which allow it some MiB; beyond this sum those that hold most are
  // closed.
  uint64_t max_buffered_bytes = 1ull << 30;
  uint32_t max_waits_per_connection = 1024;
  uint64_t max_waited_keys = 1 << 19;  // of all open waits together; each takes about 140 bytes
  uint32_t max_tenants = 65'536;
  int socket_buffer_bytes = 0;  // 0 = the kernel tunes it
  size_t log_capacity = 4096;   // events kept until drain_log

  RdmaConfig rdma;
  StoreConfig store;
  // Not null: a transfer engine. It serves these ranges and no blocks.
  std::shared_ptr<server::RangeTable> ranges;
};

struct Endpoints {
  std::string tcp_host;
  uint16_t tcp_port = 0;  // 0 = no TCP listener
  std::string unix_path;
  bool tls = false;
};

// One RDMA port that the server answers on, at one moment.
struct RailView {
  std::string device;
  uint32_t port = 1;
  std::string address;     // its GID as people write it
  std::string link_layer;  // "InfiniBand" or "RoCE v2"
  uint32_t mtu_bytes = 0;
  int numa_node = -1;  // -1 = not known
  uint64_t megabits_per_s = 0;
  bool up = false;
  uint64_t connections = 0;    // that have a queue pair on it now
  uint64_t grants = 0;         // extents opened on it so far
  uint64_t granted_bytes = 0;  // their sizes; what of it was moved only the peers know
  uint64_t failures = 0;       // queue pairs that could not be made or connected, extents that it refused
};

struct ServerLogEvent {
  uint8_t level = 20;  // 10 debug, 20 info, 30 warning, 40 error
  std::string event;   // stable code
  std::string message;
};

struct OpcodeLatency {
  std::string opcode;
  uint64_t count = 0;
  uint64_t sum_us = 0;
  std::vector<uint64_t> buckets;  // counts, one per bound
};
struct LatencyHistograms {
  std::vector<uint64_t> bounds_us;  // exclusive upper bounds; the last bucket also takes all that is slower
  std::vector<OpcodeLatency> opcodes;
};

inline constexpr size_t kMaxSecrets = 4;  // that a server accepts at a time

// Of one accepted secret.
struct SecretUse {
  uint64_t connections = 0;         // open, that proved it
  uint64_t last_proven_unix_s = 0;  // 0 = never
};

class StoreServer {
 public:
  // CONFIG_INVALID, or what Store::open answers. Opens no socket yet.
  static Result<std::unique_ptr<StoreServer>> create(ServerConfig config);
  ~StoreServer();  // stops at once when stop() was not called
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // Binds and serves. CONFIG_INVALID (address, path or certificate), TLS_ERROR, CLOSED (second start).
  Status start();
  // Accepts nothing more, lets requests in progress finish until `deadline`, closes all connections, joins
  // the loops and unlinks the unix socket. Blocks are still readable through store() afterwards.
  void stop(Deadline deadline);

  Endpoints endpoints() const;
  // All counters of the server (prefix-free names) and of the store ("store_" before its names).
  std::vector<std::pair<std::string, uint64_t>> stats() const;
  LatencyHistograms latency_histograms() const;
  // Empty without RDMA; the log says why.
  std::vector<RailView> rails() const;
  std::vector<ServerLogEvent> drain_log(size_t max_events);
  // Tenants that have authenticated since the start.
  std::map<TenantId, std::string> tenants() const;
  // The cluster's secrets that peers may prove from now on. A connection that proved another one ends with
  // its next request. INVALID_ARGUMENT: none, more than kMaxSecrets, or one of them twice.
  Status set_secrets(const std::vector<std::array<std::byte, 32>>& secrets);
  // In the order of set_secrets().
  std::vector<SecretUse> secret_uses() const;
  // What the node answers from now on when a peer asks which nodes there are; before the first map it has no
  // answer. INVALID_ARGUMENT: beyond the limits of cluster_map.h; the former map stays.
  Status set_cluster_map(const ClusterMap& map);
  // Limits of a tenant by name, which it also makes known. INVALID_ARGUMENT for a malformed name,
  // LIMIT_EXCEEDED: too many tenants.
  Status set_limits(const std::string& tenant, const TenantLimits& limits);
  // Store::set_keys() by name, as above.
  Status set_keys(const std::string& tenant, const std::vector<DiskKey>& keys);

  Store& store();
  // The clock of all times given to the store: milliseconds, monotonic.
  static uint64_t now_ms();

 private:
  struct Impl;
  explicit StoreServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mooncache
