#include "gpu/device.h"

#include <unistd.h>

#include <atomic>
#include <cstring>

#include "mooncache/crc32c.h"

namespace mooncache {
namespace gpu {
namespace {

constexpr size_t kSlotsMax = 64;
constexpr uint64_t kQuarantineBytesMax = 1ull
                                         << 30;  // beyond it nothing more is pinned for a device that hangs
constexpr int kPartingMs = 200;                  // that a device which goes waits for its last copies
constexpr int kTrialMs = 5000;

}  // namespace

struct Synchronizer::State {
  struct Wait {
    std::atomic<bool> done = false;
    Status status;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Wait>> waits;
  bool stopped = false;
  std::atomic<bool> ended = false;

  void run(const Driver& driver, CuHandle context) {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stopped || !waits.empty(); });
      if (stopped) break;
      const auto mine = std::exchange(waits, {});
      lock.unlock();
      {
        const Current current(driver, context);
        Status status = current.status();
        if (status) status = driver.check(driver.context_synchronize(), "cuCtxSynchronize");
        for (const auto& wait : mine) {
          wait->status = status;
          wait->done.store(true, std::memory_order_release);
        }
      }
      lock.lock();
    }
    lock.unlock();
    ended.store(true, std::memory_order_release);
  }
};

Status Synchronizer::wait(CuHandle context, Deadline deadline) {
  std::shared_ptr<State> state;
  {
    const std::lock_guard lock(mutex_);
    if (!state_) {
      auto made = std::make_shared<State>();
      std::thread([made, &driver = driver_, context] { made->run(driver, context); }).detach();
      state_ = std::move(made);  // only with a thread: it may not be had
    }
    state = state_;
  }
  const auto own = std::make_shared<State::Wait>();
  {
    const std::lock_guard lock(state->mutex);
    state->waits.push_back(own);
  }
  state->changed.notify_one();
  if (until([&] { return own->done.load(std::memory_order_acquire); }, deadline)) return own->status;
  return {Code::kDeadlineExceeded, "the device was not through with its work in time"};
}

bool Synchronizer::stop() {
  const std::lock_guard outer(mutex_);
  if (!state_) return true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopped = true;
  }
  state_->changed.notify_one();
  const auto state = std::exchange(state_, nullptr);
  return until([&] { return state->ended.load(std::memory_order_acquire); }, Deadline::after_ms(kPartingMs));
}

CudaDevice::~CudaDevice() {
  if (context == nullptr) return;
  const bool idle = synchronizer_.stop();
  const bool all = until(
      [&] {
        sweep();
        return quarantine_.empty();
      },
      Deadline::after_ms(kPartingMs));
  if (!all || !idle) return;  // memory that the device may still touch outlives us, and so does the context
  if (constants != 0 || module_ != nullptr) {
    (void)in_context([&] {
      if (constants != 0) (void)driver.mem_free(constants);
      if (module_ != nullptr) (void)driver.module_unload(module_);
      return Status::ok();
    });
  }
  (void)driver.primary_release(device_);
}

Status CudaDevice::start(const std::string& nvrtc) {
  if (Status s = driver.check(driver.primary_retain(&context, device_), "cuDevicePrimaryCtxRetain"); !s) {
    context = nullptr;
    return s;
  }
  char text[128] = "";
  if (driver.device_get_name(text, sizeof text - 1, device_) == 0) name_ = text;
  if (driver.device_pci_address != nullptr && driver.device_pci_address(text, sizeof text - 1, device_) == 0)
    pci_address_ = text;
  Status s = load_kernel(nvrtc);
  if (s) s = try_kernel();
  if (!s) kernel = nullptr;
  why_no_kernel = s.message;
  return Status::ok();
}

Status CudaDevice::load_kernel(const std::string& nvrtc) {
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
    status = driver.check(driver.mem_alloc(&constants, sizeof gather_constants()), "cuMemAlloc");
    if (!status) return status;
    return driver.check(driver.module_function(&kernel, module_, "gather_crc"), "cuModuleGetFunction");
  });
}

// Moves bytes of a buffer within it, aligned and odd ones: a kernel that this device gets wrong is not used.
Status CudaDevice::try_kernel() {
  constexpr size_t kHalf = 32 << 10;
  const auto& table = gather_constants();
  auto made = make_stager(2 * kHalf, 1);
  if (!made) return made.status();
  GpuStager& stager = **made;
  std::byte* packed = stager.slot(0).data;
  std::byte* source = packed + kHalf;
  std::memcpy(packed, table.data(), sizeof table);
  const DeviceSlice tables[] = {{constants, sizeof table}};
  const uint32_t one[] = {1};
  const CuHandle found = std::exchange(kernel, nullptr);  // it cannot bring its own tables
  Status s = stager.start_in(0, tables, one);
  if (s) s = stager.wait(0, Deadline::after_ms(kTrialMs)).status();
  kernel = found;
  if (!s) return s;
  for (size_t i = 0; i < kHalf; ++i) source[i] = static_cast<std::byte>(i * 37 + (i >> 7));
  const auto at = reinterpret_cast<uint64_t>(source);
  const DeviceSlice slices[] = {{at, 20'000}, {at + 20'001, 1'003}, {at + 24'000, 4'096}};
  const uint32_t blocks[] = {2, 1};
  s = stager.start_out(0, slices, blocks);
  if (!s) return s;
  const auto crcs = stager.wait(0, Deadline::after_ms(kTrialMs));
  if (!crcs) return crcs.status();
  std::vector<std::byte> expected(source, source + 20'000);
  expected.insert(expected.end(), source + 20'001, source + 21'004);
  const std::span last(source + 24'000, 4'096);
  const std::vector<uint32_t> sums = {crc32c(expected), crc32c(last)};
  expected.insert(expected.end(), last.begin(), last.end());
  if (*crcs != sums || std::memcmp(packed, expected.data(), expected.size()) != 0)
    return {Code::kTransportUnavailable, "the kernel moved wrong bytes in its trial"};
  s = stager.start_crc(0, slices, blocks);
  if (!s) return s;
  const auto again = stager.wait(0, Deadline::after_ms(kTrialMs));
  if (!again) return again.status();
  if (*again != sums || std::memcmp(packed, expected.data(), expected.size()) != 0)
    return {Code::kTransportUnavailable, "the kernel's checksums were wrong in its trial"};
  return Status::ok();
}

Result<std::unique_ptr<GpuStager>> CudaDevice::make_stager(uint64_t slot_bytes, size_t count) {
  if (slot_bytes == 0 || slot_bytes > (4ull << 30) || count == 0 || count > kSlotsMax)
    return {Code::kInvalidArgument, "a stager has 1 to 64 buffers of at most 4 GiB"};
  if (const uint64_t held = quarantined_bytes(); held > kQuarantineBytesMax)
    return {Code::kBackPressure, "the device has not ended copies of " + std::to_string(held) +
                                     " bytes of pinned memory that were given up"};
  return open_stager(shared_from_this(), slot_bytes, count);
}

bool CudaDevice::empty(const StagerSlot& slot, Status* failed) {
  bool is = false;
  const Status status = in_context([&] {
    const CuResult code = driver.stream_query(slot.stream);
    is = code == 0;
    return code == kNotReady ? Status::ok() : driver.check(code, "cuStreamQuery");
  });
  if (failed != nullptr) *failed = status;
  return is;
}

void CudaDevice::give_up(StagerSlot slot) {
  if (slot.busy && !empty(slot)) {
    const std::lock_guard lock(quarantine_mutex_);
    quarantine_.push_back(std::move(slot));
    return;
  }
  free(slot);
}

void CudaDevice::free(StagerSlot& slot) {
  (void)in_context([&] {
    if (slot.stream != nullptr) (void)driver.stream_destroy(slot.stream);
    if (slot.memory != nullptr) (void)driver.host_free(slot.memory);
    if (slot.book != nullptr) (void)driver.host_free(slot.book);
    if (slot.sums != 0) (void)driver.mem_free(slot.sums);
    return Status::ok();
  });
}

void CudaDevice::sweep() {
  const std::lock_guard lock(quarantine_mutex_);
  std::erase_if(quarantine_, [this](StagerSlot& slot) {
    if (!empty(slot)) return false;
    free(slot);
    return true;
  });
}

uint64_t CudaDevice::quarantined_bytes() {
  sweep();
  const std::lock_guard lock(quarantine_mutex_);
  uint64_t sum = 0;
  for (const StagerSlot& slot : quarantine_) sum += slot.bytes;
  return sum;
}

Result<uint64_t> CudaDevice::allocate(uint64_t size) {
  CuPointer memory = 0;
  const Status status =
      in_context([&] { return driver.check(driver.mem_alloc(&memory, size), "cuMemAlloc"); });
  return status ? Result<uint64_t>(memory) : Result<uint64_t>(status);
}

Status CudaDevice::release(uint64_t address) {
  return in_context([&] { return driver.check(driver.mem_free(address), "cuMemFree"); });
}

Result<GpuIpcHandle> CudaDevice::share(DeviceSlice slice) {
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

Result<uint64_t> CudaDevice::attach(const GpuIpcHandle& handle) {
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

Status CudaDevice::detach(uint64_t address) {
  return in_context([&] {
    CuPointer base = 0;
    size_t size = 0;
    Status s = driver.check(driver.address_range(&base, &size, address), "cuMemGetAddressRange");
    return s ? driver.check(driver.ipc_close(base), "cuIpcCloseMemHandle") : s;
  });
}

Result<DmaBuf> CudaDevice::export_dma_buf(DeviceSlice slice) {
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
    if (driver.pointer_set_attribute != nullptr) {
      const unsigned on = 1;  // memory of a pool has no such attribute: who exports it orders its own copies
      (void)driver.pointer_set_attribute(&on, kPointerSyncMemops, base);
    }
    const uint64_t end = (slice.address + slice.size + page - 1) / page * page;
    return driver.check(driver.dma_buf(&fd, begin, end - begin, kHandleDmaBuf, 0),
                        "cuMemGetHandleForAddressRange");
  });
  if (!status) return status;
  return DmaBuf{fd, slice.address - begin, slice.size};
}

Status CudaDevice::flush_writes() {
  if (driver.flush_rdma_writes == nullptr) return Status::ok();
  return in_context([&] {
    const CuResult code = driver.flush_rdma_writes(kFlushCurrentContext, kFlushToOwner);
    return code == kNotSupported ? Status::ok() : driver.check(code, "cuFlushGPUDirectRDMAWrites");
  });
}

// The allocation that the whole slice lies in. INVALID_ARGUMENT: it reaches beyond.
Status CudaDevice::find_base(DeviceSlice slice, CuPointer& base) const {
  size_t size = 0;
  Status s = driver.check(driver.address_range(&base, &size, slice.address), "cuMemGetAddressRange");
  if (s && (slice.size > size || slice.address - base > size - slice.size))
    s = Status{Code::kInvalidArgument, "the slice reaches beyond its allocation"};
  return s;
}

}  // namespace gpu

Result<std::shared_ptr<GpuDevice>> GpuDevice::open(int ordinal, const GpuLibraries& libraries) {
  const auto driver = gpu::load_driver(libraries.driver);
  if (!driver) return driver.status();
  int number = 0;
  Status status = (*driver)->check((*driver)->device_get(&number, ordinal), "cuDeviceGet");
  if (!status) return status;
  auto device = std::make_shared<gpu::CudaDevice>(**driver, number);
  status = device->start(libraries.nvrtc);
  if (!status) return status;
  return std::shared_ptr<GpuDevice>(std::move(device));
}

}  // namespace mooncache
