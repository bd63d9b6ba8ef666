// match, remove, pin, unpin, stat, list, node_stat, ping: small questions to several nodes at once.
#include <algorithm>
#include <map>
#include <utility>

#include "client/impl.h"

namespace mooncache {

namespace {

// Answers of several nodes about one key: higher wins.
int weight_of(Code code) {
  if (code == Code::kOk) return 4;
  if (code == Code::kPinned) return 3;
  if (code == Code::kNotFound) return 0;
  return is_unreachable(code) ? 2 : 1;
}

// The places of blocks, each once. Most blocks of a chain lie where the one before them lies.
class Places {
 public:
  explicit Places(const NodeMap& map) : map_(map) { places_.emplace_back(); }

  uint32_t of(const Nearest& nearest) {
    std::vector<BlockCopy>& copies = copies_;
    copies.clear();
    for (size_t i = 0; i < nearest.count; ++i) {
      const NodeInfo& node = map_.infos[nearest.positions[i]];
      const Tier memory = node.medium == Medium::kHbm ? Tier::kHbm : Tier::kDram;
      const Tier below = nearest.shared[i] ? Tier::kShared : Tier::kSsd;
      copies.push_back({node.index, nearest.on_disk[i] ? below : memory});
    }
    if (copies == places_[last_]) return last_;
    const auto known = numbers_.find(copies);
    if (known != numbers_.end()) return last_ = known->second;
    last_ = static_cast<uint32_t>(places_.size());
    numbers_.emplace(copies, last_);
    places_.push_back(copies);
    return last_;
  }
  std::vector<std::vector<BlockCopy>> take() { return std::move(places_); }

 private:
  const NodeMap& map_;
  std::vector<std::vector<BlockCopy>> places_;
  std::map<std::vector<BlockCopy>, uint32_t> numbers_;
  std::vector<BlockCopy> copies_;
  uint32_t last_ = 0;
};

}  // namespace

std::vector<Question> Client::Impl::questions(const NodeMap& map, std::span<const Key> keys,
                                              const CallOptions& options, uint32_t& unreachable) {
  std::vector<Question> asked;
  unreachable = 0;
  const bool all_nodes = options.all_nodes || map.nodes.size() <= config.fanout_nodes_max;
  for (uint32_t position = 0; position < map.nodes.size(); ++position) {
    Question question{position, {}};
    if (options.node ? map.infos[position].index == *options.node : all_nodes) {
      question.items.resize(keys.size());
      for (uint32_t i = 0; i < keys.size(); ++i) question.items[i] = i;
    }
    asked.push_back(std::move(question));
  }
  if (!all_nodes && !options.node) {
    for (uint32_t i = 0; i < keys.size(); ++i) {
      std::vector<uint32_t> chosen;
      for (uint32_t next; chosen.size() < 3 && (next = guess(map, keys[i], chosen)) != kNoNode;) {
        chosen.push_back(next);
        asked[next].items.push_back(i);
      }
    }
  }
  std::erase_if(asked, [&](const Question& question) {
    if (question.items.empty()) return true;
    if (may_use(map, question.position)) return false;
    ++unreachable;
    return true;
  });
  return asked;
}

void Client::Impl::request_keys(const NodeMap& map, std::span<const Question> asked,
                                std::span<const Key> keys, wire::Opcode opcode, uint16_t flags,
                                std::span<const std::byte> head, const CallOptions& options,
                                const KeysHandler& handle, std::vector<Status>& ends) {
  struct Part {
    std::vector<CallProgram::Call> calls;
    size_t answered = 0;
  };
  std::vector<Part> parts(asked.size());
  std::vector<LaneTask> tasks(asked.size());
  for (size_t q = 0; q < asked.size(); ++q) {
    const Question& question = asked[q];
    for (size_t begin = 0; begin < question.items.size(); begin += wire::kMaxItems) {
      const size_t count = std::min<size_t>(wire::kMaxItems, question.items.size() - begin);
      Writer meta(head.size() + 4 + count * kKeyBytes);
      meta.raw(head);
      meta.u32(static_cast<uint32_t>(count));
      for (size_t i = 0; i < count; ++i) meta.key(keys[question.items[begin + i]]);
      parts[q].calls.push_back({opcode, flags, meta.take(), {}});
    }
    tasks[q].node = map.nodes[question.position];
    tasks[q].has_alternative = map.nodes.size() > 1;
    tasks[q].make_program = [&, q](Session& session) -> std::unique_ptr<Program> {
      // an older node would close the connection; nothing waits there, nothing comes up from a disk
      if (opcode == wire::Opcode::kGiveUp && !session.offers_waits()) return make_refusal();
      if (opcode == wire::Opcode::kPrefetch && !session.offers_prefetch()) return make_refusal();
      return std::make_unique<CallProgram>(
          parts[q].calls,
          [&, q](size_t call, const Status& status, Reader& in) {
            const size_t begin = call * wire::kMaxItems;
            const size_t count = std::min<size_t>(wire::kMaxItems, asked[q].items.size() - begin);
            parts[q].answered = call + 1;
            return handle(asked[q], std::span(asked[q].items).subspan(begin, count), status, in);
          },
          parts[q].answered);
    };
  }
  run(tasks, options, true);
  ends.clear();
  for (LaneTask& task : tasks) ends.push_back(std::move(task.status));
}

Status Client::Impl::one_call(uint32_t index, const CallProgram::Call& call, const CallOptions& options,
                              const CallProgram::Handler& handler) {
  if (Status status = check_call(1, options); !status) return status;
  const auto map_now = map();
  const uint32_t position = map_now->position(index);
  if (position == kNoNode)
    return {Code::kUnknownNode, "no node with index " + std::to_string(index) + " in the map"};
  const std::vector<CallProgram::Call> calls{call};
  Status answer;
  LaneTask task;
  task.node = map_now->nodes[position];
  task.make_program = [&](Session& session) -> std::unique_ptr<Program> {
    if ((session.node().capabilities & call.needs) != call.needs) {
      answer = {Code::kUnsupported, "the node is of an earlier version and does not answer " +
                                        std::string(wire::opcode_name(call.opcode))};
      return make_refusal();
    }
    return std::make_unique<CallProgram>(calls, [&](size_t at, const Status& status, Reader& in) {
      if (status) return handler(at, status, in);
      answer = status;
      return Status::ok();
    });
  };
  {
    const CallTimer timer(counters, Timed::kControl);
    run(std::span(&task, 1), options, true);
  }
  return task.status ? answer : task.status;
}

std::vector<Nearest> Client::Impl::ask_holders(const NodeMap& map, std::span<const Question> asked,
                                               std::span<const Key> keys, const CallOptions& options,
                                               std::vector<Status>& ends, uint16_t flags) {
  std::vector<Nearest> nearest(keys.size());
  ReadRanks ranks(*this, map);
  request_keys(
      map, asked, keys, wire::Opcode::kMatch, flags | wire::kFlagTiers | wire::kFlagShared, {}, options,
      [&](const Question& question, std::span<const uint32_t> items, const Status& status, Reader& in) {
        if (!status) return status;
        const auto answer = wire::MatchResponse::decode(in, static_cast<uint32_t>(items.size()));
        if (!answer) return Status{Code::kProtocolError, "malformed MATCH answer"};
        for (size_t i = 0; i < items.size(); ++i) {
          if (!bit_at(answer->bitmap, i)) continue;
          nearest[items[i]].offer(question.position, bit_at(answer->on_disk, i),
                                  ranks.order_for(keys[items[i]]), bit_at(answer->shared, i));
        }
        return Status::ok();
      },
      ends);
  return nearest;
}

Result<MatchReport> Client::match(std::span<const Key> keys, bool touch, const CallOptions& options) {
  const CallTimer timer(impl_->counters, Timed::kMatch);
  return impl_->match(keys, touch, options);
}

Result<MatchReport> Client::Impl::match(std::span<const Key> keys, bool touch, const CallOptions& options) {
  if (Status status = check_call(keys.size(), options); !status) return status;
  MatchReport report;
  report.bitmap.assign((keys.size() + 7) / 8, std::byte{0});
  report.places.resize(1);
  report.place_of.assign(keys.size(), 0);
  if (keys.empty()) return report;
  const auto map_now = map();
  if (map_now->nodes.empty())
    return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  counters.add(Counter::kMatchKeys, keys.size());
  const auto asked = questions(*map_now, keys, options, report.unreachable_nodes);
  std::vector<Status> ends;
  const std::vector<Nearest> nearest =
      ask_holders(*map_now, asked, keys, options, ends, touch ? wire::kFlagTouch : 0);
  for (const Status& end : ends) {
    if (end.code == Code::kCancelled || end.code == Code::kClosed) return end;
    report.unreachable_nodes += end ? 0 : 1;
  }
  if (!ends.empty() && asked.size() == 1 && !ends[0]) return ends[0];  // no node answered: say why
  const bool asked_all =
      !options.node && (options.all_nodes || map_now->nodes.size() <= config.fanout_nodes_max);
  bool leading = true;
  Places places(*map_now);
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool here = nearest[i].count > 0;
    leading = leading && here;
    report.leading_run += leading ? 1 : 0;
    report.present += here ? 1 : 0;
    if (here) report.bitmap[i / 8] |= std::byte{1} << (i % 8);
    if (here) report.place_of[i] = places.of(nearest[i]);
    learn(*map_now, keys[i], nearest[i], asked_all);
  }
  report.places = places.take();
  return report;
}

namespace {

// Runs an opcode whose answer is one code per key, and merges the nodes' answers.
Status merge_codes(Client::Impl& impl, std::span<const Key> keys, wire::Opcode opcode,
                   std::span<const std::byte> head, const CallOptions& options, std::span<Code> codes) {
  if (Status status = impl.check_call(keys.size(), options); !status) return status;
  if (codes.size() != keys.size()) return {Code::kInvalidArgument, "one code per key is needed"};
  const auto map = impl.map();
  if (map->nodes.empty() && !keys.empty())
    return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  uint32_t unreachable = 0;
  const auto asked = impl.questions(*map, keys, options, unreachable);
  std::fill(codes.begin(), codes.end(), unreachable > 0 ? Code::kNodeUnavailable : Code::kNotFound);
  const auto merge = [&](uint32_t item, Code code) {
    if (weight_of(code) > weight_of(codes[item])) codes[item] = code;
  };
  std::vector<Status> ends;
  impl.request_keys(
      *map, asked, keys, opcode, 0, head, options,
      [&](const Question&, std::span<const uint32_t> items, const Status& status, Reader& in) {
        if (status.is_ok() && (in.u32() != items.size() || in.remaining() != items.size() * 2)) {
          return Status{Code::kProtocolError, "malformed answer"};
        }
        for (const uint32_t item : items)
          merge(item, status.is_ok() ? static_cast<Code>(in.u16()) : status.code);
        return Status::ok();
      },
      ends);
  for (size_t q = 0; q < asked.size(); ++q) {
    if (ends[q]) continue;
    for (const uint32_t item : asked[q].items) merge(item, ends[q].code);
  }
  return Status::ok();
}

}  // namespace

Status Client::remove(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes) {
  return merge_codes(*impl_, keys, wire::Opcode::kRemove, {}, options, codes);
}

Status Client::pin(std::span<const Key> keys, uint32_t ttl_ms, const CallOptions& options,
                   std::span<Code> codes) {
  Writer head;
  head.u32(ttl_ms);
  return merge_codes(*impl_, keys, wire::Opcode::kPin, head.view(), options, codes);
}

Status Client::unpin(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes) {
  return merge_codes(*impl_, keys, wire::Opcode::kUnpin, {}, options, codes);
}

Result<uint64_t> Client::give_up(std::span<const Key> keys, const CallOptions& options) {
  if (Status status = impl_->check_call(keys.size(), options); !status) return status;
  const auto map = impl_->map();
  if (map->nodes.empty() && !keys.empty())
    return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  if (options.node && map->position(*options.node) == kNoNode)
    return {Code::kUnknownNode, "no node with index " + std::to_string(*options.node) + " in the map"};
  CallOptions everywhere = options;
  everywhere.all_nodes = true;
  uint32_t unreachable = 0;
  const auto asked = impl_->questions(*map, keys, everywhere, unreachable);
  uint64_t ended = 0;
  std::vector<Status> ends;
  impl_->request_keys(
      *map, asked, keys, wire::Opcode::kGiveUp, 0, {}, options,
      [&](const Question&, std::span<const uint32_t>, const Status& status, Reader& in) {
        if (!status) return status;
        ended += in.u32();
        return in.done() ? Status::ok() : Status{Code::kProtocolError, "malformed GIVE_UP answer"};
      },
      ends);
  const bool any = std::any_of(ends.begin(), ends.end(), [](const Status& end) { return end.is_ok(); });
  for (const Status& end : ends) {
    if (!end && (!any || end.code == Code::kCancelled || end.code == Code::kClosed)) return end;
  }
  if (!any && unreachable > 0)
    return {Code::kNodeUnavailable, "the nodes asked are dead, or did not answer lately"};
  return ended;
}

namespace {

// One node's answer about a block; the copy that would be read first speaks for the block.
void add_copy(BlockStat& stat, const wire::StatResult& found, const NodeMap& map, uint32_t position,
              ReadRanks& ranks) {
  const bool there = found.code == Code::kOk;
  const uint32_t index = map.infos[position].index;
  std::vector<BlockCopy> copies = std::move(stat.copies);
  auto place = copies.end();
  if (there) {
    place = std::find_if(copies.begin(), copies.end(), [&](const BlockCopy& known) {
      return ranks(position) < ranks(map.position(known.node_index));
    });
    place = copies.insert(place, {index, found.tier});
  }
  if (weight_of(found.code) > weight_of(stat.code) || (there && place == copies.begin()))
    stat = {found.code, index,        found.tier, found.crc32c, found.size, found.pins,
            found.hits, found.age_ms, {}};
  stat.copies = std::move(copies);
}

}  // namespace

Status Client::stat(std::span<const Key> keys, const CallOptions& options, std::span<BlockStat> stats) {
  if (Status status = impl_->check_call(keys.size(), options); !status) return status;
  if (stats.size() != keys.size()) return {Code::kInvalidArgument, "one answer per key is needed"};
  const auto map = impl_->map();
  if (map->nodes.empty() && !keys.empty())
    return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  uint32_t unreachable = 0;
  const auto asked = impl_->questions(*map, keys, options, unreachable);
  for (BlockStat& stat : stats) {
    stat = {};
    if (unreachable > 0) stat.code = Code::kNodeUnavailable;
  }
  ReadRanks ranks(*impl_, *map);
  std::vector<Status> ends;
  impl_->request_keys(
      *map, asked, keys, wire::Opcode::kStat, 0, {}, options,
      [&](const Question& question, std::span<const uint32_t> items, const Status& status, Reader& in) {
        if (!status) return status;
        if (in.u32() != items.size()) return Status{Code::kProtocolError, "malformed STAT answer"};
        for (const uint32_t item : items)
          add_copy(stats[item], wire::StatResult::decode(in), *map, question.position, ranks);
        return in.done() ? Status::ok() : Status{Code::kProtocolError, "malformed STAT answer"};
      },
      ends);
  for (size_t q = 0; q < asked.size(); ++q) {
    if (ends[q]) continue;
    for (const uint32_t item : asked[q].items) {
      if (weight_of(ends[q].code) > weight_of(stats[item].code)) stats[item].code = ends[q].code;
    }
  }
  return Status::ok();
}

Result<ListedPage> Client::list(uint32_t node, uint64_t cursor, uint32_t limit, const CallOptions& options) {
  if (limit < 1 || limit > wire::kMaxItems) return {Code::kInvalidArgument, "limit must be 1 to 4096"};
  Writer meta;
  wire::ListRequest{cursor, limit}.encode(meta);
  ListedPage page;
  Status status = impl_->one_call(node, {wire::Opcode::kList, 0, meta.take(), {}}, options,
                                  [&](size_t, const Status&, Reader& in) {
                                    auto answer = wire::ListResponse::decode(in);
                                    if (!answer) return Status{Code::kProtocolError, "malformed LIST answer"};
                                    page.next_cursor = answer->next_cursor;
                                    for (const auto& item : answer->items) {
                                      page.blocks.push_back({item.key, item.size, item.tier, item.hits});
                                    }
                                    return Status::ok();
                                  });
  if (!status) return status;
  return page;
}

Result<NamedValues> Client::node_stat(uint32_t node, const CallOptions& options) {
  NamedValues values;
  Status status = impl_->one_call(node, {wire::Opcode::kNodeStat, 0, {}, {}}, options,
                                  [&](size_t, const Status&, Reader& in) {
                                    auto answer = wire::NodeStatResponse::decode(in);
                                    if (!answer)
                                      return Status{Code::kProtocolError, "malformed NODE_STAT answer"};
                                    values = std::move(answer->values);
                                    return Status::ok();
                                  });
  if (!status) return status;
  return values;
}

Result<uint64_t> Client::ping(uint32_t node, const CallOptions& options) {
  const auto start = Deadline::Clock::now();
  Status status = impl_->one_call(node, {wire::Opcode::kPing, 0, {}, {}}, options,
                                  [](size_t, const Status&, Reader&) { return Status::ok(); });
  if (!status) return status;
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now() - start).count());
}

}  // namespace mooncache
