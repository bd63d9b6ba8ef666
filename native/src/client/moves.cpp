#include "client/moves.h"

namespace mooncache {

Moves::Moves(Node& node, Session& session, BufferBook& buffers, DeviceSums* device,
             uint64_t direct_slice_bytes)
    : node_(node),
      session_(session),
      buffers_(buffers),
      device_(device),
      direct_slice_bytes_(direct_slice_bytes),
      opener_(node, session) {}

Moves::~Moves() {
  if (rdma() && opener_.link() != nullptr && open_ > 0) opener_.link()->close();
}

void Moves::clear() {
  moves_.clear();
  slices_.clear();
}

void Moves::add(Move move, std::span<const Slice> slices) {
  move.first_slice = slices_.size();
  move.slice_count = slices.size();
  slices_.insert(slices_.end(), slices.begin(), slices.end());
  moves_.push_back(move);
}

void Moves::start(Direction direction) {
  direction_ = direction;
  next_ = open_ = 0;
  together_ = 0;
  for (const Move& move : moves_) together_ += move.size;
}

Moves::Begun Moves::begin_next() {
  Move& move = moves_[next_];
  if (move.code != Code::kOk) {
    ++next_;
    return Begun::kBegun;  // it has ended, and the caller that gave it its code knows
  }
  Transfer transfer;
  transfer.id = next_;
  transfer.direction = direction_;
  transfer.remote = move.extent;
  transfer.offset = move.offset;
  transfer.together = together_;
  transfer.local = std::span(slices_).subspan(move.first_slice, move.slice_count);
  transfer.regions = regions_of(move);
  move.direct = !transfer.regions.empty();
  if (device_ != nullptr && !move.direct) {  // never a copy by the processor
    move.code = Code::kTransportUnavailable;
    ++next_;
    return Begun::kRefused;
  }
  if (opener_.link()->submit(std::span(&transfer, 1)) == 0) return Begun::kFull;
  ++next_;
  ++open_;
  return Begun::kBegun;
}

// Of the buffers that the caller, or the receive pool, keeps in place. Where so many small slices as one
// request takes are little, they are cheaper to copy. The device of the other end of a request sees one
// range.
std::span<const RegionHandle> Moves::regions_of(const Move& move) {
  const auto local = std::span(slices_).subspan(move.first_slice, move.slice_count);
  if (!rdma() || move.size == 0) return {};
  const uint64_t gathered = move.size / local.size() * std::min<uint64_t>(local.size(), node_.rdma_gathers());
  if (gathered < direct_slice_bytes_ || !buffers_.registrations_of(local, device_, regions_)) return {};
  return regions_;
}

Code Moves::outcome(Code code) {
  // A rail may not reach this device's memory: that says nothing about other bytes to this node.
  const bool of_device = device_ != nullptr && opener_.link()->healthy();
  if (of_device && code == Code::kInvalidArgument)
    return Code::kTransportUnavailable;  // unregistered meanwhile
  if (rdma() && code == Code::kTransportUnavailable && !of_device) node_.rdma_failed(steady_ms());
  return rdma() && code == Code::kClosed ? Code::kConnectionLost : code;
}

void Moves::count_bytes(Counters& counters, std::atomic<uint64_t>* staged, const Move& move) {
  counters.add(rdma() ? Counter::kRdmaBytes : Counter::kShmBytes, move.size);
  if (rdma()) node_.rdma_moved(move.size);
  if (move.direct) counters.add(Counter::kRdmaDirectBytes, move.size);
  if (rdma() && !move.direct && staged != nullptr) staged->fetch_add(move.size, std::memory_order_relaxed);
}

int Moves::wait_for(std::vector<int>& fds) {
  if (!rdma()) return -1;
  if (session_.idle() && session_.stale()) opener_.link()->close();  // the node is gone: no more answers
  return opener_.link()->wait_for(fds);
}

void Moves::launch_sums() {
  std::vector<DeviceSlice> slices;
  std::vector<uint32_t> blocks;
  for (const size_t i : summed_) {
    const Move& move = moves_[i];
    for (const Slice& slice : std::span(slices_).subspan(move.first_slice, move.slice_count))
      slices.push_back({reinterpret_cast<uint64_t>(slice.data), slice.size});
    blocks.push_back(static_cast<uint32_t>(move.slice_count));
  }
  sums_.start(*device_, slices, blocks);
}

bool Moves::sums_ready() {
  const auto sums = sums_.look();
  if (!sums) return false;
  for (size_t k = 0; k < summed_.size(); ++k) {
    Move& move = moves_[summed_[k]];
    if (*sums)
      move.sum = (**sums)[k];
    else
      move.code = Code::kTransportUnavailable;
  }
  return true;
}

}  // namespace mooncache
