// A transfer engine: memory of this process that peers read and write in batches of ranges, and the same of
// theirs. Engines find each other by descriptors; there is no store and no master between them.
//
// Who a peer is it proves with a token when it connects: its name is the tenant of that token. What it may
// read and write are grants, for each peer and range. On one host, memory that an engine allocated is mapped
// by its peers and copied without its processor; everything else goes over a unix socket or TCP, with a
// CRC-32C for every range.
//
// Bytes of a transfer are moved by a thread of its EnginePeer. When wait() has returned something else than
// DEADLINE_EXCEEDED of its own, or cancel() has returned, no byte of the caller's memory is read or
// written. What a cancelled write has sent already may still arrive in the peer's ranges.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/transport.h"
#include "mooncache/types.h"

namespace mooncache {

struct EngineConfig {
  // What this engine is called, and what it proves to its peers. With the cluster's secret any name may be
  // had (credentials_from_token gives it for the tenant of the token).
  Credentials credentials;
  std::string host_id;  // same text = same host: shared memory may be tried
  // To be reached by others: the cluster's secret, with which it verifies them.
  bool listens = false;
  std::array<std::byte, 32> secret{};
  std::string tcp_host = "127.0.0.1";
  uint16_t tcp_port = 0;        // 0 = any free one
  std::string advertised_host;  // what peers connect to; "" = tcp_host
  std::string unix_path;        // "" = none
  std::string tls_cert, tls_key, tls_client_ca;
  PeerTls peer_tls;  // for peers whose descriptor says TLS
  uint32_t max_connections = 1024;
  uint32_t progress_timeout_ms = 30'000;  // a peer that takes or sends nothing for so long is given up
  bool use_shared_memory = true;
};

struct EngineGrant {
  std::string peer = "*";  // "*": everyone who has proved a token of the cluster
  uint64_t offset = 0;
  uint64_t length = 0;  // 0 = up to the end of the region
  bool read = false;
  bool write = false;
};

struct EngineNotification {
  std::string peer;
  std::vector<std::byte> bytes;
};

struct RangeCopy {
  std::byte* local = nullptr;  // a write only reads it
  uint64_t remote = 0;         // an address of the peer: a region's base and an offset
  uint64_t bytes = 0;
};

struct DescribedMemory {
  uint64_t base = 0;
  uint64_t size = 0;
  bool readable = false, writable = false, mappable = false;
  std::string label;
};

// It is unmapped when it is neither registered nor owned by anyone.
struct AllocatedMemory {
  uint64_t base = 0;
  Slice memory;
  std::shared_ptr<void> owner;
};

class EngineTransfer {
 public:
  virtual ~EngineTransfer() = default;
  // What became of it. DEADLINE_EXCEEDED also when `deadline` passed while it goes on: done() tells.
  virtual Status wait(Deadline deadline) = 0;
  virtual bool done() const = 0;
  // Ends it with CANCELLED unless it is done, and returns when no byte of local memory moves.
  virtual void cancel() = 0;
  // How the bytes went: "shm", "unix", "tcp"; "" = not yet.
  virtual std::string route() const = 0;
};

// A connection to one engine. All calls from any thread.
class EnginePeer {
 public:
  virtual ~EnginePeer() = default;  // cancels what is under way
  virtual std::string name() const = 0;
  // What this side may use, as of connect() or the last refresh().
  virtual std::vector<DescribedMemory> regions() const = 0;
  virtual Status refresh(Deadline deadline) = 0;
  // Takes its place behind the transfers before it. LIMIT_EXCEEDED: too many are waiting; INVALID_ARGUMENT.
  virtual Result<std::shared_ptr<EngineTransfer>> submit(Direction direction, std::vector<RangeCopy> copies,
                                                         Deadline deadline) = 0;
  // Behind the transfers before it: who is notified finds their bytes in place. At most 64 KiB.
  virtual Status notify(std::span<const std::byte> bytes, Deadline deadline) = 0;
  virtual void close() = 0;
};

class TransferEngine {
 public:
  // CONFIG_INVALID, and what sockets say.
  static Result<std::unique_ptr<TransferEngine>> open(EngineConfig config);
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // The memory is the caller's, and stays until unregister() has succeeded or the engine is closed. `base`:
  // its address for peers; 0 = one that was never used before, which is the safe choice.
  Result<uint64_t> register_memory(Slice memory, std::string label, std::span<const EngineGrant> grants,
                                   uint64_t base = 0);
  // New memory that peers on this host may map.
  Result<AllocatedMemory> allocate(uint64_t size_bytes, std::string label,
                                   std::span<const EngineGrant> grants);
  // Returns when no peer uses it. DEADLINE_EXCEEDED: it is no longer found, but still in use. NOT_FOUND.
  Status unregister(uint64_t base, Deadline deadline);
  Status grant(uint64_t base, EngineGrant grant);
  Status revoke(uint64_t base, const std::string& peer, Deadline deadline);

  // Bytes to hand to a peer: where this engine is, and its regions; those that `peer` may use, or all ("").
  // CLOSED: this engine does not listen.
  Result<std::vector<std::byte>> describe(const std::string& peer = "") const;
  // INVALID_ARGUMENT: these bytes are no descriptor. NODE_UNAVAILABLE, UNAUTHENTICATED, STALE_INCARNATION
  // (the engine was started again since), DEADLINE_EXCEEDED.
  Result<std::shared_ptr<EnginePeer>> connect(std::span<const std::byte> descriptor, Deadline deadline);
  // To whatever engine answers there, and asks it for its descriptor.
  Result<std::shared_ptr<EnginePeer>> connect(const std::string& tcp_host, uint16_t tcp_port,
                                              Deadline deadline);

  uint16_t tcp_port() const;  // 0 = it does not listen
  // Waits until there is at least one, or the deadline has passed.
  std::vector<EngineNotification> notifications(size_t most, Deadline deadline);
  std::vector<std::pair<std::string, uint64_t>> stats() const;
  // Ends every connection of peers; their transfers fail. Memory may be used for anything afterwards.
  void close();

 private:
  struct Impl;
  explicit TransferEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mooncache
