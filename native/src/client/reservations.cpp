#include "client/reservations.h"

#include <algorithm>

#include "transport/queued_link.h"

namespace mooncache {

namespace {

bool is_cut(const Status& status) {
  return status.code == Code::kCancelled || status.code == Code::kDeadlineExceeded;
}

Status ended() {
  return {Code::kClosed, "the reservation was committed or aborted"};
}
Status lost() {
  return {Code::kConnectionLost, "the reservation's connection is gone, and the reservation with it"};
}

uint64_t bytes_of(std::span<const ConstSlice> source) {
  uint64_t length = 0;
  for (const ConstSlice& slice : source) {
    if (slice.size > wire::kMaxPayloadBytes || length > wire::kMaxPayloadBytes) return UINT64_MAX / 2;
    length += slice.size;
  }
  return length;
}

}  // namespace

Reservations::~Reservations() {
  if (impl_->in_child()) {
    for (Part& part : parts_) {
      leak_in_child(std::move(part.node));
      leak_in_child(std::move(part.lane));
    }
    leak_in_child(std::move(impl_));
    return;
  }
  if (impl_->usable()) {
    for (const auto& call : calls([](size_t) { return true; })) give_up(call->part, call->blocks);
  }
  for (const Part& part : parts_) leave_lane(*impl_, *part.lane, part.count);
}

void Reservations::take(const std::shared_ptr<Node>& node, std::shared_ptr<ReservationLane> lane,
                        std::span<const Granted> granted) {
  auto part =
      std::find_if(parts_.begin(), parts_.end(), [&](const Part& known) { return known.lane == lane; });
  if (part == parts_.end()) part = parts_.insert(part, Part{node, std::move(lane), 0});
  part->count += static_cast<uint32_t>(granted.size());
  for (const Granted& one : granted) {
    Block& block = blocks_[one.block];
    block.refused = Status::ok();
    block.part = static_cast<uint32_t>(part - parts_.begin());
    block.extent = one.extent;
    block.extent.size = block_bytes_;
    block.open = true;
  }
}

Status Reservations::state(size_t block) const {
  if (impl_->in_child()) return impl_->usable();  // before the lock
  const std::lock_guard own(mutex_);
  return state_locked(block);
}

Status Reservations::state_locked(size_t number) const {
  const Block& block = blocks_[number];
  if (!block.refused) return block.refused;
  if (!block.open) return ended();
  return parts_[block.part].lane->broken() ? lost() : Status::ok();
}

bool Reservations::is_open(const Block& block) const {
  return block.open && !parts_[block.part].lane->broken();
}

uint32_t Reservations::node_index(size_t block) const {
  const uint32_t part = blocks_[block].part;
  return part == kNoPart ? kNoNode : parts_[part].node->info().index;
}

// Calls ---------------------------------------------------------------------------------------------------

Status Reservations::check(const CallOptions& options, size_t ends) const {
  if (Status status = impl_->check_call(blocks_.size(), options); !status) return status;
  if (ends != blocks_.size()) return {Code::kInvalidArgument, "one outcome per block is needed"};
  return Status::ok();
}

template <typename Wanted>
std::vector<std::unique_ptr<Reservations::PartCall>> Reservations::calls(const Wanted& wanted) {
  std::vector<std::unique_ptr<PartCall>> by_part;
  for (Part& part : parts_) by_part.push_back(std::make_unique<PartCall>(part));
  for (uint32_t i = 0; i < blocks_.size(); ++i) {
    if (is_open(blocks_[i]) && wanted(i)) by_part[blocks_[i].part]->blocks.push_back(i);
  }
  std::erase_if(by_part, [](const auto& call) { return call->blocks.empty(); });
  return by_part;
}

void Reservations::run(std::span<const std::unique_ptr<PartCall>> calls, const CallOptions& options,
                       uint64_t bytes, const Make& make) {
  std::vector<LaneTask> tasks(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    PartCall& call = *calls[i];
    tasks[i].node = call.part.node;
    tasks[i].lanes = &call.lane;
    tasks[i].use = bytes > kSmallCallBytes ? LaneUse::kBulk : LaneUse::kSmall;
    tasks[i].make_program = [&make, &call](Session& session) {
      call.begun = true;
      return make(call, session);
    };
  }
  impl_->run(tasks, options, bytes <= impl_->config.frame_bytes);
  for (size_t i = 0; i < calls.size(); ++i) {
    const bool gone = calls[i]->part.lane->broken() && tasks[i].status.code == Code::kClosed;
    calls[i]->status = gone && impl_->usable() ? lost() : tasks[i].status;
  }
}

void Reservations::give_up(const Part& part, std::span<const uint32_t> blocks) {
  std::vector<uint64_t> grants;
  for (const uint32_t i : blocks) {
    blocks_[i].open = false;
    grants.push_back(blocks_[i].extent.grant);
  }
  part.lane->forget(grants);
}

// Write ---------------------------------------------------------------------------------------------------

Status Reservations::check_sources(uint64_t offset, std::span<const Source> sources) const {
  for (size_t i = 0; i < sources.size(); ++i) {
    const uint64_t length = is_open(blocks_[i]) ? bytes_of(sources[i]) : 0;
    if (!inside(offset, length, block_bytes_)) {
      return {Code::kInvalidArgument, "the range [" + std::to_string(offset) + ", +" +
                                          std::to_string(length) + ") is not inside the block of " +
                                          std::to_string(block_bytes_) + " bytes"};
    }
    if (length > 0 && blocks_[i].written.overlaps(offset, length))
      return {Code::kInvalidArgument, "the range overlaps one that was written before"};
  }
  return Status::ok();
}

Status Reservations::write(uint64_t offset, std::span<const Source> sources, const CallOptions& options,
                           std::span<Status> ends) {
  if (impl_->in_child()) return impl_->usable();  // before the lock
  const std::lock_guard own(mutex_);
  if (Status status = check(options, ends.size()); !status) return status;
  if (sources.size() != blocks_.size()) return {Code::kInvalidArgument, "one source per block is needed"};
  if (Status status = check_sources(offset, sources); !status) return status;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (!is_open(blocks_[i])) ends[i] = state_locked(i);
  }
  std::vector<Slice> slices;
  size_t slice_count = 0;
  for (const Source& source : sources) slice_count += source.size();
  slices.reserve(slice_count);  // the writes hold spans of them
  uint64_t bytes = 0;
  const auto made = calls([&](size_t i) { return bytes_of(sources[i]) > 0; });
  for (const auto& call : made) {
    for (const uint32_t i : call->blocks) {
      const size_t first = slices.size();
      for (const ConstSlice& slice : sources[i])
        slices.push_back({const_cast<std::byte*>(slice.data), slice.size});
      ReservedWrite& write = call->writes.emplace_back();
      write.extent = blocks_[i].extent;
      write.length = bytes_of(sources[i]);
      write.slices = std::span(slices).subspan(first);
      bytes += write.length;
    }
  }
  run(made, options, bytes,
      [&](PartCall& call, Session& session) { return make_write(call, session, offset, options); });
  for (const auto& call : made) end_write(*call, offset, ends);
  return Status::ok();
}

std::unique_ptr<Program> Reservations::make_write(PartCall& call, Session& session, uint64_t offset,
                                                  const CallOptions& options) {
  Node& node = *call.part.node;
  // The node frees the space of a connection that may write by itself only after its end. An end that is seen
  // here leaves no byte that could come late: frames on such a connection fail.
  const bool by_link = call.part.lane->may_have_link(node, session) && !session.stale();
  return std::make_unique<RangesWrite>(call.writes, offset, by_link, node, session, *impl_->buffers,
                                       impl_->config, impl_->counters, options.staged_bytes);
}

void Reservations::end_write(PartCall& call, uint64_t offset, std::span<Status> ends) {
  std::vector<uint32_t> torn;
  for (size_t k = 0; k < call.blocks.size(); ++k) {
    const ReservedWrite& write = call.writes[k];
    Block& block = blocks_[call.blocks[k]];
    Status& end = ends[call.blocks[k]];
    if (!write.over) {
      end = call.status;
      if (call.begun) torn.push_back(call.blocks[k]);  // must never be committed
    } else if (write.code == Code::kOk) {
      (void)block.written.note(offset, write.length, write.crc, SIZE_MAX);
      block.one_sided = block.one_sided || write.one_sided;
    } else {
      end = {write.code, "the write ended with " + std::string(code_name(write.code))};
      if (write.code != Code::kInvalidArgument) torn.push_back(call.blocks[k]);
    }
  }
  give_up(call.part, torn);
}

// Commit and abort ----------------------------------------------------------------------------------------

std::unique_ptr<Program> Reservations::make_exchange(PartCall& call) {
  return std::make_unique<CallProgram>(call.request, [&call](size_t, const Status& status, Reader& in) {
    const auto codes = decode_outcomes(status, in, call.blocks.size());
    if (!codes) return codes.status();
    call.codes = *codes;
    return Status::ok();
  });
}

// What is under way when it is cut may not have been sent; to give it up as well does no harm, and what is
// committed stays.
void Reservations::exchange_codes(std::span<const std::unique_ptr<PartCall>> calls,
                                  const CallOptions& options) {
  run(calls, options, 0, [&](PartCall& call, Session&) { return make_exchange(call); });
  for (const auto& call : calls) {
    if (!call->begun) continue;
    if (is_cut(call->status)) give_up(call->part, call->blocks);
    for (const uint32_t i : call->blocks) blocks_[i].open = false;
  }
}

Status Reservations::commit(const CallOptions& options, std::span<Status> ends) {
  if (impl_->in_child()) return impl_->usable();
  const std::lock_guard own(mutex_);
  if (Status status = check(options, ends.size()); !status) return status;
  for (size_t i = 0; i < blocks_.size(); ++i) ends[i] = state_locked(i);
  const auto whole = [&](size_t i) { return blocks_[i].written.leading_bytes() == block_bytes_; };
  const auto torn = calls([&](size_t i) { return !whole(i); });
  for (const auto& call : torn) {
    for (const uint32_t i : call->blocks) {
      ends[i] = {Code::kIncomplete, "only the first " + std::to_string(blocks_[i].written.leading_bytes()) +
                                        " of " + std::to_string(block_bytes_) +
                                        " bytes were written without a gap; the reservation was given back"};
    }
  }
  if (!torn.empty()) (void)abort_locked(torn, options);
  const auto made = calls(whole);
  for (const auto& call : made) {
    std::vector<wire::CommitItem> items;
    for (const uint32_t i : call->blocks) {
      const Block& block = blocks_[i];
      items.push_back({block.extent.grant, block.written.leading_crc(),
                       block.one_sided ? wire::CommitItem::kFlagOneSided : 0});
    }
    Request request;
    encode_commit(request, items);
    call->request.push_back({request.opcode, 0, std::move(request.meta.bytes()), {}});
  }
  exchange_codes(made, options);
  for (const auto& call : made) {
    for (size_t k = 0; k < call->blocks.size(); ++k) {
      Status& end = ends[call->blocks[k]];
      if (call->codes.empty())
        end = call->status;
      else if (const Code code = call->codes[k]; code != Code::kOk)
        end = {code, "the node answered " + std::string(code_name(code))};
    }
  }
  return Status::ok();
}

Status Reservations::abort(const CallOptions& options) {
  if (impl_->in_child()) return Status::ok();  // they are the parent's
  const std::lock_guard own(mutex_);
  return abort_locked(calls([](size_t) { return true; }), options);
}

// Those whose connection is gone the node has forgotten already.
Status Reservations::abort_locked(std::span<const std::unique_ptr<PartCall>> calls,
                                  const CallOptions& caller) {
  CallOptions options = caller;
  options.deadline.at = std::min(caller.deadline.at, Deadline::after_ms(impl_->config.connect_timeout_ms).at);
  for (const auto& call : calls) {
    std::vector<uint64_t> grants;
    for (const uint32_t i : call->blocks) grants.push_back(blocks_[i].extent.grant);
    Request request;
    encode_abort(request, grants);
    call->request.push_back({request.opcode, 0, std::move(request.meta.bytes()), {}});
  }
  exchange_codes(calls, options);
  Status first;
  for (const auto& call : calls) {
    if (!call->begun) give_up(call->part, call->blocks);
    if (first) first = call->status;
    for (const Code code : call->codes) {
      if (first && code != Code::kOk) first = {code, "the node answered " + std::string(code_name(code))};
    }
  }
  return first;
}

}  // namespace mooncache
