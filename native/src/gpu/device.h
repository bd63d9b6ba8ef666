// The device behind GpuDevice, and what of it the stagers see: its context, its kernel, and the quarantine.
//
// Waiting: nothing here blocks in the driver. A wait asks the driver again and again until it says "through"
// or the deadline passed. What is still under way then stays where it is: a buffer goes back to the driver
// only when its stream has said that it is empty. Giving it back is the one call that may wait for
// other streams.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "gpu/driver.h"
#include "gpu/gather.h"
#include "mooncache/gpu.h"

namespace mooncache::gpu {

inline constexpr size_t kBlocksMax = 65'536;  // per slot and launch

// Asks until `done` says yes or the deadline passed: without a pause for as long as a full buffer takes on
// the bus, then after naps of a 32nd of the time that was spent, so that no wait is made much longer by its
// naps.
template <typename Done>
bool until(Done done, Deadline deadline) {
  using namespace std::chrono_literals;
  const auto begun = Deadline::Clock::now();
  for (;;) {
    if (done()) return true;
    const auto now = Deadline::Clock::now();
    if (now >= deadline.at) return false;
    const auto spent = now - begun;
    if (spent < 1ms) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Deadline::Clock::duration>({spent / 32, 1ms, deadline.at - now}));
    }
  }
}

// A pinned buffer, its copy stream, and what a launch needs.
struct StagerSlot {
  CuHandle stream = nullptr;
  std::byte* memory = nullptr;  // pinned
  std::byte* book = nullptr;    // pinned: pieces, then sums
  CuPointer sums = 0;           // on the device: not every bus has atomic operations on host memory
  uint64_t bytes = 0;           // of `memory`
  std::vector<uint64_t> sizes;  // of the blocks whose CRCs are on their way
  Status failed;                // of what was enqueued
  bool busy = false;            // the device may have work of it
};

// Makes a context current for its own length: it works on any thread and leaves the caller's context
// (torch's, say) as it was.
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

// cuCtxSynchronize has no limit and no question to ask instead: a thread waits in it, callers wait for the
// thread. It is started by the first call.
class Synchronizer {
 public:
  explicit Synchronizer(const Driver& driver) : driver_(driver) {}
  ~Synchronizer() { (void)stop(); }
  Synchronizer(const Synchronizer&) = delete;
  Synchronizer& operator=(const Synchronizer&) = delete;
  Status wait(CuHandle context, Deadline deadline);
  // False: the thread is still in the driver; it ends by itself, and the context has to live on.
  bool stop();

 private:
  struct State;
  const Driver& driver_;
  std::shared_ptr<State> state_;
  std::mutex mutex_;  // of the two above, and of starting
};

class CudaDevice final : public GpuDevice, public std::enable_shared_from_this<CudaDevice> {
 public:
  CudaDevice(const Driver& table, int device) : driver(table), synchronizer_(table), device_(device) {}
  ~CudaDevice() override;

  // Retains the context and tries the kernel out.
  Status start(const std::string& nvrtc);

  std::string name() const override { return name_; }
  std::string pci_address() const override { return pci_address_; }
  std::string why_no_crc() const override { return kernel != nullptr ? "" : why_no_kernel; }
  Status synchronize(Deadline deadline) override { return synchronizer_.wait(context, deadline); }
  Result<std::unique_ptr<GpuStager>> make_stager(uint64_t slot_bytes, size_t slots) override;
  Result<uint64_t> allocate(uint64_t size) override;
  Status release(uint64_t address) override;
  Result<GpuIpcHandle> share(DeviceSlice slice) override;
  Result<uint64_t> attach(const GpuIpcHandle& handle) override;
  Status detach(uint64_t address) override;
  Result<DmaBuf> export_dma_buf(DeviceSlice slice) override;
  Status flush_writes() override;
  uint64_t quarantined_bytes() override;

  template <typename Work>
  Status in_context(Work work) {
    const Current current(driver, context);
    return current.status() ? work() : current.status();
  }
  // Whether the slot's stream is empty. An error leaves the question open: what failed may be asked again.
  bool empty(const StagerSlot& slot, Status* failed = nullptr);
  // Gives the slot back to the driver, now or when its stream is empty.
  void give_up(StagerSlot slot);

  const Driver& driver;
  CuHandle context = nullptr;
  CuHandle kernel = nullptr;  // null: copy by copy
  CuPointer constants = 0;    // the kernel's
  std::string why_no_kernel;

 private:
  Status find_base(DeviceSlice slice, CuPointer& base) const;
  Status load_kernel(const std::string& nvrtc);
  Status try_kernel();
  void free(StagerSlot& slot);
  void sweep();

  Synchronizer synchronizer_;
  const int device_;
  std::string name_ = "unknown";
  std::string pci_address_;
  CuHandle module_ = nullptr;
  std::mutex quarantine_mutex_;
  std::vector<StagerSlot> quarantine_;
};

Result<std::unique_ptr<GpuStager>> open_stager(std::shared_ptr<CudaDevice> device, uint64_t slot_bytes,
                                               size_t count);

}  // namespace mooncache::gpu
