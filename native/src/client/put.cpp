// put: every copy of every block gets a node by placement; all nodes are written in parallel. A copy that its
// node refuses (full, draining, gone) moves to the next node in the block's order, within the retry budget.
#include <algorithm>
#include <map>
#include <numeric>

#include "client/impl.h"

namespace mooncache {

namespace {

bool stored(Code code) {
  return code == Code::kOk || code == Code::kAlreadyExists;
}

// Another node may take what this one refused.
bool worth_another_node(Code code) {
  return code == Code::kNoSpace || code == Code::kBackPressure || code == Code::kDraining ||
         code == Code::kLimitExceeded || (is_unreachable(code) && code != Code::kDeadlineExceeded);
}

class PutCall {
 public:
  PutCall(Client::Impl& impl, PutBatch& batch, uint32_t replicas, const CallOptions& options,
          std::span<PutOutcome> outcomes)
      : impl_(impl),
        batch_(batch),
        replicas_(replicas),
        options_(options),
        outcomes_(outcomes),
        map_(impl.map()),
        items_(batch.blocks.size()) {
    for (size_t i = 0; batch_.device != nullptr && i < items_.size(); ++i) {
      if (batch_.device->takes(i)) continue;
      items_[i].given_up = true;
      items_[i].last = Code::kTransportUnavailable;
    }
  }

  void run() {
    for (size_t round = 0; round < kMaxRounds; ++round) {
      if (round > 0 && options_.deadline.expired()) break;
      if (!assign(round)) break;
      send();
      const uint64_t failures = sort_out();
      if (failures == 0) break;
      if (!retries_.take(failures)) break;
    }
    for (uint32_t i = 0; i < items_.size(); ++i) report(i);
  }

 private:
  static constexpr size_t kMaxRounds = 4;
  struct Item {
    std::vector<uint32_t> used;     // positions tried
    uint32_t copies = 0;            // copies that exist
    uint32_t created = 0;           // of these, made by this call
    std::vector<uint32_t> holders;  // positions that have a copy
    Code last = Code::kNoNodes;     // the latest refusal
    uint32_t last_position = kNoNode;
    bool given_up = false;
  };
  struct Group {
    Work work;
    std::vector<Code> codes;
  };

  // Nodes for the copies still missing; false when there is nothing to send.
  bool assign(size_t round) {
    groups_.clear();
    usable_.assign(map_->nodes.size(), 0);
    for (uint32_t i = 0; i < items_.size(); ++i) {
      Item& item = items_[i];
      if (item.given_up || item.copies >= replicas_) continue;
      uint32_t missing = replicas_ - item.copies;
      if (options_.node) {
        const uint32_t position = map_->position(*options_.node);
        if (position == kNoNode)
          item.last = Code::kUnknownNode;
        else if (item.used.empty())
          take(i, position);
        continue;
      }
      if (options_.prefer_node && take_preferred(i, *options_.prefer_node) && --missing == 0) continue;
      const size_t wanted = round == 0 ? replicas_ : map_->nodes.size();
      missing -=
          take_from(i, place(batch_.blocks[i].key, map_->infos, impl_.config.host_id, wanted), missing);
      if (missing > 0 && round == 0 && map_->nodes.size() > replicas_) {
        take_from(i, place(batch_.blocks[i].key, map_->infos, impl_.config.host_id, map_->nodes.size()),
                  missing);
      }
    }
    return !groups_.empty();
  }

  bool take_preferred(uint32_t i, uint32_t index) {
    const uint32_t position = map_->position(index);
    if (position == kNoNode || !takes_new_blocks(map_->infos[position])) return false;
    const auto& used = items_[i].used;
    return std::find(used.begin(), used.end(), position) == used.end() && take(i, position);
  }

  uint32_t take_from(uint32_t i, const std::vector<uint32_t>& places, uint32_t missing) {
    uint32_t taken = 0;
    for (const uint32_t position : places) {
      if (taken == missing) break;
      const auto& used = items_[i].used;
      if (std::find(used.begin(), used.end(), position) != used.end()) continue;
      taken += take(i, position) ? 1 : 0;
    }
    return taken;
  }

  bool take(uint32_t i, uint32_t position) {
    Item& item = items_[i];
    item.used.push_back(position);
    if (usable_[position] == 0) usable_[position] = impl_.may_use(*map_, position) ? 1 : 2;
    if (usable_[position] == 2) {
      const Code why = map_->nodes[position]->last_failure().code;
      item.last = why == Code::kUnauthenticated || why == Code::kVersionSkew ? why : Code::kNodeUnavailable;
      item.last_position = position;
      return false;
    }
    groups_[position].work.items.push_back(i);
    return true;
  }

  void send() {
    std::vector<LaneTask> tasks;
    uint64_t bytes = 0;
    for (auto& [position, group] : groups_) {
      group.codes.assign(items_.size(), Code::kInternal);
      uint64_t group_bytes = 0;
      for (const uint32_t i : group.work.items) group_bytes += batch_.sizes[i];
      bytes += group_bytes;
      Node& node = *map_->nodes[position];
      LaneTask task;
      task.node = map_->nodes[position];
      task.use = group_bytes > kSmallCallBytes ? LaneUse::kBulk : LaneUse::kSmall;
      task.has_alternative = !options_.node && map_->nodes.size() > 1;
      task.may_hold_ms = batch_.wait_ms();  // a full node may hold a put back
      const bool one_sided = group_bytes >= impl_.config.shm_min_bytes && !no_one_sided_;
      const bool rdma = !no_one_sided_ && worth_rdma(impl_.config, group_bytes, group.work.items.size());
      task.make_program = [this, &node, &group = group, one_sided, rdma](Session& session) {
        if (batch_.device != nullptr && !(rdma && impl_.rdma_for_device(*batch_.device, node, session))) {
          refuse_rest(group.work, group.codes);
          return make_refusal();
        }
        if ((one_sided && session.route() == Route::kUnix && node.one_sided_writes()) ||
            (rdma && node.rdma_for(session, steady_ms()))) {
          return make_one_sided_put(batch_, group.work, group.codes, node, session);
        }
        return make_fused_put(batch_, group.work, group.codes);
      };
      tasks.push_back(std::move(task));
    }
    impl_.run(tasks, options_, bytes <= impl_.config.frame_bytes);
    size_t t = 0;
    for (auto& [position, group] : groups_) {
      for (size_t k = group.work.answered; k < group.work.items.size(); ++k) {
        group.codes[group.work.items[k]] = tasks[t].status.code;
      }
      ++t;
    }
  }

  // Books the round's answers; returns how many nodes left copies for another one.
  uint64_t sort_out() {
    uint64_t failures = 0;
    for (auto& [position, group] : groups_) {
      bool failed = false;
      for (const uint32_t i : group.work.items) {
        Item& item = items_[i];
        const Code code = group.codes[i];
        if (stored(code)) {
          ++item.copies;
          item.created += code == Code::kOk ? 1 : 0;
          item.holders.push_back(position);
          continue;
        }
        item.last = code;
        item.last_position = position;
        if (code == Code::kTransportUnavailable && batch_.device != nullptr) {
          item.given_up = true;  // only who called can bring it where another way can take it
        } else if (code == Code::kTransportUnavailable) {  // no shared memory after all: same node, other way
          no_one_sided_ = true;
          std::erase(item.used, position);
          failed = true;
        } else if (!options_.node && worth_another_node(code)) {
          failed = true;
        } else {
          item.given_up = true;
        }
      }
      failures += failed ? 1 : 0;  // a batch sent once more is one retry
    }
    return failures;
  }

  void report(uint32_t i) {
    const Item& item = items_[i];
    PutOutcome& outcome = outcomes_[i];
    outcome.copies = item.copies;
    outcome.created = item.created > 0;
    const uint32_t wanted = options_.node ? 1 : replicas_;
    // Device memory that cannot be sent as it lies comes again another way, for all of its copies.
    const bool comes_again = batch_.device != nullptr && item.last == Code::kTransportUnavailable;
    uint32_t first = kNoNode;  // in the block's own order of nodes
    Nearest nearest;
    for (const uint32_t holder : item.used) {
      if (std::find(item.holders.begin(), item.holders.end(), holder) == item.holders.end()) continue;
      if (first == kNoNode) first = holder;
      nearest.offer(holder, false, ranks_);
    }
    const uint32_t position = first != kNoNode ? first : item.last_position;
    outcome.node_index = position == kNoNode ? kNoNode : map_->infos[position].index;
    if (item.copies >= wanted)
      outcome.code = item.created > 0 ? Code::kOk : Code::kAlreadyExists;
    else
      outcome.code = item.copies > 0 && !comes_again ? Code::kFewerReplicas : item.last;
    impl_.learn(*map_, batch_.blocks[i].key, nearest, false);
    if (batch_.device != nullptr) {
      if (outcome.code == Code::kTransportUnavailable) return;  // it comes again, and counts then
      impl_.counters.add(Counter::kPutItems);
    }
    if (outcome.code == Code::kOk || outcome.code == Code::kFewerReplicas)
      impl_.counters.add(Counter::kPutBytes, batch_.sizes[i] * item.created);
    else
      impl_.counters.add(outcome.code == Code::kAlreadyExists ? Counter::kPutExisting : Counter::kPutFailed);
  }

  Client::Impl& impl_;
  PutBatch& batch_;
  uint32_t replicas_;
  const CallOptions& options_;
  std::span<PutOutcome> outcomes_;
  std::shared_ptr<const NodeMap> map_;
  std::vector<Item> items_;
  std::map<uint32_t, Group> groups_;
  std::vector<uint8_t> usable_;
  ReadRanks ranks_{impl_, *map_};
  CallRetries retries_{impl_};
  bool no_one_sided_ = false;
};

}  // namespace

Status Client::put(std::span<const PutBlock> blocks, uint32_t replicas, const CallOptions& options,
                   std::span<PutOutcome> outcomes) {
  const CallTimer timer(impl_->counters, Timed::kPut);
  return impl_->put(blocks, replicas, options, outcomes);
}

Status Client::Impl::put(std::span<const PutBlock> blocks, uint32_t replicas, const CallOptions& options,
                         std::span<PutOutcome> outcomes) {
  if (Status status = check_call(blocks.size(), options); !status) return status;
  if (outcomes.size() != blocks.size()) return {Code::kInvalidArgument, "one outcome per block is needed"};
  if (replicas < 1 || replicas > 16) return {Code::kInvalidArgument, "replicas must be 1 to 16"};
  PutBatch batch;
  batch.blocks = blocks;
  batch.sizes.assign(blocks.size(), 0);
  batch.crcs.assign(blocks.size(), 0);
  batch.crc_known.assign(blocks.size(), 0);
  batch.deadline = options.deadline;
  batch.counters = &counters;
  batch.config = &config;
  batch.buffers = buffers.get();
  batch.staged_bytes = options.staged_bytes;
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (const ConstSlice& slice : blocks[i].slices) {
      if (slice.size > wire::kMaxPayloadBytes - batch.sizes[i]) {
        return {Code::kTooLarge, "block " + std::to_string(i) + " has more than 1 GiB"};
      }
      batch.sizes[i] += slice.size;
    }
  }
  if (blocks.empty()) return Status::ok();
  if (map()->nodes.empty()) return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  DeviceCall device;
  if (options.device_memory) {
    device = find_device(blocks);
    const uint64_t bytes = std::accumulate(batch.sizes.begin(), batch.sizes.end(), uint64_t{0});
    if (Status status = begin_device_call(device, bytes, options); !status) return status;
    batch.device = &device;
  } else {
    counters.add(Counter::kPutItems, blocks.size());
  }
  ran_operations(blocks.size());
  for (PutOutcome& outcome : outcomes) outcome = {};
  PutCall(*this, batch, options.node ? 1 : replicas, options, outcomes).run();
  return Status::ok();
}

}  // namespace mooncache
