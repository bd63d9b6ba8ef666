// get: rounds over guessed places. In each round every unresolved block is asked of one node, all nodes in
// parallel; a miss, wrong bytes or a failed node send the block on to its next guess, at last to the node
// that MATCH finds among the nodes not tried yet. Of several known copies the nearest ones share the reading
// (nearness.h). Copies are known only to those who asked, so before much is read in a small cluster, all
// nodes are asked.
#include <algorithm>
#include <optional>
#include <utility>

#include "client/hedged_reads.h"
#include "client/impl.h"
#include "client/read_places.h"

namespace mooncache {

namespace {

// What to tell the caller when several nodes answered: higher wins.
int weight_of(Code code) {
  if (code == Code::kOk) return 5;
  if (code == Code::kBufferTooSmall || code == Code::kInvalidArgument) return 4;
  if (code == Code::kChecksumMismatch) return 3;
  if (is_unreachable(code)) return 2;
  return code == Code::kNotFound ? 0 : 1;
}
bool final_code(Code code) {
  return code == Code::kOk || code == Code::kBufferTooSmall || code == Code::kInvalidArgument ||
         code == Code::kCancelled || code == Code::kDeadlineExceeded || code == Code::kClosed;
}

class GetCall {
 public:
  GetCall(Client::Impl& impl, const GetBatch& batch, const CallOptions& options)
      : impl_(impl),
        batch_(batch),
        options_(options),
        map_(impl.map()),
        tried_(batch.blocks.size()),
        best_(batch.blocks.size()) {}

  void run() {
    std::vector<uint32_t> open;
    for (uint32_t i = 0; i < batch_.blocks.size(); ++i) {
      if (may_begin(i))
        open.push_back(i);
      else
        best_[i].code = Code::kTransportUnavailable;
    }
    for (size_t round = 0; round < kMaxRounds && !open.empty(); ++round) {
      if (round > 0 && options_.deadline.expired()) {
        for (const uint32_t item : open) {
          if (fresh(item)) best_[item].code = Code::kDeadlineExceeded;
        }
        break;
      }
      std::vector<uint32_t> lost;
      if (!surveyed_ && (round > 0 || map_->local.size() != 1)) survey(open);
      assign(open, lost, round == 0);
      if (!lost.empty() && searches_ < kMaxSearches && !options_.node && map_->nodes.size() > 1) search(lost);
      if (works_.empty()) break;
      if (round > 0 && !pay_for_failures()) keep_unfailed();
      if (works_.empty()) break;
      fetch();
      open = sort_out();
    }
    if (!damaged_.empty() && !options_.deadline.expired()) report_damage();
    for (uint32_t i = 0; i < best_.size(); ++i) {
      batch_.outcomes[i] = best_[i];
      if (batch_.device != nullptr) {
        if (best_[i].code == Code::kTransportUnavailable) continue;  // it comes again, and counts then
        impl_.counters.add(Counter::kGetItems);
      }
      if (is_unreachable(best_[i].code)) impl_.counters.add(Counter::kMissUnreachable);
    }
    if (batch_.how->allocate) learn_usual_size();
  }

 private:
  static constexpr size_t kMaxRounds = 8;
  static constexpr size_t kMaxSearches = 3;
  // From so many bytes on a round trip to all nodes is little beside the reading.
  static constexpr uint64_t kSurveyBytes = 1 << 20;
  static constexpr uint32_t kSurveyLastsS = 60;

  // Blocks of device memory that cannot go in place are for another way.
  bool may_begin(uint32_t item) const { return batch_.device == nullptr || batch_.device->takes(item); }

  Work& work_for(uint32_t position) {
    for (auto& [known, work] : works_) {
      if (known == position) return *work;
    }
    works_.emplace_back(position, std::make_unique<Work>());
    return *works_.back().second;
  }

  void note(uint32_t item, const GetOutcome& outcome) {
    if (fresh(item) || weight_of(outcome.code) > weight_of(best_[item].code)) best_[item] = outcome;
  }
  bool fresh(uint32_t item) const {
    return best_[item].code == Code::kNotFound && best_[item].node_index == kNoNode;
  }

  // Gives each open item a node; those without a guess end up in `lost`.
  void assign(std::span<const uint32_t> open, std::vector<uint32_t>& lost, bool count) {
    works_.clear();
    asked_.assign(map_->nodes.size(), 0);
    places_.new_round();
    for (const uint32_t item : open) {
      for (;;) {
        uint32_t position = kNoNode;
        if (options_.node) {
          if (tried_[item].empty()) position = map_->position(*options_.node);
          if (position == kNoNode && tried_[item].empty())
            note(item, {Code::kUnknownNode, 0, *options_.node});
        } else {
          position = places_.next(item, count);
        }
        if (position == kNoNode) {
          if (!options_.node) lost.push_back(item);
          break;
        }
        tried_[item].push_back(position);
        if (!usable(position)) {
          note(item,
               {map_->nodes[position]->last_failure().code == Code::kUnauthenticated ? Code::kUnauthenticated
                                                                                     : Code::kNodeUnavailable,
                0, map_->infos[position].index});
          continue;
        }
        work_for(position).items.push_back(item);
        break;
      }
    }
  }

  // The breaker is asked once per node and round: a probe is one batch.
  bool usable(uint32_t position) {
    if (asked_[position] == 0) asked_[position] = impl_.may_use(*map_, position) ? 1 : 2;
    return asked_[position] == 1;
  }

  // Whether there may be copies of an item that are nearer than the known ones, or as near.
  bool may_have_other_copies(uint32_t item) const {
    const LocationCache::Places places = impl_.locations.find(batch_.blocks[item].key);
    const bool lately =
        places.asked_s != LocationCache::kNeverAsked && steady_seconds() - places.asked_s < kSurveyLastsS;
    bool known = false;
    for (const uint32_t index : places.nodes) {
      const uint32_t position = map_->position(index);
      if (position == kNoNode) continue;
      known = true;
      const std::string& host_id = map_->infos[position].host_id;
      if (!host_id.empty() && host_id == impl_.config.host_id) return false;
    }
    return !known || !lately;
  }

  // Before much is read: asks all nodes what they hold of it, unless that is known. Who does not answer at
  // once is not waited for, and not asked again for a while.
  void survey(std::span<const uint32_t> open) {
    surveyed_ = true;
    const size_t nodes = map_->nodes.size();
    if (options_.node || nodes < 2 || nodes > impl_.config.fanout_nodes_max || impl_.config.survey_ms == 0)
      return;
    uint64_t bytes = 0;
    for (const uint32_t item : open) bytes += places_.likely_bytes(item);
    if (bytes < kSurveyBytes) return;
    std::vector<uint32_t> items;
    bytes = 0;
    for (const uint32_t item : open) {
      if (!may_have_other_copies(item)) continue;
      items.push_back(item);
      bytes += places_.likely_bytes(item);
    }
    if (bytes < kSurveyBytes) return;
    std::vector<uint32_t> all(items.size());
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    std::vector<Question> asked;
    const uint64_t now_ms = steady_ms();
    for (uint32_t position = 0; position < map_->nodes.size(); ++position) {
      Node& node = *map_->nodes[position];
      if (map_->infos[position].state == NodeHealth::kDead || node.breaker_open(now_ms)) continue;
      if (node.answers_at_once(now_ms)) asked.push_back({position, all});
    }
    CallOptions soon = options_;
    soon.deadline =
        Deadline::after_ms(options_.deadline.remaining_ms(static_cast<int>(impl_.config.survey_ms)));
    std::vector<Status> ends;
    const std::vector<Key> keys = keys_of(items);
    const std::vector<Nearest> found = impl_.ask_holders(*map_, asked, keys, soon, ends);
    impl_.counters.add(Counter::kSurveys);
    for (size_t q = 0; q < asked.size(); ++q) {
      if (!ends[q]) map_->nodes[asked[q].position]->answered_late(steady_ms());
    }
    for (size_t i = 0; i < items.size(); ++i) impl_.learn(*map_, keys[i], found[i], true);
  }

  std::vector<Key> keys_of(std::span<const uint32_t> items) const {
    std::vector<Key> keys;
    keys.reserve(items.size());
    for (const uint32_t item : items) keys.push_back(batch_.blocks[item].key);
    return keys;
  }

  // Asks the nodes that were not tried for the lost items.
  void search(std::span<const uint32_t> lost) {
    ++searches_;
    if (map_->nodes.size() > impl_.config.fanout_nodes_max) return;
    std::vector<Question> asked;
    for (uint32_t position = 0; position < map_->nodes.size(); ++position) {
      Question question{position, {}};
      for (uint32_t i = 0; i < lost.size(); ++i) {
        if (!places_.was_tried(lost[i], position)) question.items.push_back(i);
      }
      if (!question.items.empty() && usable(position)) asked.push_back(std::move(question));
    }
    std::vector<Status> ends;
    std::vector<Nearest> found = impl_.ask_holders(*map_, asked, keys_of(lost), options_, ends);
    for (size_t q = 0; q < asked.size(); ++q) {
      if (ends[q]) continue;
      for (const uint32_t i : asked[q].items)
        note(lost[i], {ends[q].code, 0, map_->infos[asked[q].position].index});
    }
    for (size_t i = 0; i < lost.size(); ++i) {
      if (found[i].count == 0) continue;
      impl_.learn(*map_, batch_.blocks[lost[i]].key, found[i], tried_[lost[i]].empty());
      const uint32_t position = places_.nearest_of(lost[i], found[i]);
      tried_[lost[i]].push_back(position);
      work_for(position).items.push_back(lost[i]);
    }
  }

  // Going on after a miss is part of a get; going on after failures is a retry and has a budget.
  bool pay_for_failures() { return failures_ == 0 || retries_.take(failures_); }

  // Without a budget for retries only those go on that a node sent back to be asked for in another way.
  void keep_unfailed() {
    for (auto& [position, work] : works_) {
      std::erase_if(work->items, [this](uint32_t item) {
        const Code code = batch_.outcomes[item].code;
        return code != Code::kBufferTooSmall && code != Code::kTransportUnavailable;
      });
    }
    std::erase_if(works_, [](const auto& one) { return one.second->items.empty(); });
  }

  // Blocks of a batch that allocates have no size before a node said it, and the way depends on the size.
  // The guess is what blocks measured lately. A block above this limit is not sent where there is a better
  // way for large ones: the node tells its size, and it is asked for again.
  uint64_t unsized_max(Node& node, Session& session) const {
    if (!batch_.how->allocate || !batch_.how->whole || no_one_sided_) return UINT64_MAX;
    if (session.route() == Route::kUnix) return std::max(impl_.config.shm_min_bytes, 2 * places_.usual_bytes);
    if (node.rdma_for(session, steady_ms()) == nullptr) return UINT64_MAX;
    return std::max(impl_.config.rdma_min_block_bytes, 2 * places_.usual_bytes);
  }

  void learn_usual_size() {
    uint64_t bytes = 0, blocks = 0;
    for (const GetOutcome& outcome : best_) {
      if (outcome.code != Code::kOk) continue;
      bytes += outcome.size;
      ++blocks;
    }
    if (blocks == 0) return;
    const uint64_t mean = bytes / blocks;
    impl_.usual_bytes.store(places_.usual_bytes == 0 ? mean : (places_.usual_bytes + mean) / 2,
                            std::memory_order_relaxed);
  }

  void fetch() {
    std::vector<LaneTask> tasks(works_.size());
    std::vector<ReadUnderWay> readings;
    readings.reserve(works_.size());
    std::optional<HedgedReads> hedges;
    if (may_hedge()) {
      hedges.emplace(impl_, batch_, *map_,
                     [this](uint32_t item, uint32_t position) { return places_.elsewhere(item, position); });
      impl_.ran_reads(works_.size());
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < works_.size(); ++i) {
      auto& [position, work] = works_[i];
      uint64_t work_bytes = 0, likely_bytes = 0;
      bool bulk = false;
      for (const uint32_t item : work->items) {
        const uint64_t expected = places_.expected_bytes(item);
        work_bytes += expected;
        likely_bytes += expected > 0 ? expected : ReadPlaces::kUnsizedBytes;
        bytes += expected > 0 ? expected : impl_.config.frame_bytes;
        bulk = bulk || expected == 0;  // of unknown size
      }
      bulk = bulk || work_bytes > kSmallCallBytes;
      Node& node = *map_->nodes[position];
      readings.emplace_back(node, work_bytes);
      tasks[i].node = map_->nodes[position];
      tasks[i].has_alternative = map_->nodes.size() > 1 && !options_.node;
      tasks[i].use = bulk ? LaneUse::kBulk : LaneUse::kSmall;
      if (hedges) hedges->watch(tasks[i], position, *work, likely_bytes);
      const bool one_sided = work_bytes >= impl_.config.shm_min_bytes && !no_one_sided_;
      const bool rdma =
          one_sided && batch_.how->whole && worth_rdma(impl_.config, work_bytes, work->items.size());
      tasks[i].make_program = [this, &node, work = work.get(), one_sided, rdma](Session& session) {
        if (batch_.device != nullptr && !(rdma && impl_.rdma_for_device(*batch_.device, node, session))) {
          refuse_rest(batch_, *work, node);
          return make_refusal();
        }
        if ((one_sided && session.route() == Route::kUnix) || (rdma && node.rdma_for(session, steady_ms())))
          return make_one_sided_get(batch_, *work, node, session);
        return make_fused_get(batch_, *work, node, unsized_max(node, session));
      };
    }
    impl_.run(tasks, options_, bytes <= impl_.config.frame_bytes, hedges ? &*hedges : nullptr);
    for (size_t i = 0; i < works_.size(); ++i) {
      const Work& work = *works_[i].second;
      for (size_t k = work.answered; k < work.items.size(); ++k) {
        batch_.outcomes[work.items[k]] = {tasks[i].status.code, 0, map_->infos[works_[i].first].index};
      }
    }
    if (!hedges) return;
    hedges->end([this](uint32_t item, uint32_t position, const GetOutcome& outcome) {
      tried_[item].insert(tried_[item].end() - 1, position);  // the last one is where it was asked first
      if (outcome.code != Code::kOk) note(item, outcome);
    });
  }

  bool may_hedge() const {
    return impl_.config.hedge_percent > 0 && batch_.device == nullptr && !options_.node &&
           map_->nodes.size() > 1;
  }

  // Has the holders check the blocks whose bytes did not fit their checksum here. What was damaged in transit
  // stays; what is damaged at rest is quarantined, and the key can be stored again. Best effort: the get is
  // over already.
  void report_damage() {
    std::sort(damaged_.begin(), damaged_.end());
    std::vector<std::vector<CallProgram::Call>> calls;
    std::vector<LaneTask> tasks;
    for (auto at = damaged_.begin(); at != damaged_.end();) {
      const uint32_t position = at->first;
      std::vector<wire::GetItem> items;
      for (; at != damaged_.end() && at->first == position && items.size() < wire::kMaxItems; ++at) {
        items.push_back({batch_.blocks[at->second].key, 0, 0});
      }
      Writer meta;
      wire::encode_items<wire::GetItem>(meta, items);
      calls.push_back({{wire::Opcode::kGet, wire::kFlagVerify, meta.take(), {}}});
      tasks.emplace_back().node = map_->nodes[position];
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
      tasks[i].make_program = [call = &calls[i]](Session&) {
        return std::make_unique<CallProgram>(
            *call, [](size_t, const Status& status, Reader&) -> Status { return status; });
      };
    }
    impl_.run(tasks, options_, true);
  }

  // Records the round's answers; returns what is still open.
  std::vector<uint32_t> sort_out() {
    failures_ = 0;
    std::vector<uint32_t> still_open;
    bool stop = false;
    for (auto& [position, work] : works_) {
      bool failed = false;
      for (const uint32_t item : work->items) {
        const GetOutcome& outcome = batch_.outcomes[item];
        const Key& key = batch_.blocks[item].key;
        if (batch_.how->allocate && outcome.code == Code::kBufferTooSmall) {  // now its size is known
          if (map_->nodes.size() > 1) impl_.locations.learn(key, outcome.node_index);
          tried_[item].pop_back();
          still_open.push_back(item);
          continue;
        }
        if (outcome.code == Code::kTransportUnavailable && batch_.device != nullptr) {
          best_[item] = outcome;  // whatever others said: it is worth another way
          continue;
        }
        if (outcome.code ==
            Code::kTransportUnavailable) {  // no shared memory after all: same node, other way
          no_one_sided_ = true;
          tried_[item].pop_back();
          still_open.push_back(item);
          continue;
        }
        note(item, outcome);
        if (outcome.code == Code::kOk) {
          if (map_->nodes.size() > 1) impl_.locations.learn(key, outcome.node_index);
        } else if (impl_.locations.forget(key, outcome.node_index)) {
          impl_.counters.add(Counter::kLocationCorrections);
        }
        if (outcome.code == Code::kChecksumMismatch) damaged_.emplace_back(position, item);
        if (outcome.code == Code::kCancelled || outcome.code == Code::kDeadlineExceeded) stop = true;
        if (!final_code(outcome.code)) {
          still_open.push_back(item);
          failed = failed || is_unreachable(outcome.code);
        }
      }
      failures_ += failed ? 1 : 0;  // a batch sent once more is one retry
    }
    if (stop) {
      const Code code = options_.cancel != nullptr && options_.cancel->cancelled() ? Code::kCancelled
                                                                                   : Code::kDeadlineExceeded;
      for (const uint32_t item : still_open) best_[item].code = code;
      still_open.clear();
    }
    return still_open;
  }

  Client::Impl& impl_;
  const GetBatch& batch_;
  const CallOptions& options_;
  std::shared_ptr<const NodeMap> map_;
  std::vector<std::vector<uint32_t>> tried_;
  std::vector<GetOutcome> best_;
  std::vector<std::pair<uint32_t, std::unique_ptr<Work>>> works_;
  std::vector<uint8_t> asked_;
  std::vector<std::pair<uint32_t, uint32_t>> damaged_;  // position of the node, item
  uint64_t failures_ = 0;
  CallRetries retries_{impl_};
  ReadPlaces places_{impl_, batch_, *map_, tried_};
  size_t searches_ = 0;
  bool surveyed_ = false;
  bool no_one_sided_ = false;
};

}  // namespace

Status Client::Impl::get(std::span<const GetBlock> blocks, const GetOptions& how, const CallOptions& options,
                         std::span<GetOutcome> outcomes) {
  if (Status status = check_call(blocks.size(), options); !status) return status;
  if (outcomes.size() != blocks.size()) return {Code::kInvalidArgument, "one outcome per block is needed"};
  if (blocks.empty()) return Status::ok();
  if (map()->nodes.empty()) return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  std::vector<uint64_t> known_bytes(how.allocate ? blocks.size() : 0);
  GetBatch batch{blocks,        &how,    outcomes,    &counters,           &config,
                 buffers.get(), nullptr, known_bytes, options.staged_bytes};
  DeviceCall device;
  if (options.device_memory) {
    if (how.allocate) return {Code::kInvalidArgument, "device memory is not allocated here"};
    device = find_device(blocks);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < blocks.size(); ++i) bytes += batch.capacity(i);
    if (Status status = begin_device_call(device, bytes, options); !status) return status;
    batch.device = &device;
  } else {
    counters.add(Counter::kGetItems, blocks.size());
  }
  ran_operations(blocks.size());
  for (GetOutcome& outcome : outcomes) outcome = {};
  GetCall(*this, batch, options).run();
  return Status::ok();
}

}  // namespace mooncache
