// GpuStager over the driver: each slot is a stream with nothing but the slot's work on it, so an empty stream
// is a buffer that is no longer touched.
#include <cstring>

#include "gpu/device.h"

namespace mooncache::gpu {
namespace {

constexpr uint64_t kCopyEngineBytes = 1
                                      << 20;  // slices of so many bytes on average lose nothing copy by copy

class Stager final : public GpuStager {
 public:
  Stager(std::shared_ptr<CudaDevice> device, uint64_t slot_bytes)
      : device_(std::move(device)), d_(device_->driver), bytes_(slot_bytes) {}
  ~Stager() override {
    for (StagerSlot& slot : slots_) device_->give_up(std::move(slot));
  }

  Status start(size_t count) {
    return device_->in_context([&] {
      pieces_max_ = bytes_ / kPieceBytes + kBlocksMax;
      for (size_t i = 0; i < count; ++i) {
        if (Status s = make(slots_.emplace_back()); !s) return s;
      }
      return Status::ok();
    });
  }

  size_t slots() const override { return slots_.size(); }
  Slice slot(size_t number) const override { return {slots_.at(number).memory, bytes_}; }
  std::string how() const override {
    return device_->kernel != nullptr ? "one launch with CRC-32C"
                                      : "copies, because " + device_->why_no_kernel;
  }

  Status follow(size_t number, uint64_t event) override {
    StagerSlot& slot = slots_.at(number);
    return device_->in_context([&] {
      return d_.check(d_.stream_wait_event(slot.stream, reinterpret_cast<CuHandle>(event), 0),
                      "cuStreamWaitEvent");
    });
  }
  Status start_out(size_t number, std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks,
                   bool crc) override {
    return begin(number, slices, blocks, false, crc);
  }
  Status start_in(size_t number, std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks,
                  bool crc) override {
    return begin(number, slices, blocks, true, crc);
  }

  Status start_crc(size_t number, std::span<const DeviceSlice> slices,
                   std::span<const uint32_t> blocks) override {
    StagerSlot& slot = slots_.at(number);
    if (slot.busy) return {Code::kInvalidArgument, "the slot is in use: wait() for it first"};
    if (device_->kernel == nullptr || slot.book == nullptr)
      return {Code::kTransportUnavailable, "no checksums on the device: " + device_->why_no_kernel};
    auto pieces = cut(slices, blocks, 0, false);
    if (!pieces) return pieces.status();
    if (pieces->empty() || pieces->size() > pieces_max_ || blocks.size() > kBlocksMax)
      return {Code::kTransportUnavailable, "nothing, or more than one launch takes"};
    for (GatherPiece& piece : *pieces) piece.to = 0;
    slot.busy = true;  // also when it fails: some of it may be under way
    slot.failed = device_->in_context([&] { return enqueue_kernel(slot, *pieces, blocks.size()); });
    return slot.failed;
  }

  Result<std::vector<uint32_t>> wait(size_t number, Deadline deadline) override {
    StagerSlot& slot = slots_.at(number);
    Status asked;
    const bool ended = until([&] { return device_->empty(slot, &asked) || !asked; }, deadline);
    if (!ended)
      return {Code::kDeadlineExceeded, "the device did not end the copies of a staging buffer in time"};
    if (!asked) return asked;
    slot.busy = false;
    const Status failed = std::exchange(slot.failed, Status::ok());
    if (!failed) return failed;
    std::vector<uint32_t> crcs(slot.sizes.size());
    for (size_t i = 0; i < crcs.size(); ++i) {
      uint32_t sum = 0;
      std::memcpy(&sum, sums_of(slot) + i * sizeof sum, sizeof sum);
      crcs[i] = finish_crc(sum, slot.sizes[i]);
    }
    return crcs;
  }

  bool settled(size_t number) override {
    const StagerSlot& slot = slots_.at(number);
    return !slot.busy || device_->empty(slot);
  }

 private:
  Status make(StagerSlot& slot) {
    void* memory = nullptr;
    Status s = d_.check(d_.stream_create(&slot.stream, kStreamNonBlocking), "cuStreamCreate");
    if (s)
      s = d_.check(d_.host_alloc(&memory, bytes_, kHostAllocPortable | kHostAllocMapped), "cuMemHostAlloc");
    slot.memory = static_cast<std::byte*>(memory);
    slot.bytes = bytes_;
    if (!s || device_->kernel == nullptr) return s;
    memory = nullptr;
    const size_t book = pieces_max_ * sizeof(GatherPiece) + kBlocksMax * sizeof(uint32_t);
    s = d_.check(d_.host_alloc(&memory, book, kHostAllocPortable | kHostAllocMapped), "cuMemHostAlloc");
    slot.book = static_cast<std::byte*>(memory);
    if (s) s = d_.check(d_.mem_alloc(&slot.sums, kBlocksMax * sizeof(uint32_t)), "cuMemAlloc");
    return s;
  }

  std::byte* sums_of(const StagerSlot& slot) const { return slot.book + pieces_max_ * sizeof(GatherPiece); }

  Status begin(size_t number, std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks,
               bool into, bool crc) {
    StagerSlot& slot = slots_.at(number);
    if (slot.busy) return {Code::kInvalidArgument, "the staging buffer is in use: wait() for it first"};
    uint64_t left = bytes_;
    for (const DeviceSlice& slice : slices) {  // before they are cut: that many pieces fit into memory
      if (slice.size > left) return {Code::kInvalidArgument, "the slices do not fit into the staging buffer"};
      left -= slice.size;
    }
    const auto packed = reinterpret_cast<uint64_t>(slot.memory);
    auto pieces = cut(slices, blocks, packed, into);
    if (!pieces) return pieces.status();
    slot.busy = true;  // also when it fails: some of it may be under way
    slot.sizes.clear();
    const bool by_engine = !crc && (bytes_ - left) / kCopyEngineBytes >= slices.size();
    const bool launch = device_->kernel != nullptr && slot.book != nullptr && !by_engine &&
                        pieces->size() <= pieces_max_ && blocks.size() <= kBlocksMax && !pieces->empty();
    slot.failed = device_->in_context([&] {
      return launch ? enqueue_kernel(slot, *pieces, blocks.size()) : enqueue_copies(slot, slices, into);
    });
    return slot.failed;
  }

  Status enqueue_copies(StagerSlot& slot, std::span<const DeviceSlice> slices, bool into) {
    std::byte* at = slot.memory;
    for (const DeviceSlice& slice : slices) {
      if (slice.size == 0 || slice.address == 0) {
        at += slice.size;
        continue;
      }
      const CuResult code = into ? d_.copy_in(slice.address, at, slice.size, slot.stream)
                                 : d_.copy_out(at, slice.address, slice.size, slot.stream);
      if (Status s = d_.check(code, into ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync"); !s) return s;
      at += slice.size;
    }
    return Status::ok();
  }

  Status enqueue_kernel(StagerSlot& slot, std::span<const GatherPiece> pieces, size_t blocks) {
    std::memcpy(slot.book, pieces.data(), pieces.size_bytes());
    std::memset(sums_of(slot), 0, blocks * sizeof(uint32_t));
    const size_t sums_bytes = blocks * sizeof(uint32_t);
    if (Status s =
            d_.check(d_.copy_in(slot.sums, sums_of(slot), sums_bytes, slot.stream), "cuMemcpyHtoDAsync");
        !s)
      return s;
    auto book = reinterpret_cast<uint64_t>(slot.book);
    auto count = static_cast<uint32_t>(pieces.size());
    void* arguments[] = {&book, &count, &device_->constants, &slot.sums};
    const uint32_t grid = (count + kWarpsPerBlock - 1) / kWarpsPerBlock;
    Status s = d_.check(
        d_.launch(device_->kernel, grid, 1, 1, kWarpsPerBlock * 32, 1, 1, 0, slot.stream, arguments, nullptr),
        "cuLaunchKernel");
    if (s) s = d_.check(d_.copy_out(sums_of(slot), slot.sums, sums_bytes, slot.stream), "cuMemcpyDtoHAsync");
    if (!s) return s;
    slot.sizes.assign(blocks, 0);
    for (const GatherPiece& piece : pieces) slot.sizes[piece.block] += piece.size;
    return s;
  }

  const std::shared_ptr<CudaDevice> device_;
  const Driver& d_;
  const uint64_t bytes_;
  size_t pieces_max_ = 0;
  std::vector<StagerSlot> slots_;
};

}  // namespace

Result<std::unique_ptr<GpuStager>> open_stager(std::shared_ptr<CudaDevice> device, uint64_t slot_bytes,
                                               size_t count) {
  auto stager = std::make_unique<Stager>(std::move(device), slot_bytes);
  if (Status status = stager->start(count); !status) return status;
  return std::unique_ptr<GpuStager>(std::move(stager));
}

}  // namespace mooncache::gpu
