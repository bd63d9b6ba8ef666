// The cluster client: put and get blocks by key on the nodes of a pool.
//
// The ideas: (1) the caller's thread moves all bytes, so nothing moves after a call returned; (2) the
// location of a block is guessed without asking any service (cache, same host, placement) and corrected on
// a miss; (3) bytes count as read only after their CRC-32C was compared in the process that reads; (4)
// a sick node costs its own blocks a bounded delay and the others nothing.
//
// All calls are thread-safe. Batches report one code per item; a Status only when the call as a whole
// made no sense. When an item's code is not OK its destination holds unspecified bytes, none of which
// will change after the call returned.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/cluster_map.h"
#include "mooncache/gpu.h"
#include "mooncache/rdma_config.h"
#include "mooncache/status.h"
#include "mooncache/transport.h"
#include "mooncache/types.h"

namespace mooncache {

inline constexpr uint32_t kNoNode = 0xffffffff;

// What the blocks of a node lie in, the fastest first: memory of a GPU, of the processor, behind CXL or on
// persistent memory, a file on a disk.
enum class Medium : uint8_t { kHbm, kDram, kDax, kFile };

// Of the kind that a node tells of its arena ("memory", "gpu", "dax", ...); what is not known counts as
// kDram.
Medium medium_of(std::string_view arena);
// Whether processes on the node's host may map such an arena.
bool mappable_arena(std::string_view arena);

// One line of the cluster map.
struct NodeInfo {
  uint32_t index = 0;
  std::string node_id;
  std::string host_id;
  uint64_t incarnation = 0;
  std::string tcp_host;
  uint16_t tcp_port = 0;
  std::string unix_path;
  uint64_t free_bytes = 0;
  double weight = 1.0;  // share of new blocks: free bytes times slow start; 0 = no new blocks
  NodeHealth state = NodeHealth::kActive;
  Medium medium = Medium::kDram;
  bool mappable = true;  // by processes on its host
  bool rdma = false;     // it answers on an RDMA port
};

// ---- placement: a pure function, the same in the master (tests compare both with golden vectors)

// -weight / ln(u), where u in (0, 1) comes from a hash of key and node. The highest score wins, and a
// change of one node's weight moves only that node's blocks.
double placement_score(const Key& key, std::string_view node_id, double weight);

bool takes_new_blocks(const NodeInfo& node);

// Whether new blocks of clients on `host_id` go to the node first because it is on their host. GPU memory is
// scarce, and processes on its host cannot map it, so such a node is chosen by weight alone.
bool takes_from_its_host(const NodeInfo& node, std::string_view host_id);

// Positions in `nodes` that should hold the key, best first: a node on `host_id` (takes_from_its_host,
// active, weight > 0) before all others, then by score; with several copies, hosts not used yet come first.
// At most `count` positions; nodes that take no new blocks are left out.
std::vector<uint32_t> place(const Key& key, std::span<const NodeInfo> nodes, std::string_view host_id,
                            size_t count);

// ---- configuration

struct ClientConfig {
  Credentials credentials;
  PeerTls tls;
  std::string host_id;          // of this process; equal ids mean shared memory may work
  uint32_t lanes_per_node = 4;  // connections per node for bulk of several threads; small calls have one more
  uint32_t connect_timeout_ms = 2000;
  uint32_t ping_interval_ms = 5'000;   // between signs of life on connections that hold reservations
  uint32_t idle_timeout_ms = 600'000;  // a connection that no call used for so long is closed; 0 = never
  uint32_t stall_timeout_ms =
      1000;                     // a lane without a byte for so long is given up when there is an alternative
  uint32_t put_wait_ms = 1000;  // how long a full node may hold a put back before it answers NO_SPACE
  bool shm_enabled = true;
  uint64_t shm_min_bytes = 128 << 10;  // batches below go fused over the unix socket
  RdmaConfig rdma;
  uint64_t rdma_min_bytes = 256 << 10;          // batches below go fused over TCP
  uint64_t rdma_min_block_bytes = 64 << 10;     // so do batches whose blocks are smaller on average
  uint64_t rdma_staging_bytes = 32 << 20;       // registered memory of the client, once it uses RDMA
  uint64_t rdma_direct_slice_bytes = 16 << 10;  // slices smaller than this on average are copied to staging
  // Registrations of buffers of the caller (register_buffer) and of the receive pool that are kept at a time.
  uint64_t registered_bytes_max = 16ull << 30;
  uint32_t registered_buffers_max = 256;
  uint64_t receive_pool_bytes = 256 << 20;  // memory that receive_buffer() lends; 0 = none
  uint64_t frame_bytes = 1 << 20;           // payload per PUT/GET frame
  uint32_t frame_items = 256;
  uint32_t window_frames = 6;     // frames in flight per lane
  uint32_t spin_us = 20;          // busy wait for a small answer before sleeping; 0 on one core
  uint32_t breaker_failures = 3;  // consecutive failures that open a node's breaker
  uint32_t breaker_min_ms = 200;  // first pause; doubles up to the maximum
  uint32_t breaker_max_ms = 10'000;
  uint32_t retry_percent = 20;  // retries allowed per 100 operations, beside a burst
  uint32_t retry_burst = 64;
  uint32_t retries_per_call = 16;  // batches of a call that go on to another node after failures
  uint32_t slow_start_ms = 2000;   // until a node that was left alone has its share of the reads again
  // Reads that take longer than nearly all do are asked of another holder as well: so many of 100, beside a
  // burst; 0 = none. The time is learned, within these limits.
  uint32_t hedge_percent = 5;
  uint32_t hedge_burst = 16;
  uint32_t hedge_min_ms = 2;
  uint32_t hedge_max_ms = 250;
  uint32_t fanout_nodes_max = 8;  // up to so many nodes, a get asks all before it gives up
  uint32_t survey_ms = 50;  // how long a large get there asks all nodes for copies first; 0 = it does not
  uint64_t location_cache_keys = 1 << 18;
  uint32_t reservation_lanes_max = 16;  // per node
  uint32_t reservations_per_lane = 64;
  uint32_t max_batch_items = 1 << 20;
};

// Stops calls from another thread. One token may serve many calls; it stays cancelled.
class CancelToken {
 public:
  CancelToken();
  ~CancelToken();
  CancelToken(const CancelToken&) = delete;
  CancelToken& operator=(const CancelToken&) = delete;
  void cancel();
  bool cancelled() const;
  int fd() const { return fd_; }  // readable once cancelled

 private:
  int fd_ = -1;
  struct Flag;
  std::unique_ptr<Flag> flag_;
};

struct CallOptions {
  Deadline deadline = Deadline::after_ms(30'000);
  const CancelToken* cancel = nullptr;
  // Asked by the calling thread every 50 ms or so while it waits, no lock held. True ends the call as a
  // cancel token does. For what can be seen only by looking, as Python sees signals.
  bool (*interrupted)() = nullptr;
  std::optional<uint32_t> node;  // only this node (by index)
  // put: the first copy goes there when the node takes new blocks, else where placement says. reserve: so
  // does the block.
  std::optional<uint32_t> prefer_node;
  bool all_nodes = false;  // questions go to every node, however many there are
  // All slices are addresses of one GPU, in buffers that register_device_buffer() knows. Blocks go in place
  // over RDMA; those that cannot have TRANSPORT_UNAVAILABLE (their destination holds unspecified bytes) and
  // may be moved through host memory. No processor touches them. What was enqueued on the device before is
  // waited for.
  bool device_memory = false;
  // put, get and writes into reservations add to it: bytes that passed through staging memory of the client,
  // because a device cannot use the caller's memory as it is. All others went between it and the transport.
  std::atomic<uint64_t>* staged_bytes = nullptr;
};

// ---- items and answers

struct PutBlock {
  Key key;
  std::span<const ConstSlice> slices;  // the block is their concatenation
};
struct GetBlock {
  Key key;
  std::span<const Slice> slices;  // filled from the first on
  uint64_t offset = 0;            // only with GetOptions::whole = false
};
struct GetOptions {
  // The destination must hold the whole block (else BUFFER_TOO_SMALL, size = the block's). Without it a
  // range is read: as many bytes from `offset` on as the destination holds and the block has.
  bool whole = true;
  // When set, slices are ignored and the destination is asked for once the size is known. Called on the
  // calling thread, no lock held; may be called again for an item that is retried, which leaves the earlier
  // memory to the caller. null = LIMIT_EXCEEDED.
  std::function<std::byte*(size_t item, uint64_t size_bytes)> allocate;
};

struct PutOutcome {
  // OK, ALREADY_EXISTS (every copy was there before), FEWER_REPLICAS (it is stored, in fewer copies than
  // asked for), or the failure
  Code code = Code::kNoNodes;
  uint32_t node_index = kNoNode;  // where the first copy is
  uint32_t copies = 0;            // copies that exist now
  bool created = false;           // this call made at least one of them
};
struct GetOutcome {
  Code code = Code::kNotFound;
  uint64_t size = 0;  // bytes in the destination; with BUFFER_TOO_SMALL, the block's size
  uint32_t node_index = kNoNode;
};
struct BlockCopy {
  uint32_t node_index = kNoNode;
  Tier tier = Tier::kDram;
  auto operator<=>(const BlockCopy&) const = default;
};
struct MatchReport {
  uint32_t leading_run = 0;  // keys found before the first one missing
  uint32_t present = 0;
  std::vector<std::byte> bitmap;  // bit i % 8 of byte i / 8: key i is on some node
  uint32_t unreachable_nodes = 0;
  // Where blocks lie: four copies at most, in the order in which they would be read. The first one is empty:
  // nowhere. No two are the same, and many keys share one.
  std::vector<std::vector<BlockCopy>> places;
  std::vector<uint32_t> place_of;  // per key: its number in `places`
};
struct PrefetchLimits {
  uint64_t max_bytes = UINT64_MAX;  // on each node
  uint32_t timeout_ms = 1000;       // what has not begun by then is given up
};
struct PrefetchReport {
  uint64_t blocks = 0;  // on their way up now, which were not before
  uint64_t bytes = 0;
};
struct BlockStat {
  Code code = Code::kNotFound;
  uint32_t node_index = kNoNode;
  Tier tier = Tier::kDram;
  uint32_t crc32c = 0;
  uint64_t size = 0;
  uint32_t pins = 0;
  uint32_t hits = 0;
  uint64_t age_ms = 0;
  std::vector<BlockCopy> copies;  // on the nodes that answered, in the order in which they would be read
};
struct ListedBlock {
  Key key;
  uint64_t size = 0;
  Tier tier = Tier::kDram;
  uint32_t hits = 0;
};
struct ListedPage {
  uint64_t next_cursor = 0;
  std::vector<ListedBlock> blocks;
};
using NamedValues = std::vector<std::pair<std::string, uint64_t>>;

// Microseconds, in powers of two: bucket i counts latencies below 2^i us (the last one: all above).
struct LatencyHistogram {
  static constexpr size_t kBuckets = 28;
  std::string name;
  std::array<uint64_t, kBuckets> counts{};
  uint64_t total_us = 0;
  uint64_t count = 0;
};

// Blocks of one size being written range by range, many in one call; commit makes them visible. Each is bound
// to one connection: when that breaks, or the object is dropped, the node forgets it. What fails for one
// block costs that block only.
//
// Each call answers for every block: OK, or what it was refused for when it was reserved; CONNECTION_LOST or
// CLOSED once it has ended; or what ended it now. DEADLINE_EXCEEDED and CANCELLED leave it open if nothing of
// it was written, because other calls used its connection. The Status is not OK where the call makes no sense
// as a whole.
class ReservationBatch {
 public:
  virtual ~ReservationBatch() = default;
  virtual size_t size() const = 0;
  virtual uint64_t block_bytes() const = 0;
  // OK while the block can be written.
  virtual Code code(size_t block) const = 0;
  // kNoNode: it has none.
  virtual uint32_t node_index(size_t block) const = 0;
  // sources[i] are the bytes of block i from `offset` on; none: nothing is written of it now. Ranges of a
  // block must not overlap. INVALID_ARGUMENT before anything is written.
  virtual Status write(uint64_t offset, std::span<const std::span<const ConstSlice>> sources,
                       const CallOptions& options, std::span<Code> codes) = 0;
  // INCOMPLETE for blocks of which ranges are missing; their reservation is gone then.
  virtual Status commit(const CallOptions& options, std::span<Code> codes) = 0;
  // Gives the space of all that is open back, within the connect timeout at most.
  virtual Status abort(const CallOptions& options) = 0;
};

// The same for one block.
class BlockReservation {
 public:
  virtual ~BlockReservation() = default;
  // Ranges must not overlap. INVALID_ARGUMENT, CONNECTION_LOST, DEADLINE_EXCEEDED, CANCELLED, CLOSED.
  virtual Status write(uint64_t offset, std::span<const ConstSlice> slices, const CallOptions& options) = 0;
  // INCOMPLETE when ranges are missing; the reservation is gone then.
  virtual Status commit(const CallOptions& options) = 0;
  // Gives the space back, within the connect timeout at most. Harmless when the reservation has ended.
  virtual Status abort(const CallOptions& options) = 0;
  virtual uint32_t node_index() const = 0;
  virtual uint64_t size() const = 0;
};

enum class WatchState : uint8_t {
  kMore,     // not the end of the watch
  kAll,      // every key was readable at some moment since its beginning
  kGivenUp,  // the writer of one of the missing keys will not write it
  kTimeout,
  kUnreachable,  // a node that it waited at is gone or refuses it: what is there has to be looked up again
};

struct WatchNews {
  std::string name;
  std::vector<uint32_t> positions;  // of keys that became readable and were in no news of this watch before
  WatchState state = WatchState::kMore;
  Code code = Code::kOk;  // kUnreachable: why
};

// Waits for blocks that others are about to write: the nodes say when they are there. Many waits share one
// connection per node. One thread at a time is in next(); the other calls are for any thread and never wait.
// Nothing is sent and no news is received but in next().
class BlockWatch {
 public:
  virtual ~BlockWatch() = default;
  // `node`: only there (by index). Without it at all nodes of a map of fanout_nodes_max or less, and a key
  // counts wherever it is. `news_ms`: at least so long between two news from one node; 0: only the last one.
  // INVALID_ARGUMENT (no keys, a name that is in use, more than ten minutes), UNKNOWN_NODE, NO_NODES,
  // LIMIT_EXCEEDED (65,536 keys, 4,096 watches; a larger map), CLOSED.
  virtual Status add(std::string name, std::vector<Key> keys, Deadline deadline, std::optional<uint32_t> node,
                     uint32_t news_ms) = 0;
  // No news of it comes from now on. False: there is no such watch, or its end was taken already.
  virtual bool remove(const std::string& name) = 0;
  // Empty: the deadline passed, or wake() was called. CANCELLED, CLOSED; INVALID_ARGUMENT: another thread is
  // in next().
  virtual Result<std::vector<WatchNews>> next(const CallOptions& options) = 0;
  virtual void wake() = 0;
  // Ends a next() under way with CLOSED, and all connections.
  virtual void close() = 0;
};

// A way that blocks may take. `state`: ready, idle (not needed so far), off (the configuration says so) or
// unavailable; `reason` says why it is not ready.
struct ClientTransport {
  std::string name;
  std::string state;
  std::string reason;
};

// Memory that a client lends for received blocks. Goes back when the object does; may outlive the client.
class LentBuffer {
 public:
  virtual ~LentBuffer() = default;
  virtual std::byte* data() const = 0;
  virtual size_t size() const = 0;
};

class Client {
 public:
  // CONFIG_INVALID with a sentence.
  static Result<std::unique_ptr<Client>> create(ClientConfig config);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  struct Impl;  // defined inside the library

  // A newer map replaces the older one; an older epoch is ignored (false).
  bool set_map(uint64_t epoch, std::vector<NodeInfo> nodes);
  uint64_t map_epoch() const;
  // Connections that are made from now on prove this key of the same tenant; those that are open end with
  // what is under way.
  void set_key(const std::array<std::byte, 32>& key);

  // `outcomes` has one element per block.
  Status put(std::span<const PutBlock> blocks, uint32_t replicas, const CallOptions& options,
             std::span<PutOutcome> outcomes);
  Status get(std::span<const GetBlock> blocks, const GetOptions& how, const CallOptions& options,
             std::span<GetOutcome> outcomes);

  Result<MatchReport> match(std::span<const Key> keys, bool touch, const CallOptions& options);
  // On every node that has the key. Best code per key: OK when some node did it.
  Status remove(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes);
  Status pin(std::span<const Key> keys, uint32_t ttl_ms, const CallOptions& options, std::span<Code> codes);
  Status unpin(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes);
  Status stat(std::span<const Key> keys, const CallOptions& options, std::span<BlockStat> stats);
  Result<ListedPage> list(uint32_t node, uint64_t cursor, uint32_t limit, const CallOptions& options);
  Result<NamedValues> node_stat(uint32_t node, const CallOptions& options);
  // The cluster map as that node knows it; none: it is the one of this term and epoch. UNSUPPORTED: the node
  // is of an earlier version. MASTER_UNAVAILABLE: it has heard of no master yet.
  Result<std::optional<ClusterMap>> cluster_map(uint32_t node, uint64_t known_term, uint64_t known_epoch,
                                                const CallOptions& options);
  // Round trip in microseconds.
  Result<uint64_t> ping(uint32_t node, const CallOptions& options);

  Result<std::unique_ptr<BlockReservation>> reserve(const Key& key, uint64_t size_bytes,
                                                    const CallOptions& options);
  // On the nodes that put would choose. What is refused has its code in the batch. Not OK: no node was asked.
  Result<std::unique_ptr<ReservationBatch>> reserve(std::span<const Key> keys, uint64_t size_bytes,
                                                    const CallOptions& options);

  std::unique_ptr<BlockWatch> watch();
  // The caller's side will not write these keys: whoever waits for one of them learns it now, or within the
  // next second. At every node, or at options.node. Returns how many waits ended.
  Result<uint64_t> give_up(std::span<const Key> keys, const CallOptions& options);
  // Prefetches blocks from disks into memory: those that match() reported to be on a disk alone, at the nodes
  // where they would be read. Waits for no block; what was not prefetched is read from the disk later.
  Result<PrefetchReport> prefetch(std::span<const Key> keys, const PrefetchLimits& limits,
                                  const CallOptions& options);

  // From now on, until as many unregister_buffer() with the same range, puts out of this memory and gets into
  // it may be carried out by a device directly, where RDMA is used; the caller leaves it mapped as it is so
  // long. Nothing is registered before it is used. INVALID_ARGUMENT: empty, or overlaps another range.
  Status register_buffer(Slice memory);
  // The same for memory of a GPU, and for calls with CallOptions::device_memory only. It is exported as a
  // dma-buf when a device of RDMA uses it first; a failure is not tried again for 5 s.
  Status register_device_buffer(std::shared_ptr<GpuDevice> gpu, DeviceSlice memory);
  // How calls reach that memory, as far as one has tried: "mlx5_0:1 by dma-buf; mlx5_1:1 not at all, because
  // …", or "staged, because …". Empty: none has.
  std::string gpu_direct(const std::shared_ptr<GpuDevice>& gpu) const;
  // Hands a buffer that is listed to the devices of RDMA now, and keeps it so until unregister_buffer(),
  // beside the limits of ClientConfig: no other buffer takes its place. TRANSPORT_UNAVAILABLE and why: they
  // cannot use it, and its bytes are staged. NOT_FOUND: it is not listed.
  Status attach_buffer(Slice memory);
  // NOT_FOUND when it is not registered. Works on a closed client too.
  Status unregister_buffer(Slice memory);
  // For GetOptions::allocate. Null when the pool has no such room left.
  std::unique_ptr<LentBuffer> receive_buffer(uint64_t size);

  // Positions of keys whose place only the directory can tell (not cached, cluster too big to ask all).
  std::vector<uint32_t> unlocated(std::span<const Key> keys) const;
  // `packed`: for each key u16 count, then count x {u16 node index, u8 tier, u8 0, u64 size}.
  Status learn_locations(std::span<const Key> keys, std::span<const std::byte> packed);

  // How often a node did not answer as it should, since the client was made: its place may be another one
  // now.
  uint64_t node_failures() const;
  // Counters by name (stable names, see docs); latencies in microseconds.
  NamedValues stats() const;
  std::vector<LatencyHistogram> latencies() const;
  // Best first. Opens nothing: RDMA is idle until a node offers it for a transfer that is large enough.
  std::vector<ClientTransport> transports() const;
  // Later calls answer CLOSED; calls in flight end with CANCELLED or CLOSED.
  void close();

 private:
  explicit Client(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace mooncache
