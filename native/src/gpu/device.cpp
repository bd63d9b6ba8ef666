// GpuDevice and GpuStager over the driver. Each call makes the device's primary context current for its own
// length, so that it works on any thread and leaves the caller's context (torch's, say) as it was.
#include <unistd.h>

#include <cstring>

#include "gpu/driver.h"
#include "gpu/gather.h"
#include "mooncache/gpu.h"

namespace mooncache {
namespace gpu {
namespace {

constexpr size_t kSlotsMax = 64;
constexpr size_t kBlocksMax = 65'536;  // per slot and launch

class Device;

class Current {
 public:
  Current(const Driver& driver, CuHandle context) : driver_(driver) {
    status_ = driver.check(driver.push(context), "cuCtxPushCurrent");
  }
  ~Current() {
    CuHandle old = nullptr;
    if (status_) (void)driver_.pop(&old);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const Status& status() const { return status_; }

 private:
  const Driver& driver_;
  Status status_;
};

class Device final : public GpuDevice, public std::enable_shared_from_this<Device> {
 public:
  Device(const Driver& table, int device) : driver(table), device_(device) {}
  ~Device() override {
    if (context == nullptr) return;
    if (module_ != nullptr) {
      const Current current(driver, context);
      if (current.status()) (void)driver.module_unload(module_);
    }
    (void)driver.primary_release(device_);
  }

  Status start(const std::string& nvrtc) {
    if (Status s = driver.check(driver.primary_retain(&context, device_), "cuDevicePrimaryCtxRetain"); !s) {
      context = nullptr;
      return s;
    }
    char text[128] = "";
    if (driver.device_get_name(text, sizeof text - 1, device_) == 0) name_ = text;
    why_no_kernel = load_kernel(nvrtc).message;
    return Status::ok();
  }

  std::string name() const override { return name_; }
  Status synchronize() override {
    return in_context([&] { return driver.check(driver.context_synchronize(), "cuCtxSynchronize"); });
  }
  Result<std::unique_ptr<GpuStager>> make_stager(uint64_t slot_bytes, size_t slots) override;

  Result<uint64_t> allocate(uint64_t size) override {
    CuPointer memory = 0;
    const Status status =
        in_context([&] { return driver.check(driver.mem_alloc(&memory, size), "cuMemAlloc"); });
    return status ? Result<uint64_t>(memory) : Result<uint64_t>(status);
  }
  Status release(uint64_t address) override {
    return in_context([&] { return driver.check(driver.mem_free(address), "cuMemFree"); });
  }

  Result<GpuIpcHandle> share(DeviceSlice slice) override {
    GpuIpcHandle out;
    CuIpcHandle handle{};
    const Status status = in_context([&] {
      CuPointer base = 0;
      if (Status s = find_base(slice, base); !s) return s;
      out.offset = slice.address - base;
      return driver.check(driver.ipc_get(&handle, base), "cuIpcGetMemHandle");
    });
    if (!status) return status;
    std::memcpy(out.bytes.data(), handle.bytes, sizeof handle.bytes);
    return out;
  }
  Result<uint64_t> attach(const GpuIpcHandle& handle) override {
    CuIpcHandle raw;
    std::memcpy(raw.bytes, handle.bytes.data(), sizeof raw.bytes);
    CuPointer base = 0;
    const Status status = in_context([&] {
      Status s = driver.check(driver.ipc_open(&base, raw, kIpcLazyPeerAccess), "cuIpcOpenMemHandle");
      if (!s) return s;
      CuPointer begin = 0;
      size_t size = 0;
      s = driver.check(driver.address_range(&begin, &size, base), "cuMemGetAddressRange");
      if (s && handle.offset >= size)  // the other process says where it is
        s = Status{Code::kInvalidArgument, "the offset lies beyond the allocation"};
      if (!s) (void)driver.ipc_close(base);
      return s;
    });
    return status ? Result<uint64_t>(base + handle.offset) : Result<uint64_t>(status);
  }
  Status detach(uint64_t address) override {
    return in_context([&] {
      CuPointer base = 0;
      size_t size = 0;
      Status s = driver.check(driver.address_range(&base, &size, address), "cuMemGetAddressRange");
      return s ? driver.check(driver.ipc_close(base), "cuIpcCloseMemHandle") : s;
    });
  }

  Result<DmaBuf> export_dma_buf(DeviceSlice slice) override {
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (driver.dma_buf == nullptr)
      return {Code::kTransportUnavailable, "dma-buf unavailable, because the driver is older than CUDA 11.7"};
    if (slice.size == 0) return {Code::kInvalidArgument, "no range of device memory"};
    // what the driver exports begins and ends at pages of the processor
    const uint64_t begin = slice.address / page * page;
    int fd = -1;
    const Status status = in_context([&] {
      CuPointer base = 0;
      if (Status s = find_base(slice, base); !s) return s;
      const uint64_t end = (slice.address + slice.size + page - 1) / page * page;
      return driver.check(driver.dma_buf(&fd, begin, end - begin, kHandleDmaBuf, 0),
                          "cuMemGetHandleForAddressRange");
    });
    if (!status) return status;
    return DmaBuf{fd, slice.address - begin, slice.size};
  }

  template <typename Work>
  Status in_context(Work work) {
    const Current current(driver, context);
    return current.status() ? work() : current.status();
  }

  const Driver& driver;
  CuHandle context = nullptr;
  CuHandle kernel = nullptr;  // null: copy by copy
  std::string why_no_kernel;

 private:
  // The allocation that the whole slice lies in. INVALID_ARGUMENT: it reaches beyond.
  Status find_base(DeviceSlice slice, CuPointer& base) const {
    size_t size = 0;
    Status s = driver.check(driver.address_range(&base, &size, slice.address), "cuMemGetAddressRange");
    if (s && (slice.size > size || slice.address - base > size - slice.size))
      s = Status{Code::kInvalidArgument, "the slice reaches beyond its allocation"};
    return s;
  }

  Status load_kernel(const std::string& nvrtc) {
    int major = 0, minor = 0;
    Status s =
        driver.check(driver.device_get_attribute(&major, kAttributeMajor, device_), "cuDeviceGetAttribute");
    if (s)
      s = driver.check(driver.device_get_attribute(&minor, kAttributeMinor, device_), "cuDeviceGetAttribute");
    if (!s) return s;
    const auto text = compile_gather(nvrtc, major, minor);
    if (!text) return text.status();
    return in_context([&] {
      Status status = driver.check(driver.module_load(&module_, text->c_str()), "cuModuleLoadData");
      if (!status) return status;
      return driver.check(driver.module_function(&kernel, module_, "gather_crc"), "cuModuleGetFunction");
    });
  }

  const int device_;
  std::string name_ = "unknown";
  CuHandle module_ = nullptr;
};

struct Slot {
  CuHandle stream = nullptr;
  std::byte* memory = nullptr;  // pinned
  std::byte* book = nullptr;    // pinned: pieces, then sums
  CuPointer sums = 0;           // on the device: not every bus has atomic operations on host memory
  std::vector<uint64_t> sizes;  // of the blocks whose CRCs are on their way
  Status failed;                // of what was enqueued
  bool busy = false;
};

class Stager final : public GpuStager {
 public:
  Stager(std::shared_ptr<Device> device, uint64_t slot_bytes)
      : device_(std::move(device)), d_(device_->driver), bytes_(slot_bytes) {}

  ~Stager() override {
    (void)device_->in_context([&] {
      for (Slot& slot : slots_) {
        if (slot.stream != nullptr) {
          (void)d_.stream_synchronize(slot.stream);  // before its memory goes
          (void)d_.stream_destroy(slot.stream);
        }
        if (slot.memory != nullptr) (void)d_.host_free(slot.memory);
        if (slot.book != nullptr) (void)d_.host_free(slot.book);
        if (slot.sums != 0) (void)d_.mem_free(slot.sums);
      }
      if (constants_ != 0) (void)d_.mem_free(constants_);
      return Status::ok();
    });
  }

  Status start(size_t count) {
    return device_->in_context([&] {
      pieces_max_ = bytes_ / kPieceBytes + kBlocksMax;
      for (size_t i = 0; i < count; ++i) {
        if (Status s = make(slots_.emplace_back()); !s) return s;
      }
      if (device_->kernel == nullptr) return Status::ok();
      const auto& constants = gather_constants();
      Status s = d_.check(d_.mem_alloc(&constants_, sizeof constants), "cuMemAlloc");
      if (s)
        s = d_.check(d_.copy_in(constants_, constants.data(), sizeof constants, slots_[0].stream),
                     "the copy");
      if (s) s = d_.check(d_.stream_synchronize(slots_[0].stream), "cuStreamSynchronize");
      return s;
    });
  }

  size_t slots() const override { return slots_.size(); }
  Slice slot(size_t number) const override { return {slots_.at(number).memory, bytes_}; }
  std::string how() const override {
    return device_->kernel != nullptr ? "one launch with CRC-32C"
                                      : "copies, because " + device_->why_no_kernel;
  }
  Status start_out(size_t number, std::span<const DeviceSlice> slices,
                   std::span<const uint32_t> blocks) override {
    return begin(number, slices, blocks, false);
  }
  Status start_in(size_t number, std::span<const DeviceSlice> slices,
                  std::span<const uint32_t> blocks) override {
    return begin(number, slices, blocks, true);
  }

  Result<std::vector<uint32_t>> wait(size_t number) override {
    Slot& slot = slots_.at(number);
    const Status synced = device_->in_context(
        [&] { return d_.check(d_.stream_synchronize(slot.stream), "cuStreamSynchronize"); });
    slot.busy = false;
    const Status failed = std::exchange(slot.failed, Status::ok());
    if (!failed) return failed;
    if (!synced) return synced;
    std::vector<uint32_t> crcs(slot.sizes.size());
    for (size_t i = 0; i < crcs.size(); ++i) {
      uint32_t sum = 0;
      std::memcpy(&sum, sums_of(slot) + i * sizeof sum, sizeof sum);
      crcs[i] = finish_crc(sum, slot.sizes[i]);
    }
    return crcs;
  }

 private:
  Status make(Slot& slot) {
    void* memory = nullptr;
    Status s = d_.check(d_.stream_create(&slot.stream, kStreamNonBlocking), "cuStreamCreate");
    if (s)
      s = d_.check(d_.host_alloc(&memory, bytes_, kHostAllocPortable | kHostAllocMapped), "cuMemHostAlloc");
    slot.memory = static_cast<std::byte*>(memory);
    if (!s || device_->kernel == nullptr) return s;
    memory = nullptr;
    const size_t book = pieces_max_ * sizeof(Piece) + kBlocksMax * sizeof(uint32_t);
    s = d_.check(d_.host_alloc(&memory, book, kHostAllocPortable | kHostAllocMapped), "cuMemHostAlloc");
    slot.book = static_cast<std::byte*>(memory);
    if (s) s = d_.check(d_.mem_alloc(&slot.sums, kBlocksMax * sizeof(uint32_t)), "cuMemAlloc");
    return s;
  }

  std::byte* sums_of(const Slot& slot) const { return slot.book + pieces_max_ * sizeof(Piece); }

  Status begin(size_t number, std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks,
               bool into) {
    Slot& slot = slots_.at(number);
    if (slot.busy) return {Code::kInvalidArgument, "the staging buffer is in use: wait() for it first"};
    uint64_t left = bytes_;
    for (const DeviceSlice& slice : slices) {  // before they are cut: that many pieces fit into memory
      if (slice.size > left) return {Code::kInvalidArgument, "the slices do not fit into the staging buffer"};
      left -= slice.size;
    }
    const auto packed = reinterpret_cast<uint64_t>(slot.memory);
    auto pieces = cut(slices, blocks, packed, into);
    if (!pieces) return pieces.status();
    slot.busy = true;
    slot.sizes.clear();
    const bool launch = device_->kernel != nullptr && pieces->size() <= pieces_max_ &&
                        blocks.size() <= kBlocksMax && !pieces->empty();
    slot.failed = device_->in_context([&] {
      return launch ? enqueue_kernel(slot, *pieces, blocks.size()) : enqueue_copies(slot, slices, into);
    });
    return slot.failed;
  }

  Status enqueue_copies(Slot& slot, std::span<const DeviceSlice> slices, bool into) {
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

  Status enqueue_kernel(Slot& slot, std::span<const Piece> pieces, size_t blocks) {
    std::memcpy(slot.book, pieces.data(), pieces.size_bytes());
    std::memset(sums_of(slot), 0, blocks * sizeof(uint32_t));
    const size_t sums_bytes = blocks * sizeof(uint32_t);
    if (Status s =
            d_.check(d_.copy_in(slot.sums, sums_of(slot), sums_bytes, slot.stream), "cuMemcpyHtoDAsync");
        !s)
      return s;
    auto book = reinterpret_cast<uint64_t>(slot.book);
    auto count = static_cast<uint32_t>(pieces.size());
    void* arguments[] = {&book, &count, &constants_, &slot.sums};
    const uint32_t grid = (count + kWarpsPerBlock - 1) / kWarpsPerBlock;
    Status s = d_.check(
        d_.launch(device_->kernel, grid, 1, 1, kWarpsPerBlock * 32, 1, 1, 0, slot.stream, arguments, nullptr),
        "cuLaunchKernel");
    if (s) s = d_.check(d_.copy_out(sums_of(slot), slot.sums, sums_bytes, slot.stream), "cuMemcpyDtoHAsync");
    if (!s) return s;
    slot.sizes.assign(blocks, 0);
    for (const Piece& piece : pieces) slot.sizes[piece.block] += piece.size;
    return s;
  }

  const std::shared_ptr<Device> device_;
  const Driver& d_;
  const uint64_t bytes_;
  size_t pieces_max_ = 0;
  CuPointer constants_ = 0;
  std::vector<Slot> slots_;
};

Result<std::unique_ptr<GpuStager>> Device::make_stager(uint64_t slot_bytes, size_t count) {
  if (slot_bytes == 0 || slot_bytes > (4ull << 30) || count == 0 || count > kSlotsMax)
    return {Code::kInvalidArgument, "a stager has 1 to 64 buffers of at most 4 GiB"};
  auto stager = std::make_unique<Stager>(shared_from_this(), slot_bytes);
  if (Status status = stager->start(count); !status) return status;
  return std::unique_ptr<GpuStager>(std::move(stager));
}

}  // namespace
}  // namespace gpu

Result<std::shared_ptr<GpuDevice>> GpuDevice::open(int ordinal, const GpuLibraries& libraries) {
  const auto driver = gpu::load_driver(libraries.driver);
  if (!driver) return driver.status();
  int number = 0;
  Status status = (*driver)->check((*driver)->device_get(&number, ordinal), "cuDeviceGet");
  if (!status) return status;
  auto device = std::make_shared<gpu::Device>(**driver, number);
  status = device->start(libraries.nvrtc);
  if (!status) return status;
  return std::shared_ptr<GpuDevice>(std::move(device));
}

}  // namespace mooncache
