// A client that follows its cluster: one address of any store node is enough to begin with. The nodes hand
// the cluster map out on their data ports, so nothing but the data plane is spoken: no gRPC, no master, no
// library.
//
// The ideas: (1) a thread asks one node after the other for the map, every second and as soon as a call met a
// node that it could not reach, and gives each newer map to a Client; (2) all that moves bytes is that
// Client's: placement, reconnects, retries, hedged reads, shared memory, RDMA; (3) where there are more nodes
// than a miss may be asked of, blocks that were not found where they are likely to be are looked for on all
// nodes, once for a whole batch, and not again for a moment.
//
// All calls are thread-safe and mean what they mean in client.h. In a child of fork() they answer CLOSED.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mooncache/client.h"
#include "mooncache/status.h"

namespace mooncache {

struct ClusterConfig {
  // Where to begin: data ports of any nodes, "host:port" or "unix:/path". They are asked again whenever no
  // node of the map answers. At most 64.
  std::vector<std::string> seeds;
  // One line, as credentials_from_token() takes it. Empty: client.credentials as it is.
  std::string token;
  // All else. `client.host_id` empty: found out from a node on this host, if there is one.
  ClientConfig client;
  uint32_t connect_timeout_ms = 5000;  // of connect(): until a node has answered a map with nodes
  uint32_t refresh_ms = 1000;          // how often a node is asked whether it has a newer map; at least 10
};

struct ClusterState {
  uint64_t term = 0;
  uint64_t epoch = 0;
  uint64_t nodes = 0;             // of the map, without dead ones
  uint64_t confirmed_ms_ago = 0;  // since a node answered the map, or that it is still the same
  uint64_t refreshes = 0;         // answers of nodes
  uint64_t failures = 0;          // nodes that were asked and did not answer a map
  Status last_failure;            // OK: the last question was answered
};

class ClusterClient {
 public:
  // Waits until a seed has answered. CONFIG_INVALID, INVALID_ARGUMENT (a seed that is no address),
  // UNAUTHENTICATED; NODE_UNAVAILABLE, MASTER_UNAVAILABLE (nodes that have heard of no master), UNSUPPORTED
  // (nodes of an earlier version), with what the last one said.
  static Result<std::unique_ptr<ClusterClient>> connect(ClusterConfig config);
  ~ClusterClient();
  ClusterClient(const ClusterClient&) = delete;
  ClusterClient& operator=(const ClusterClient&) = delete;

  Status put(std::span<const PutBlock> blocks, uint32_t replicas, const CallOptions& options,
             std::span<PutOutcome> outcomes);
  Status get(std::span<const GetBlock> blocks, const GetOptions& how, const CallOptions& options,
             std::span<GetOutcome> outcomes);
  // OK, NOT_FOUND, or NODE_UNAVAILABLE: a node that may have it did not answer.
  Status exists(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes);
  Result<MatchReport> match(std::span<const Key> keys, bool touch, const CallOptions& options);
  Status remove(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes);
  Status pin(std::span<const Key> keys, uint32_t ttl_ms, const CallOptions& options, std::span<Code> codes);
  Status unpin(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes);
  Status stat(std::span<const Key> keys, const CallOptions& options, std::span<BlockStat> stats);
  // Memory that shared transports use in place; see Client::register_buffer.
  Status register_buffer(Slice memory);
  Status unregister_buffer(Slice memory);

  // The client that has the map: reservations, watches, GPU memory, counters. Do not give it a map.
  Client& client();
  ClusterState state() const;
  // Has the map asked for now, without waiting for it.
  void refresh();
  // From now on connections prove this token, of the same tenant: after the cluster's token was replaced.
  Status set_token(const std::string& token);
  // As Client::close(). Also ends the thread that follows the cluster.
  void close();

 private:
  struct Impl;
  explicit ClusterClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mooncache
