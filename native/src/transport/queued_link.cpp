#include "transport/queued_link.h"

#include <algorithm>

namespace mooncache {

bool total_bytes(std::span<const Slice> slices, uint64_t& total) {
  total = 0;
  for (const Slice& slice : slices) {
    if (slice.size > UINT64_MAX - total) return false;
    total += slice.size;
  }
  return true;
}

size_t QueuedLink::submit(std::span<const Transfer> transfers) {
  size_t taken = 0;
  for (const Transfer& transfer : transfers) {
    if (queue_.size() + done_.size() >= capabilities_.max_in_flight) break;
    Pending pending;
    pending.transfer = transfer;
    if (!total_bytes(transfer.local, pending.length) || transfer.local.size() > capabilities_.max_slices ||
        !inside(transfer.offset, pending.length, transfer.remote.size)) {
      pending.code = Code::kInvalidArgument;
    }
    queue_.push_back(pending);
    ++taken;
  }
  return taken;
}

// One bounded step; true when the transfer is over.
bool QueuedLink::step(Pending& pending, Code& code) {
  code = pending.code;
  if (closed_)
    code = Code::kClosed;
  else if (dead_)
    code = Code::kConnectionLost;
  if (code != Code::kOk) return true;
  if (!pending.started) {
    pending.started = true;
    code = begin(pending);
    if (code != Code::kOk) return true;
  }
  size_t budget = std::max<size_t>(step_bytes(), 1);
  while (pending.moved < pending.length && budget > 0) {
    const Slice& slice = pending.transfer.local[pending.slice];
    const size_t take = std::min(budget, slice.size - pending.slice_offset);
    if (take > 0) {
      code = move(pending, {slice.data + pending.slice_offset, take});
      if (code != Code::kOk) return true;
    }
    pending.moved += take;
    pending.slice_offset += take;
    budget -= take;
    if (pending.slice_offset == slice.size) {
      ++pending.slice;
      pending.slice_offset = 0;
    }
  }
  if (pending.moved < pending.length) return false;
  code = end(pending);
  return true;
}

size_t QueuedLink::poll(std::span<Completion> completions, Deadline deadline) {
  size_t count = 0;
  while (count < completions.size()) {
    if (!done_.empty()) {
      completions[count++] = done_.front();
      done_.pop_front();
      continue;
    }
    if (queue_.empty()) break;
    Pending& front = queue_.front();
    Code code = Code::kOk;
    if (step(front, code)) {
      if (code == Code::kConnectionLost) dead_ = true;
      completions[count++] = {front.transfer.id, code, front.moved, front.crc};
      queue_.pop_front();
      if (deadline.expired()) break;
    } else if (deadline.expired()) {
      break;
    }
  }
  return count;
}

Status QueuedLink::cancel(TransferId id) {
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [id](const Pending& pending) { return pending.transfer.id == id; });
  if (found == queue_.end()) return {Code::kNotFound, "no such transfer is under way"};
  done_.push_back({id, Code::kCancelled, found->moved, 0});
  queue_.erase(found);
  return Status::ok();
}

void QueuedLink::close() {
  closed_ = true;
}

}  // namespace mooncache
