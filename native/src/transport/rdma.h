// RDMA as a transport: one-sided reads and writes of granted extents over one queue pair per rail.
//
// How it keeps the promises of a Link: requests are posted and completions reaped by the thread that polls.
// Memory that is not registered is never shown to a device: its bytes go through staging slots of the
// transport, copied in the pass that computes the CRC, so a cancelled transfer leaves at most a slot behind
// that stays taken until the device let go of it. Memory of a registered region is read and written in place;
// cancelling such a transfer stops the queue pairs that work on it and waits until they are drained.
//
// The device is never kept waiting for a checksum: what landed or was posted queues up to be checked, piece
// by piece, after the free places of the queue pairs were filled again.
//
// A transfer is cut into slices; each goes to the healthy rail that will be through soonest. A rail that
// fails is stopped and its slices go to the others (writing the same bytes to the same place twice does no
// harm while the grant is held). With no rail left transfers end with TRANSPORT_UNAVAILABLE, and the caller
// goes over TCP.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "mooncache/rdma_config.h"
#include "rdma/choose.h"
#include "rdma/fabric.h"
#include "transport/session.h"

namespace mooncache {

class RdmaTransport;

// A rail as the client uses it: its own domain, with the staging memory in it.
struct RdmaRail {
  std::shared_ptr<rdma::Rail> rail;
  std::unique_ptr<rdma::Domain> domain;
  std::unique_ptr<rdma::Registration> staging;
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> failures{0};
  // Of all links of the transport, so that its threads see each other's load.
  std::atomic<uint64_t> in_flight_bytes{0};  // posted, or in an outbox
  std::atomic<uint32_t> links{0};            // with a queue pair here

  rdma::RailLoad load() const;
};

// Slots of registered memory, shared by the links of a transport.
class RdmaStaging {
 public:
  static constexpr uint32_t kSlotBytes = 256 << 10;

  // Its memory is not inherited by forks.
  static Result<std::unique_ptr<RdmaStaging>> create(uint64_t bytes);
  ~RdmaStaging();
  RdmaStaging(const RdmaStaging&) = delete;
  RdmaStaging& operator=(const RdmaStaging&) = delete;

  Slice memory() const { return {data_, static_cast<size_t>(slots_ * kSlotBytes)}; }
  std::byte* slot_data(uint32_t slot) const { return data_ + uint64_t{slot} * kSlotBytes; }
  std::optional<uint32_t> acquire();
  void release(uint32_t slot);

 private:
  RdmaStaging(std::byte* data, uint64_t slots);
  std::byte* const data_;
  const uint64_t slots_;
  std::mutex mutex_;
  std::vector<uint32_t> free_;
};

struct RdmaRegion {
  // Handles of device memory, so that one that is gone is never taken for memory that the processor can copy.
  static constexpr RegionHandle kDevice = 1ull << 63;
  Slice memory;
  bool device = false;
  std::vector<std::unique_ptr<rdma::Registration>>
      by_rail;                            // null: that rail cannot reach this device memory
  std::vector<std::string> why_not;       // of each rail, empty where it can
  std::vector<rdma::Distance> distances;  // of the rails to it
  std::vector<uint32_t> slowness;         // that they count with
};

// State of one transport: shared with its links, which may outlive it.
struct RdmaShared {
  RdmaConfig config;
  std::shared_ptr<rdma::Fabric> fabric;
  std::unique_ptr<RdmaStaging> staging;  // before the rails: registered in their domains
  std::vector<std::unique_ptr<RdmaRail>> rails;
  uint32_t max_message_bytes =
      0;  // that every rail takes: a piece may have to change over. 0: no limit known
  uint32_t max_gather = rdma::kMaxGather;  // ranges that every rail takes in one request
  size_t turn = 0;                         // the rail that comes first among equals
  std::vector<uint32_t> staging_slowness;  // of the rails, for staging memory
  std::mutex mutex;
  std::map<RegionHandle, std::shared_ptr<const RdmaRegion>> regions;
  RegionHandle next_region = 1;
  std::vector<uint32_t> near_regions;  // by rail: regions of device memory that it is among the nearest to

  // A connection is to have a queue pair there; at most as many as it may have.
  std::vector<bool> near_rails();
  std::shared_ptr<const RdmaRegion> region(RegionHandle handle);
};

const Capabilities& rdma_capabilities();

class RdmaLink final : public Link {
 public:
  // `session` may be owned elsewhere (owned = null) and must outlive the link then.
  RdmaLink(std::shared_ptr<RdmaShared> shared, Session* session, std::unique_ptr<Session> owned = nullptr);
  ~RdmaLink() override;

  // Makes (again) the queue pairs; what ENDPOINT carries, and what came back.
  Result<std::vector<wire::RdmaAddress>> prepare();
  Status connect(std::span<const wire::RdmaAddress> answers);

  size_t submit(std::span<const Transfer> transfers) override;
  size_t poll(std::span<Completion> completions, Deadline deadline) override;
  Status cancel(TransferId id) override;
  void close() override;
  bool healthy() const override;
  // Nothing is under way, and more rails are up than it uses of those that it may.
  bool wants_rails() const;
  Session* session() override { return session_; }
  uint64_t bytes_moved() const override { return bytes_moved_; }
  int wait_for(std::vector<int>& fds) override;
  // Verifies every invariant of its queues; false and a reason when one is broken. For tests, between two
  // calls.
  bool check(std::string* why) const;

 private:
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  static constexpr size_t kDepth = 128;  // slices on one rail at a time

  struct End {
    RdmaRail* rail = nullptr;
    size_t number = 0;  // of the rail in the transport
    std::unique_ptr<rdma::Endpoint> endpoint;
    std::vector<rdma::Post> outbox;  // for the device's next doorbell; empty outside of post_some()
    uint64_t outbox_bytes = 0;
    std::chrono::steady_clock::time_point stopped_at;
    bool connected = false;
    bool dead = false;
    bool usable() const { return connected && !dead && endpoint && !endpoint->failed() && rail->rail->up(); }
    size_t room() const { return endpoint->room() - std::min(endpoint->room(), outbox.size()); }
  };
  struct Pending {
    Transfer transfer;
    uint64_t serial = 0;
    uint64_t length = 0;
    uint64_t cut = 0;  // bytes before this one are in pieces
    uint32_t piece_bytes = 0;
    size_t local_slice = 0;  // where the next piece begins in the caller's slices
    size_t local_offset = 0;
    uint64_t moved = 0;
    // Where the slices are registered, and of each slice which one that is (nothing: all lie in the first).
    // None: the bytes go through staging.
    std::vector<std::shared_ptr<const RdmaRegion>> regions;
    std::vector<uint32_t> region_of;
    std::vector<std::pair<uint64_t, uint32_t>> crcs;  // per piece: length, CRC
    uint32_t open = 0;                                // pieces cut and not done
    bool counted = true;                              // the CRC of its bytes is computed
    Code code = Code::kOk;
    bool over() const { return open == 0 && (code != Code::kOk || cut == length); }
    bool in_place() const { return !regions.empty(); }
    const RdmaRegion& region(size_t slice) const {
      return *regions[region_of.empty() ? 0 : region_of[slice]];
    }
  };
  struct Piece {
    uint64_t serial = 0;  // of the transfer; 0 = free
    uint64_t offset = 0;  // inside the transfer
    uint32_t length = 0;
    uint32_t index = 0;      // among the pieces of the transfer
    size_t local_slice = 0;  // where it begins in the caller's slices
    size_t local_offset = 0;
    uint32_t slot = kNoSlot;
    bool direct = false;  // in the caller's registered memory (maybe a GPU's), without a slot
    size_t end = 0;       // the end it was posted on
    bool flying = false;
    bool landed = false;
    bool unchecked = false;  // in unchecked_
  };

  Pending* find(uint64_t serial);
  bool pump(Deadline deadline);
  bool post_some();
  bool fill_ends();
  bool post_again();
  void post(uint32_t number, size_t end);
  void ring(size_t end);
  bool reaches(size_t number, const Pending& pending) const;
  size_t pick_end(const Pending& pending, size_t slice, uint32_t length) const;
  bool cut_slice(Pending& pending, Piece& piece);
  uint64_t gathered(const Pending& pending, uint64_t most) const;
  template <typename Use>
  static void each_range(const Pending& pending, const Piece& piece, const Use& use);
  static void skip(Pending& pending, uint64_t bytes);
  uint32_t checksum(const Pending& pending, const Piece& piece);
  bool reap();
  void landed(uint32_t number, rdma::WorkOutcome outcome);
  void finish(uint32_t number);
  bool check_one();
  void give_back(uint32_t number);
  bool any_usable() const;
  void drop_end(End& end, std::chrono::steady_clock::time_point patience);
  void adopt_regions(Pending& pending);
  uint32_t piece_bytes(const Pending& pending) const;
  bool retire_ends();
  void end_all(Code code);
  bool peer_lost() const;
  bool may_repair() const;
  void repair(Deadline deadline);
  size_t take_done(std::span<Completion> completions);
  void back_off(Deadline deadline);

  const std::shared_ptr<RdmaShared> shared_;
  Session* session_;
  std::unique_ptr<Session> owned_;
  std::vector<End> ends_;
  std::deque<Pending> queue_;
  std::deque<Completion> done_;  // cancelled ones
  std::vector<Piece> pieces_;
  std::vector<uint32_t> free_;      // positions in pieces_
  std::deque<uint32_t> again_;      // pieces that came back from a failed rail
  std::deque<uint32_t> unchecked_;  // reads that landed, writes in place: their CRC is to be computed
  uint64_t next_serial_ = 1;
  uint64_t bytes_moved_ = 0;
  uint32_t repairs_ = 0;
  std::chrono::steady_clock::time_point repair_at_;
  bool closed_ = false;
  bool starved_ = false;  // no staging slot was free
};

// ENDPOINT as a program; afterwards the link can be used, or status() tells why not.
class EndpointProgram final : public Program {
 public:
  explicit EndpointProgram(RdmaLink& link) : link_(link) {}
  bool next(Request& request) override;
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  const Status& status() const { return status_; }

 private:
  RdmaLink& link_;
  bool sent_ = false;
  bool answered_ = false;
  Status status_{Code::kTransportUnavailable, "RDMA unavailable, because the node did not answer yet"};
};

class RdmaTransport final : public Transport {
 public:
  // Never fails: availability() says what is the matter.
  explicit RdmaTransport(const RdmaConfig& config, uint64_t staging_bytes = 32 << 20);

  const Capabilities& capabilities() const override { return rdma_capabilities(); }
  Status availability() const override { return availability_; }
  Result<RegionHandle> register_region(const Region& region) override;
  Status unregister_region(RegionHandle handle) override;
  Result<std::unique_ptr<Link>> connect(const PeerDescription& peer, Deadline deadline) override;

  // How the rails reach a region: "fake0:1 by dma-buf; fake1:1 not at all, because …". Empty: no such region.
  std::string describe(RegionHandle handle) const;

  // A link over a session that another object owns; prepare() and connect() are still to come.
  Result<std::unique_ptr<RdmaLink>> make_link(Session& session);
  const std::shared_ptr<RdmaShared>& shared() const { return shared_; }

 private:
  Status open(const RdmaConfig& config, uint64_t staging_bytes);
  Status attach(const Region& region, RdmaRegion& made);
  void measure(const Region& region, RdmaRegion& made) const;
  void count_near(const RdmaRegion& region, bool more);
  std::shared_ptr<RdmaShared> shared_;
  Status availability_;
};

std::unique_ptr<Transport> make_rdma_transport();

}  // namespace mooncache
