// RDMA devices of this machine as the transport and the server see them: rails, domains, endpoints, memory.
//
// The ideas: (1) nothing here needs the headers or the library of verbs, so any file may include it; what
// opens libibverbs at run time is behind open_fabric(), and absence is a sentence; (2) a domain is the unit
// of trust: memory exposed in it can be reached by the endpoints of the same domain only, so a node gives
// every connection its own; (3) an object keeps alive what it needs, and memory is quiet once its endpoint's
// stop() has drained or the endpoint is gone.
//
// A rail is one port of one device. Endpoints and memories are used by one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/rdma_config.h"
#include "mooncache/status.h"

namespace mooncache::rdma {

// Rails that one connection uses at most, and keys that one exposed extent carries.
inline constexpr size_t kMaxRails = 8;
// Ranges of local memory that one request gathers from, or scatters into.
inline constexpr size_t kMaxGather = 16;

using Options = RdmaConfig;
// CONFIG_INVALID with a sentence.
Status check(const Options& options);

enum class LinkLayer : uint8_t { kInfiniband = 1, kRoceV2 = 2 };
using Gid = std::array<std::byte, 16>;
// "::ffff:10.9.0.1" as 10.9.0.1, others in groups of four digits.
std::string gid_text(const Gid& gid);

enum class GidKind : uint8_t { kInfiniband, kRoceV1, kRoceV2 };
// One entry of a port's table of addresses.
struct GidEntry {
  Gid gid{};
  uint32_t index = 0;
  GidKind kind = GidKind::kRoceV2;
};

struct RailInfo {
  std::string device;
  uint32_t port = 1;
  LinkLayer layer = LinkLayer::kRoceV2;
  Gid gid{};
  uint32_t gid_index = 0;
  std::string gid_reason;  // why this one
  uint16_t lid = 0;
  uint8_t mtu = 0;  // as verbs number it: 1 = 256 ... 5 = 4096
  uint32_t max_message_bytes = 0;
  uint32_t max_outstanding_reads = 1;
  uint32_t max_gather = 1;  // ranges of one request
  int numa_node = -1;
  std::string pci_path;  // PciPlace::path (choose.h); empty: no PCI device
  uint64_t megabits_per_s = 0;
};

// One line of `doctor`: every port that was found, used or not.
struct RailReport {
  RailInfo info;
  bool usable = false;
  std::string reason;      // "…, because …" when it is not used
  std::string gpu_direct;  // how it would reach GPU memory: "dma-buf", "nvidia-peermem, …" or "none, …"
};

// How to reach an endpoint. Goes over the authenticated connection.
struct EndpointAddress {
  Gid gid{};
  uint32_t queue_pair = 0;
  uint32_t first_packet = 0;
  uint16_t lid = 0;
  uint8_t mtu = 0;
  LinkLayer layer = LinkLayer::kRoceV2;
  uint8_t outstanding_reads = 1;  // that it answers at a time
};

// Local memory of a request, and what its device knows it by.
struct LocalRange {
  std::byte* data = nullptr;
  uint32_t length = 0;
  uint32_t key = 0;
};
// One request: bytes between ranges of local memory, in their order, and an exposed extent of the peer.
struct Post {
  uint64_t id = 0;
  bool write = false;
  std::array<LocalRange, kMaxGather> local{};
  uint32_t ranges = 0;  // of `local`
  uint32_t length = 0;  // of all ranges
  uint64_t remote_address = 0;
  uint32_t remote_key = 0;
  bool device = false;  // they are addresses of a GPU

  void add(std::byte* data, uint32_t size, uint32_t key) {
    local[ranges++] = {data, size, key};
    length += size;
  }
};

enum class WorkOutcome : uint8_t {
  kDone,
  kFlushed,  // given back unsent or half sent, because the endpoint failed or was stopped
  kRefused,  // the peer's device refused key or range
  kGone,     // the peer or the path does not answer
  kFailed,   // anything else: the local device's own words are in `detail`
};
struct Reaped {
  uint64_t id = 0;
  WorkOutcome outcome = WorkOutcome::kDone;
  uint32_t detail = 0;
};

// Memory of a GPU, by its device address. The dma-buf may be closed when it was attached.
struct DeviceRange {
  uint64_t address = 0;
  uint64_t size = 0;
  int dma_buf_fd = -1;
  uint64_t dma_buf_offset = 0;  // of `address` in it
  std::string no_dma_buf;       // why there is none
};

// Of memory with one device, for as long as this lives: its own use (attach), or a peer's (expose).
class Registration {
 public:
  virtual ~Registration() = default;  // after it no peer reaches the memory by its keys
  // How the device gets at it: "pages", "dma-buf", or "nvidia-peermem, because ...".
  virtual std::string how() const = 0;
  virtual uint32_t local_key() const = 0;
  virtual uint32_t remote_key() const = 0;
  // What the peer names the first byte by; tells nothing about where it lies in this process.
  virtual uint64_t remote_address() const = 0;
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;  // stops; returns when the device has let go of all memory
  virtual EndpointAddress address() const = 0;
  virtual Status connect(const EndpointAddress& peer) = 0;
  // Takes requests until the queue is full; returns how many. Less than there is room for means that the
  // endpoint has failed.
  virtual size_t post(std::span<const Post> posts) = 0;
  virtual size_t poll(std::span<Reaped> reaped) = 0;
  virtual size_t room() const = 0;
  virtual size_t outstanding() const = 0;
  virtual bool failed() const = 0;
  // From now on nothing new starts; what is outstanding comes back from poll() as kDone or kFlushed.
  virtual void stop() = 0;
  // A descriptor that becomes readable when something was finished after arm(). Poll once more after arm().
  virtual int fd() const = 0;
  virtual void arm() = 0;
};

class Domain {
 public:
  virtual ~Domain() = default;
  // For the peer to read, or to write. Exactly these bytes.
  virtual Result<std::unique_ptr<Registration>> expose(Slice memory, bool writable) = 0;
  // For this side's own requests.
  virtual Result<std::unique_ptr<Registration>> attach(Slice memory) = 0;
  // The same of a GPU's memory: by dma-buf, else by nvidia-peermem, else TRANSPORT_UNAVAILABLE with both
  // reasons.
  virtual Result<std::unique_ptr<Registration>> attach_device(const DeviceRange& memory) = 0;
  // For the peer, as expose(): exactly these bytes, whatever else lies in the pages around them.
  virtual Result<std::unique_ptr<Registration>> expose_device(const DeviceRange& memory, bool writable) = 0;
  // `depth` requests at a time; 0 = it only answers.
  virtual Result<std::unique_ptr<Endpoint>> make_endpoint(uint32_t depth) = 0;
  // False: the device refused to forget memory that was given back, so its key may still work on the
  // endpoints of this domain. Who must be kept out of it loses those.
  virtual bool sound() const = 0;
};

class Rail {
 public:
  virtual ~Rail() = default;
  // As long as the rail; when the port gets another address, later calls answer with another object.
  virtual const RailInfo& info() const = 0;
  // The port is active and the device is there. Changes when the device says so.
  virtual bool up() const = 0;
  virtual Result<std::unique_ptr<Domain>> make_domain() = 0;
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual std::span<const std::shared_ptr<Rail>> rails() const = 0;
  virtual std::vector<RailReport> report() const = 0;
};

// TRANSPORT_UNAVAILABLE "RDMA unavailable, because …": no library, no device, no usable port.
Result<std::shared_ptr<Fabric>> open_fabric(const Options& options);
// What was found, also when nothing can be used.
Result<std::vector<RailReport>> look_for_rails(const Options& options);

// Puts the address that a port is used under into `info`, whose link layer is set: the first of InfiniBand;
// RoCE v2 over IPv4, then IPv6, then link-local, never v1, which no router and no other subnet takes.
// `wanted`: only this entry; -1 = any. False and why when there is none.
bool choose_gid(std::span<const GidEntry> table, int wanted, RailInfo& info, std::string& why);

// The rail to answer `peer` with: the same link layer, then the longest common prefix of the GIDs (the same
// subnet), then the one used least, as `used` weighs them. SIZE_MAX: none fits.
size_t choose_rail(std::span<const std::shared_ptr<Rail>> rails, const EndpointAddress& peer,
                   std::span<const uint32_t> used);

}  // namespace mooncache::rdma
