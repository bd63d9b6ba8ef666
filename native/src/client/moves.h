// The bytes of some items between a node and the caller's slices, by a one-sided link, and their checksums
// where they lie in device memory.
#pragma once

#include <array>
#include <chrono>
#include <span>
#include <vector>

#include "client/buffer_book.h"
#include "client/counters.h"
#include "client/link_opener.h"
#include "transport/remote_extent.h"

namespace mooncache {

struct Move {
  uint32_t item = 0;
  RemoteExtent extent;
  uint64_t offset = 0;
  uint64_t size = 0;
  uint32_t crc = 0;  // expected (get), computed (put)
  Code code = Code::kOk;
  size_t first_slice = 0;
  size_t slice_count = 0;
  bool direct = false;  // between the node and the caller's own memory, without a copy
  uint32_t sum = 0;     // by the device, where the bytes are in its memory
};

class Moves {
 public:
  Moves(Node& node, Session& session, BufferBook& buffers, DeviceSums* device, uint64_t direct_slice_bytes);
  // A program that ends early leaves no transfer behind: the link, which lives on with its session, would
  // complete it into slices that are gone.
  ~Moves();
  Moves(const Moves&) = delete;
  Moves& operator=(const Moves&) = delete;

  LinkOpener& opener() { return opener_; }
  const LinkOpener& opener() const { return opener_; }
  bool rdma() const { return opener_.rdma(); }
  DeviceSums* device() const { return device_; }  // null: host memory

  void clear();
  // `slices` are taken as they are; a link only reads what it writes to the peer.
  void add(Move move, std::span<const Slice> slices);
  std::vector<Move>& all() { return moves_; }

  // Moving.
  void start(Direction direction);
  // Moves a bounded amount. `completed(move, completion)`: it ended. `refused(move)`: it was never begun, and
  // has a code. True: something moved, or all have ended.
  template <typename Completed, typename Refused>
  bool advance(const Completed& completed, const Refused& refused);
  bool ended() const { return open_ == 0 && next_ == moves_.size(); }
  // What a transfer's end means to the call.
  Code outcome(Code code);
  void count_bytes(Counters& counters, std::atomic<uint64_t>* staged, const Move& move);
  // As Program::wait_for.
  int wait_for(std::vector<int>& fds);

  // Checksums.
  // Asks the device for those of all moves that are well and have `wanted`. Kernels of a device run in the
  // order of their launch, and the caller's own come after those whose end was seen here. False: there is
  // none.
  template <typename Wanted>
  bool start_sums(const Wanted& wanted) {
    summed_.clear();
    for (size_t i = 0; i < moves_.size(); ++i) {
      if (moves_[i].code == Code::kOk && moves_[i].size > 0 && wanted(moves_[i])) summed_.push_back(i);
    }
    if (!summed_.empty()) launch_sums();
    return !summed_.empty();
  }
  // True: they are there, in `sum`, or the move has a code; those that were asked for are summed().
  bool sums_ready();
  const std::vector<size_t>& summed() const { return summed_; }
  int sums_patience_ms() const { return sums_.patience_ms(); }

 private:
  // Copying between two looks at the cancel token, after which other threads may have the processor.
  static constexpr auto kCopySpan = std::chrono::microseconds(500);

  enum class Begun : uint8_t { kBegun, kRefused, kFull };
  Begun begin_next();
  std::span<const RegionHandle> regions_of(const Move& move);
  void launch_sums();

  Node& node_;
  Session& session_;
  BufferBook& buffers_;
  DeviceSums* const device_;
  const uint64_t direct_slice_bytes_;
  LinkOpener opener_;
  Direction direction_ = Direction::kRead;
  std::vector<Move> moves_;
  std::vector<Slice> slices_;
  std::vector<RegionHandle> regions_;  // of the move that begins
  size_t next_ = 0;                    // moves before this one were begun or refused
  size_t open_ = 0;                    // begun, not ended
  uint64_t together_ = 0;              // bytes of all
  std::vector<size_t> summed_;         // positions in moves_
  SumsUnderWay sums_;
};

template <typename Completed, typename Refused>
bool Moves::advance(const Completed& completed, const Refused& refused) {
  Link& link = *opener_.link();
  // A device moves bytes on its own: look what has landed, and do not wait for more here.
  const Deadline until = rdma() ? Deadline::after_ms(0) : Deadline::after(kCopySpan);
  const uint64_t landed_before = link.bytes_moved();
  std::array<Completion, 64> completions;
  for (;;) {
    while (next_ < moves_.size()) {
      const size_t position = next_;
      const Begun begun = begin_next();
      if (begun == Begun::kFull) break;
      if (begun == Begun::kRefused) refused(moves_[position]);
    }
    const size_t count = link.poll(completions, until);
    for (size_t i = 0; i < count; ++i) {
      --open_;
      completed(moves_[completions[i].id], completions[i]);
    }
    if (ended()) return true;
    if (rdma() && count == 0) return link.bytes_moved() != landed_before;
    if (until.expired()) return true;
  }
}

}  // namespace mooncache
