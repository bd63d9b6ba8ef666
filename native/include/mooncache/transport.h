// Moving bytes between the caller's memory and an extent of a node, one interface for every wire.
//
// The invariant: bytes are moved by the thread that calls poll(), and by no other. After cancel()
// or close() returned, not one byte of the affected transfers moves in either direction, so the
// caller may free or reuse its memory at once.
//
// RDMA keeps it with a device that moves bytes on its own: unregistered memory of the caller is touched by
// the copy out of or into staging memory only, which poll() makes; registered memory is given back after the
// queue pair that worked on it was drained (src/transport/rdma.h).
//
// How the transports that come later fit, without a change to callers:
//  - CUDA: Region::kind says kDevice; staging or GPUDirect is the link's own affair.
//  - file: a Link whose peer is a directory; poll() reaps the ring.
// They announce themselves through Capabilities (data, asked once) and availability() (a sentence),
// never through a call that answers "not supported".
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"

namespace mooncache {

class Session;  // one authenticated connection to a node (src/transport/session.h)

// What the owner of a connection proves at HELLO. The key never goes on the wire.
struct Credentials {
  std::array<std::byte, 32> key{};
  std::string tenant = "default";
  std::string client_name = "mooncache";
  bool admin = false;
  uint64_t expires_unix_s = 0;  // of a session token; 0 = the key has no end
  BlockWriter writer;           // whose blocks its owner writes; id 0 = it does not say
};

// From the one line of a token file: the cluster token "mcc1.<64 hex digits>" acts for the tenant "default",
// a tenant token is "mct1.<tenant>.<64 hex digits>", a session token
// "mcs1.<tenant>.<end, in seconds of Unix time>.<64 hex digits>". UNAUTHENTICATED with a sentence that never
// repeats the token.
Result<Credentials> credentials_from_token(std::string_view token);

struct PeerTls {
  bool enabled = false;
  std::string ca_file;    // empty: the system's certificate authorities
  std::string cert_file;  // client certificate (mutual TLS), empty: none
  std::string key_file;
  std::string server_name;  // name to verify; empty: the peer's tcp_host
};

struct PeerDescription {
  std::string node_id;  // checked against the node's answer when not empty
  std::string host_id;
  std::string tcp_host;
  uint16_t tcp_port = 0;
  std::string unix_path;  // empty: the peer has no unix socket
  Credentials credentials;
  PeerTls tls;
};

enum class MemoryKind : uint8_t { kHost = 1, kDevice = 2 };

// Facts about a transport; callers choose by them, never by its name.
struct Capabilities {
  std::string name;
  bool fused_blocks = false;  // GET/PUT of whole blocks in one round trip
  bool one_sided = false;     // the peer's processor takes no part in a transfer
  bool same_host_only = false;
  uint8_t memory_kinds = static_cast<uint8_t>(MemoryKind::kHost);
  uint32_t max_slices = 0;     // per transfer
  uint32_t max_in_flight = 0;  // transfers accepted and not yet polled, per link
};

struct Region {
  Slice memory;  // kDevice: an address of the GPU, which the processor never reads
  MemoryKind kind = MemoryKind::kHost;
  // kDevice: a dma-buf and where in it the memory begins (GpuDevice::export_dma_buf), open until the region
  // was registered. -1: there is none, because of `no_dma_buf`.
  int dma_buf_fd = -1;
  uint64_t dma_buf_offset = 0;
  std::string no_dma_buf{};
  // Where the memory is, so that the nearest rails carry it: kDevice: the GPU's PCI address, "0000:3b:00.0",
  // empty = unknown; kHost: the NUMA node, -1 = the kernel is asked.
  std::string pci_address{};
  int numa_node = -1;
};
// Index and generation, never a pointer. 0 = no region.
using RegionHandle = uint64_t;

// A range that a node granted: a pinned block (to read) or a reservation (to write).
struct RemoteExtent {
  uint64_t grant = 0;
  uint32_t segment = 0;
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
  // Over RDMA: what the node's device calls the first byte, and the key for each rail of the link (0: none).
  bool exposed = false;
  uint64_t address = 0;
  std::array<uint32_t, 8> keys{};
};

using TransferId = uint64_t;
enum class Direction : uint8_t { kRead, kWrite };

struct Transfer {
  TransferId id = 0;
  Direction direction = Direction::kRead;
  RemoteExtent remote;
  uint64_t offset = 0;           // inside the extent; the length is the sum of the slices
  uint64_t together = 0;         // bytes of all transfers of the call, this one's among them; 0: not known
  std::span<const Slice> local;  // valid until the completion was polled; a WRITE only reads them
  RegionHandle region = 0;       // in which all slices lie
  // Else the region of each slice (of an empty one: any). Only submit() looks at them.
  std::span<const RegionHandle> regions{};
  bool wants_crc = true;  // false: a link may leave the checksum out. Only for measurements of the wire
};

struct Completion {
  TransferId id = 0;
  Code code = Code::kOk;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;  // of the bytes moved, computed in the pass that moved them
  bool checked = true;  // false: crc32c was not computed; so it is for device memory that is moved in place
};

// One connection to one peer. Not thread-safe: one thread at a time.
class Link {
 public:
  virtual ~Link() = default;
  // Takes transfers in order until the queue is full; returns how many it took. A transfer that can
  // never work (out of range, too many slices) is taken and completes with its code.
  virtual size_t submit(std::span<const Transfer> transfers) = 0;
  // Moves bytes until at least one completion is there or the deadline passed; returns the count.
  // Completions come in the order of submission, except for cancelled ones, which may overtake.
  virtual size_t poll(std::span<Completion> completions, Deadline deadline) = 0;
  // The transfer will complete with CANCELLED, unless it already completed. A transfer cut in the
  // middle may cost the whole link: the others then complete with CONNECTION_LOST.
  virtual Status cancel(TransferId id) = 0;
  // What is still queued completes with CLOSED at the next poll.
  virtual void close() = 0;
  virtual bool healthy() const = 0;
  // For callers that wait for more than this link. Bytes move while no thread polls, and one of the
  // descriptors added here becomes readable when poll() would find something; the result is for how many
  // milliseconds that may be relied on, 0 = poll now. Negative: bytes move inside poll() only, do not wait at
  // all.
  virtual int wait_for(std::vector<int>& fds) {
    (void)fds;
    return -1;
  }
  // Bytes that have landed since the link was made: whether it gets on while no transfer completes.
  virtual uint64_t bytes_moved() const { return 0; }
  // The connection on which grants are asked for; null when there is none (loopback).
  virtual Session* session() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const Capabilities& capabilities() const = 0;
  // OK, or TRANSPORT_UNAVAILABLE with a sentence "… unavailable, because …".
  virtual Status availability() const = 0;
  // INVALID_ARGUMENT: not one byte; TRANSPORT_UNAVAILABLE: memory that this transport cannot reach. The same
  // memory may be registered again: each registration has its own handle and ends on its own.
  virtual Result<RegionHandle> register_region(const Region& region) = 0;
  // INVALID_ARGUMENT: no such handle. Transfers under way keep the memory registered until they are over.
  virtual Status unregister_region(RegionHandle handle) = 0;
  virtual Result<std::unique_ptr<Link>> connect(const PeerDescription& peer, Deadline deadline) = 0;
};

// The transports of this build by name, best first: shm, rdma, tcp.
std::vector<std::string> transport_names();
// A new transport, or TRANSPORT_UNAVAILABLE / INVALID_ARGUMENT with the reason.
Result<std::unique_ptr<Transport>> make_transport(const std::string& name);
struct TransportReport {
  std::string name;
  bool available = false;
  std::string reason;  // empty when available
};
// What this machine can do, one line per known transport (for `doctor`).
std::vector<TransportReport> transport_report();

// ---- loopback: the reference implementation, in process, with seeded faults ----------------------

struct LoopbackFaults {
  uint64_t seed = 0;
  uint32_t error_per_million = 0;     // a transfer fails with INCOMPLETE before it moves a byte
  uint32_t bit_flip_per_million = 0;  // one bit of the moved bytes is flipped; the CRC tells
  uint64_t die_after_transfers = 0;   // the peer dies after so many transfers; 0 = never
  uint64_t chunk_bytes = 65536;       // bytes moved per step, so that cancel can fall in the middle
};

// The memory of a fake node: segments and a generation table, addressed by number only.
class LoopbackPeer {
 public:
  virtual ~LoopbackPeer() = default;
  virtual uint32_t add_segment(std::span<std::byte> memory) = 0;
  // A granted extent over [offset, offset + size) of a segment.
  virtual RemoteExtent grant(uint32_t segment, uint64_t offset, uint64_t size, bool writable) = 0;
  // Changes the slot's generation: later reads of the extent are refused.
  virtual void invalidate(const RemoteExtent& extent) = 0;
  virtual void kill() = 0;
};
std::shared_ptr<LoopbackPeer> make_loopback_peer();
std::unique_ptr<Transport> make_loopback_transport(std::shared_ptr<LoopbackPeer> peer,
                                                   LoopbackFaults faults = {});

}  // namespace mooncache
