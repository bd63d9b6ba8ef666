// GPU memory: copies between device memory and pinned host memory, many small slices in one launch with their
// CRC-32C, handles for other processes and for RDMA devices. All of CUDA is opened at run time; without it
// GpuDevice::open says why, and everything else works.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"

namespace mooncache {

struct GpuLibraries {
  std::string driver;  // "" = libcuda.so.1
  std::string nvrtc;   // "" = the libnvrtc that is found; only for kernels
};

// Device memory: an address of the GPU, never to be read by the processor.
struct DeviceSlice {
  uint64_t address = 0;  // 0: a gap, so many bytes of the packed side are left out (and out of the CRC)
  uint64_t size = 0;
};

// A range of device memory as a file descriptor, for ibv_reg_dmabuf_mr(fd, offset, length).
struct DmaBuf {
  int fd = -1;  // the caller closes it
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct GpuIpcHandle {
  std::array<std::byte, 64> bytes{};
  uint64_t offset = 0;  // of the slice inside the allocation that the handle names
};

// Two or more pinned buffers, each with a copy stream of its own: while one is on its way to the network,
// another one is filled. Not thread-safe.
//
// The invariant: a buffer may be touched by the device from start_out() or start_in() until wait() returned
// anything but DEADLINE_EXCEEDED or an error of the device, and never afterwards. A stager that goes earlier
// leaves such buffers to the device's quarantine: they are freed when their copies are through, or never.
// The slices' own memory is the caller's: after a wait() that failed, settled() says when it is free again.
class GpuStager {
 public:
  virtual ~GpuStager() = default;
  virtual size_t slots() const = 0;
  virtual Slice slot(size_t number) const = 0;  // pinned host memory
  // What is started next in the slot begins behind this CUDA event (a CUevent of the device's primary
  // context).
  virtual Status follow(size_t number, uint64_t event) = 0;
  // Copies slices one behind the other into the slot's first bytes, or out of them. All in one launch, and
  // wait() tells the CRC-32C of each of `blocks` (slice counts per block); without a kernel copy by copy.
  // Without `crc` slices that are long enough for the copy engines are left to them.
  virtual Status start_out(size_t number, std::span<const DeviceSlice> slices,
                           std::span<const uint32_t> blocks, bool crc = true) = 0;
  virtual Status start_in(size_t number, std::span<const DeviceSlice> slices,
                          std::span<const uint32_t> blocks, bool crc = true) = 0;
  // The CRC-32C of each of `blocks` where it lies; nothing is written but the sums. TRANSPORT_UNAVAILABLE:
  // there is no kernel, or more pieces than a launch takes.
  virtual Status start_crc(size_t number, std::span<const DeviceSlice> slices,
                           std::span<const uint32_t> blocks) = 0;
  // Until the slot's copies are through. The CRCs are those of the blocks, empty when they were not computed.
  // DEADLINE_EXCEEDED: the copies may still be under way; wait again, or let the stager go.
  virtual Result<std::vector<uint32_t>> wait(size_t number, Deadline deadline) = 0;
  // Whether the device has nothing more to do in the slot. Never waits.
  virtual bool settled(size_t number) = 0;
  // "one launch with CRC-32C", or "copies, because …".
  virtual std::string how() const = 0;
};

// Bytes of pinned memory of a stager that only computes checksums.
inline constexpr uint64_t kNoPinnedBytes = 64;

class GpuDevice {
 public:
  // TRANSPORT_UNAVAILABLE with "CUDA unavailable, because …".
  static Result<std::shared_ptr<GpuDevice>> open(int ordinal, const GpuLibraries& libraries = {});
  virtual ~GpuDevice() = default;
  virtual std::string name() const = 0;
  // Of the PCI function, "0000:3B:00.0"; empty where the driver does not say.
  virtual std::string pci_address() const = 0;
  // Why this device computes no checksums; empty when it does.
  virtual std::string why_no_crc() const = 0;
  // Waits until everything that was enqueued on this device so far is through. DEADLINE_EXCEEDED: it is not.
  virtual Status synchronize(Deadline deadline) = 0;
  // BACK_PRESSURE: the device has not ended the copies of too many buffers that were given up.
  virtual Result<std::unique_ptr<GpuStager>> make_stager(uint64_t slot_bytes, size_t slots) = 0;
  // Of buffers that were given up while the device may still copy from or to them.
  virtual uint64_t quarantined_bytes() = 0;
  virtual Result<uint64_t> allocate(uint64_t size) = 0;
  virtual Status release(uint64_t address) = 0;
  virtual Result<GpuIpcHandle> share(DeviceSlice slice) = 0;
  virtual Result<uint64_t> attach(const GpuIpcHandle& handle) = 0;  // the slice's address in this process
  virtual Status detach(uint64_t address) = 0;                      // as attach() returned it
  // TRANSPORT_UNAVAILABLE when driver or device cannot; the memory must outlive the descriptor. From then on
  // the driver orders its own synchronous copies of the allocation before what other devices do to it.
  virtual Result<DmaBuf> export_dma_buf(DeviceSlice slice) = 0;
  // What other devices have written into this one's memory so far is seen by all work that begins later. OK
  // also where the driver has no call for it: such platforms order by themselves, or a checksum finds it.
  virtual Status flush_writes() = 0;
};

}  // namespace mooncache
