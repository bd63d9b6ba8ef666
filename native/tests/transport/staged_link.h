// A link whose caller's memory is that of a (fake) GPU: what is written is gathered into pinned memory
// first, what is read is scattered afterwards. The suite's vectors are adopted by the fake driver, so
// that its tests stay as they are and only the driver touches their bytes.
//
// One transfer after the other: waiting, then (a write) on its way out of the device, then on the wire, then
// (a read) on its way into the device. What the suite asks of a link holds here too: after cancel() or
// close() not one byte moves, so these wait for the device, and poll() keeps its deadline whatever the device
// does.
#pragma once

#include <deque>

#include "gpu/fake_gpu.h"
#include "mooncache/gpu.h"
#include "mooncache/transport.h"

namespace mooncache::testing {

class StagedLink final : public Link {
 public:
  static constexpr size_t kQueue = 64;
  static constexpr uint64_t kSlotBytes = 33 << 20;

  StagedLink(std::unique_ptr<Link> wire, FakeGpu& gpu)
      : wire_(std::move(wire)), gpu_(gpu), stager_(std::move(*gpu.device->make_stager(kSlotBytes, 1))) {
    EXPECT_EQ(stager_->how(), "one launch with CRC-32C");
  }

  size_t submit(std::span<const Transfer> transfers) override {
    size_t taken = 0;
    for (const Transfer& transfer : transfers) {
      if (queue_.size() + done_.size() >= kQueue) break;
      Item item;
      item.transfer = transfer;
      for (const Slice& slice : transfer.local) {
        if (slice.size == 0) continue;
        item.slices.push_back({gpu_.adopt(slice.data, slice.size), slice.size});
        item.packed.size += slice.size;
      }
      item.packed.data = stager_->slot(0).data;
      queue_.push_back(std::move(item));
      ++taken;
    }
    return taken;
  }

  size_t poll(std::span<Completion> completions, Deadline deadline) override {
    while (done_.empty() && !queue_.empty() && step(deadline)) {
    }
    size_t count = 0;
    for (; count < completions.size() && !done_.empty(); ++count) {
      completions[count] = done_.front();
      done_.pop_front();
    }
    return count;
  }

  Status cancel(TransferId id) override {
    for (auto item = queue_.begin(); item != queue_.end(); ++item) {
      if (item->transfer.id != id) continue;
      if (item->state == State::kOnWire) {
        (void)wire_->cancel(id);
        Completion cancelled;
        while (wire_->poll(std::span(&cancelled, 1), Deadline::after_ms(100)) == 0) {
        }
      }
      quiet(*item);
      queue_.erase(item);
      done_.push_back({id, Code::kCancelled, 0, 0});
      return Status::ok();
    }
    return {Code::kNotFound, "there is no such transfer"};
  }

  void close() override {
    wire_->close();
    for (Item& item : queue_) {
      quiet(item);
      done_.push_back({item.transfer.id, Code::kClosed, 0, 0});
    }
    queue_.clear();
  }
  bool healthy() const override { return wire_->healthy(); }
  Session* session() override { return wire_->session(); }

 private:
  enum class State : uint8_t { kWaiting, kLeaving, kOnWire, kArriving };
  struct Item {
    Transfer transfer;
    std::vector<DeviceSlice> slices;
    Slice packed;
    State state = State::kWaiting;
    Completion wire;
    uint32_t crc = 0;
  };

  // One step of the first transfer; false: the deadline passed.
  bool step(Deadline deadline) {
    Item& item = queue_.front();
    switch (item.state) {
      case State::kWaiting:
        return item.transfer.direction == Direction::kWrite ? copy(item, State::kLeaving) : send(item);
      case State::kLeaving: {
        const auto crcs = stager_->wait(0, deadline);
        if (!crcs) return failed(item, crcs.status());
        item.crc = crcs->empty() ? 0 : crcs->front();
        return send(item);
      }
      case State::kOnWire:
        if (wire_->poll(std::span(&item.wire, 1), deadline) == 0) return false;
        if (item.transfer.direction == Direction::kRead && item.wire.code == Code::kOk &&
            item.packed.size != 0)
          return copy(item, State::kArriving);
        if (item.wire.code == Code::kOk && item.packed.size != 0 && item.wire.crc32c != item.crc)
          item.wire.code = Code::kChecksumMismatch;
        return finish(item.wire);
      case State::kArriving: {
        const auto crcs = stager_->wait(0, deadline);
        if (!crcs) return failed(item, crcs.status());
        if (crcs->front() != item.wire.crc32c) item.wire.code = Code::kChecksumMismatch;
        return finish(item.wire);
      }
    }
    return false;
  }

  bool copy(Item& item, State next) {
    if (item.packed.size == 0) return send(item);
    const auto count = static_cast<uint32_t>(item.slices.size());
    item.state = next;
    const Status status = next == State::kLeaving ? stager_->start_out(0, item.slices, std::span(&count, 1))
                                                  : stager_->start_in(0, item.slices, std::span(&count, 1));
    if (status) return true;
    quiet(item);
    return finish({item.transfer.id, status.code, 0, 0});
  }

  bool send(Item& item) {
    item.state = State::kOnWire;
    item.transfer.local =
        item.packed.size != 0 ? std::span<const Slice>(&item.packed, 1) : std::span<const Slice>();
    EXPECT_EQ(wire_->submit(std::span(&item.transfer, 1)), 1u);
    return true;
  }

  bool failed(const Item& item, const Status& status) {
    if (status.code == Code::kDeadlineExceeded) return false;
    quiet(item);  // the driver's answer is an error, its copies may go on
    return finish({item.transfer.id, status.code, 0, 0});
  }
  bool finish(Completion completion) {
    queue_.pop_front();
    done_.push_back(completion);
    return true;
  }
  void quiet(const Item& item) {
    if (item.state == State::kLeaving || item.state == State::kArriving)
      (void)stager_->wait(0, Deadline::after_ms(5000));
  }

  std::unique_ptr<Link> wire_;
  FakeGpu& gpu_;
  std::unique_ptr<GpuStager> stager_;
  std::deque<Item> queue_;
  std::deque<Completion> done_;
};

}  // namespace mooncache::testing
