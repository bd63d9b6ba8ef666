// Programs that move blocks. Two families: fused (GET and PUT frames carry the bytes, any connection) and
// one-sided (LOOKUP/RESERVE, then a Link moves the bytes, then RELEASE/COMMIT). They share a Work: the items
// of one node in order, and how many are answered, so that a new connection continues where the old one
// ended.
#pragma once

#include "client/buffer_book.h"
#include "client/node.h"

namespace mooncache {

struct Work {
  std::vector<uint32_t> items;  // positions in the caller's batch
  size_t answered = 0;          // items before this one have their code
};

// A call on device memory (CallOptions::device_memory). Only a link of RDMA may touch its slices.
struct DeviceCall {
  std::shared_ptr<DeviceSums> sums;
  std::vector<uint8_t> listed;  // per block: all of it lies in one registered buffer of that device

  bool takes(size_t block) const { return sums != nullptr && listed[block] != 0; }
};

struct GetBatch {
  std::span<const GetBlock> blocks;
  const GetOptions* how = nullptr;
  std::span<GetOutcome> outcomes;
  Counters* counters = nullptr;
  const ClientConfig* config = nullptr;
  BufferBook* buffers = nullptr;
  DeviceCall* device = nullptr;  // null: host memory
  // With GetOptions::allocate, per block: its size once a node said it, 0 before.
  std::span<uint64_t> known_bytes;
  std::atomic<uint64_t>* staged_bytes = nullptr;  // as in CallOptions

  uint64_t capacity(uint32_t item) const;
  void set_outcome(uint32_t item, Code code, uint64_t size, const Node& node) const;
};

struct PutBatch {
  std::span<const PutBlock> blocks;
  std::vector<uint64_t> sizes;
  std::vector<uint32_t> crcs;  // known once the first copy was sent
  std::vector<uint8_t> crc_known;
  Deadline deadline;
  Counters* counters = nullptr;
  const ClientConfig* config = nullptr;
  BufferBook* buffers = nullptr;
  DeviceCall* device = nullptr;                   // null: host memory
  std::atomic<uint64_t>* staged_bytes = nullptr;  // as in CallOptions

  uint32_t wait_ms() const;
};

// Sizes of the batch's frames: bytes and items, whichever fills first; at least one item. Of blocks whose
// size is not known, those above `unsized_max` are not sent: they have BUFFER_TOO_SMALL, and their size is
// known then (known_bytes).
std::unique_ptr<Program> make_fused_get(const GetBatch& batch, Work& work, const Node& node,
                                        uint64_t unsized_max = UINT64_MAX);
std::unique_ptr<Program> make_fused_put(PutBatch& batch, Work& work, std::span<Code> codes);
// Whether a batch for one node is large enough, in large enough blocks, for two round trips and a
// registration per block to be less than what the node's processor would cost.
inline bool worth_rdma(const ClientConfig& config, uint64_t bytes, size_t items) {
  return config.rdma.enabled && bytes >= config.rdma_min_bytes &&
         bytes / items >= config.rdma_min_block_bytes;
}
// What has no code yet needs another way: TRANSPORT_UNAVAILABLE.
void refuse_rest(const GetBatch& batch, Work& work, const Node& node);
void refuse_rest(Work& work, std::span<Code> codes);
// For work that was refused, as blocks of device memory are whose node cannot be reached by RDMA: no byte
// moves.
std::unique_ptr<Program> make_refusal();
// Over shared memory on a unix socket, else over RDMA. The link is made first where there is none yet
// (ATTACH, ENDPOINT).
std::unique_ptr<Program> make_one_sided_get(const GetBatch& batch, Work& work, Node& node, Session& session);
std::unique_ptr<Program> make_one_sided_put(PutBatch& batch, Work& work, std::span<Code> codes, Node& node,
                                            Session& session);

}  // namespace mooncache
