// What the parts of Client share: the map, the caches, the helpers that run tasks.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "client/batch.h"
#include "client/lane_keeper.h"
#include "client/lane_loop.h"
#include "client/location_cache.h"
#include "client/nearness.h"
#include "client/receive_pool.h"

namespace mooncache {

class ReservationLane;
class Reservations;

// A cluster map with the nodes behind it; immutable, replaced as a whole.
struct NodeMap {
  uint64_t epoch = 0;
  std::vector<NodeInfo> infos;
  std::vector<std::shared_ptr<Node>> nodes;  // same positions
  std::unordered_map<uint32_t, uint32_t> by_index;
  std::vector<uint32_t> local;  // positions on this host that new blocks of this host go to

  uint32_t position(uint32_t index) const {
    const auto found = by_index.find(index);
    return found == by_index.end() ? kNoNode : found->second;
  }
};

// Requests of fixed bytes, each answered by one handler call.
class CallProgram final : public Program {
 public:
  using Handler = std::function<Status(size_t call, const Status& status, Reader& in)>;
  struct Call {
    wire::Opcode opcode = wire::Opcode::kPing;
    uint16_t flags = 0;
    std::vector<std::byte> meta;
    std::vector<ConstSlice> payload;
    uint32_t needs = 0;  // capabilities of the node (AuthResponse), without which it is not asked
  };
  CallProgram(const std::vector<Call>& calls, Handler handler, size_t answered = 0)
      : calls_(calls), handler_(std::move(handler)), sent_(answered), answered_(answered) {}
  bool next(Request& request) override {
    if (sent_ == calls_.size()) return false;
    const Call& call = calls_[sent_++];
    request.opcode = call.opcode;
    request.flags = call.flags;
    request.meta.raw(call.meta);
    request.payload = call.payload;
    return true;
  }
  bool finished() const override { return answered_ == calls_.size(); }
  Status on_response(const wire::FrameHeader&, const Status& status, Reader& in, PayloadSink&) override {
    return handler_(answered_++, status, in);
  }

 private:
  const std::vector<Call>& calls_;
  Handler handler_;
  size_t sent_;
  size_t answered_;
};

// Which keys to ask which node.
struct Question {
  uint32_t position = 0;
  std::vector<uint32_t> items;
};

struct Client::Impl : std::enable_shared_from_this<Client::Impl> {
  explicit Impl(ClientConfig config_in);

  ClientConfig config;
  LoopLimits limits;
  std::shared_ptr<net::TlsContext> tls;
  Counters counters;
  LocationCache locations;
  std::atomic<bool> closed{false};
  std::shared_ptr<RdmaAccess> rdma;
  std::shared_ptr<BufferBook> buffers;
  std::shared_ptr<ReceivePool> receive_pool;
  std::unique_ptr<LaneKeeper> keeper;
  // What blocks that were got without a known size measured lately, in bytes; 0 = not known yet.
  std::atomic<uint64_t> usual_bytes{0};
  std::atomic<uint64_t> next_look_ms{0};  // at connections that are not in use
  uint64_t fork_generation = 0;
  const uint64_t spread_seed;  // of this client; see nearness.h
  std::atomic<uint64_t> rolls{0};
  HedgeTimes hedge_times;

  std::mutex mutex;  // map, retries, reservation lanes
  std::shared_ptr<const NodeMap> current;
  RetryBudget retries;
  RetryBudget hedge_budget;
  // by identity: a weak pointer keeps its control block, so no later node compares equal to a dead one
  std::map<std::weak_ptr<Node>, std::vector<std::shared_ptr<ReservationLane>>, std::owner_less<>>
      reservation_lanes;

  // This process is a fork of the one that made the client. Locks may be held forever by threads that are
  // not here, and everything behind them is the parent's: nothing of it may be touched.
  bool in_child() const;
  // OK, or CLOSED with the reason (closed, or in a child).
  Status usable() const;
  Status check_call(size_t items, const CallOptions& options) const;
  // Empty in a child.
  std::shared_ptr<const NodeMap> map();
  bool may_use(const NodeMap& map, uint32_t position);
  uint64_t take_retries(uint64_t wanted);
  void ran_operations(uint64_t count);
  // Whether the reads so far pay for so many hedges.
  bool take_hedges(uint64_t wanted);
  void ran_reads(uint64_t count);
  // A read of that class is late after so long.
  uint32_t hedge_after_us(const NodeMap& map, size_t size_class);
  uint64_t roll() { return spread_bits(spread_seed + rolls.fetch_add(1, std::memory_order_relaxed)); }
  void run(std::span<LaneTask> tasks, const CallOptions& options, bool small, Hedges* hedges = nullptr);
  void close_unused();

  // See nearness.h: smaller is read sooner.
  uint32_t rank(const NodeMap& map, uint32_t position);
  uint64_t seed_for(const Key& key) const { return spread_seed ^ key.word(0); }
  // `asked_all`: every node was asked, so there are no other copies.
  void learn(const NodeMap& map, const Key& key, const Nearest& nearest, bool asked_all);

  // Where a block may be, best guess first, without what was tried already; kNoNode when there is no guess
  // left. The second one is for a block that was not seen anywhere.
  uint32_t guess(const NodeMap& map, const Key& key, std::span<const uint32_t> tried);
  uint32_t guess_unknown(const NodeMap& map, const Key& key, std::span<const uint32_t> tried);

  // Which blocks of a call on device memory lie in registered buffers of the first such block's device.
  template <typename Blocks>
  DeviceCall find_device(const Blocks& blocks) {
    DeviceCall call;
    call.listed.assign(blocks.size(), 0);
    std::vector<Slice> slices;
    for (size_t i = 0; i < blocks.size(); ++i) {
      slices.clear();
      for (const auto& slice : blocks[i].slices)
        slices.push_back({const_cast<std::byte*>(slice.data), slice.size});
      auto device = buffers->device_of(slices);
      if (!call.sums) call.sums = device;
      call.listed[i] = device && device == call.sums ? 1 : 0;
    }
    return call;
  }
  // Waits until the device is through with what was enqueued on it before; without `sums` afterwards nothing
  // can go in place.
  Status begin_device_call(DeviceCall& call, uint64_t bytes, const CallOptions& options) const;
  bool worth_device_call(DeviceCall& call, uint64_t bytes) const;
  // Whether this session has RDMA; if not, the device records why.
  bool rdma_for_device(const DeviceCall& call, Node& node, const Session& session) const;
  Status put(std::span<const PutBlock> blocks, uint32_t replicas, const CallOptions& options,
             std::span<PutOutcome> outcomes);
  Status get(std::span<const GetBlock> blocks, const GetOptions& how, const CallOptions& options,
             std::span<GetOutcome> outcomes);
  Result<std::unique_ptr<Reservations>> reserve(std::span<const Key> keys, uint64_t size_bytes,
                                                const CallOptions& options);
  std::vector<Question> questions(const NodeMap& map, std::span<const Key> keys, const CallOptions& options,
                                  uint32_t& unreachable);
  // Sends `opcode` with keys to all nodes in question, in parallel. `handle(question, items of the call,
  // in)`.
  using KeysHandler =
      std::function<Status(const Question&, std::span<const uint32_t>, const Status&, Reader&)>;
  // The node that a block would be read from, if it lies on a disk there; else kNoNode.
  uint32_t cold_place(const NodeMap& map, const Key& key);
  void request_keys(const NodeMap& map, std::span<const Question> asked, std::span<const Key> keys,
                    wire::Opcode opcode, uint16_t flags, std::span<const std::byte> head,
                    const CallOptions& options, const KeysHandler& handle, std::vector<Status>& ends);
  // Asks nodes by MATCH, all at once, which keys they hold: for each key the holders to be read first.
  std::vector<Nearest> ask_holders(const NodeMap& map, std::span<const Question> asked,
                                   std::span<const Key> keys, const CallOptions& options,
                                   std::vector<Status>& ends, uint16_t flags = 0);
  Status one_call(uint32_t node, const CallProgram::Call& call, const CallOptions& options,
                  const CallProgram::Handler& handler);
  Result<MatchReport> match(std::span<const Key> keys, bool touch, const CallOptions& options);
};

// What one call may go on with after failures: a bounded number, of the client's budget.
class CallRetries {
 public:
  explicit CallRetries(Client::Impl& impl) : impl_(impl), left_(impl.config.retries_per_call) {}
  // `wanted` batches for other nodes: all of them, or none.
  bool take(uint64_t wanted) {
    if (wanted > left_) {
      impl_.counters.add(Counter::kRetriesRefused, wanted);
      return false;
    }
    left_ -= wanted;
    return impl_.take_retries(wanted) == wanted;
  }

 private:
  Client::Impl& impl_;
  uint64_t left_;
};

// The ranks of one call's nodes, each found out once.
class ReadRanks {
 public:
  ReadRanks(Client::Impl& impl, const NodeMap& map)
      : impl_(impl), map_(map), known_(map.nodes.size(), kNoNode) {}
  uint32_t operator()(uint32_t position, bool on_disk = false) {
    uint32_t& rank = known_[position];
    if (rank == kNoNode) rank = impl_.rank(map_, position);
    return on_disk ? rank | kDiskRank : rank;
  }
  // Equal ranks in the order in which this client would read the key.
  auto order_for(const Key& key) {
    return [this, seed = impl_.seed_for(key)](uint32_t position, bool on_disk) {
      return uint64_t{(*this)(position, on_disk)} << 32 | (~turn_of(seed, map_.infos[position].index) >> 32);
    };
  }

 private:
  Client::Impl& impl_;
  const NodeMap& map_;
  std::vector<uint32_t> known_;
};

inline uint32_t steady_seconds() {
  return static_cast<uint32_t>(steady_ms() / 1000) + 1;
}

// True for codes that say "this node could not be asked", not "the block is not there".
inline bool is_unreachable(Code code) {
  const auto number = static_cast<uint16_t>(code);
  return (number >= 400 && number < 600 && code != Code::kCancelled && code != Code::kNoNodes) ||
         code == Code::kClosed;
}
// Grows in the child after each fork.
uint64_t fork_generation_now();
// What lies behind is the parent's: no destructor may run in a child.
template <typename T>
void leak_in_child(std::shared_ptr<T> owner) {
  (void)new std::shared_ptr<T>(std::move(owner));
}

}  // namespace mooncache
