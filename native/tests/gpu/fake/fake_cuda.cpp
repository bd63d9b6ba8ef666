// A fake CUDA driver and NVRTC, opened by path. Its device memory lies at addresses that the processor
// cannot read, its work happens when somebody asks for the stream and not before, one piece for each
// question, a launch runs the kernel's own source, each function can be told to fail, and the whole device
// can be told to hang.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr unsigned long long kDeviceBit = 1ull << 62;
std::mutex mutex;
std::string fail_name;
int fail_code = 0;
int fail_after = 0;
std::map<unsigned long long, size_t> allocations;  // device addresses
std::atomic<bool> fake_wrong_kernel{false};
std::atomic<void (*)(int, void*, size_t)> tell_dma_buf{nullptr};
std::atomic<int> flushes{0};
std::atomic<long> live{0};  // pinned buffers, streams, contexts, device memory

// what is never freed because the device hung is no leak of the tests
std::set<void*>& reachable = *new std::set<void*>;

void keep(void* made) {
  ++live;
  const std::lock_guard lock(mutex);
  reachable.insert(made);
}
void let_go(void* made) {
  --live;
  const std::lock_guard lock(mutex);
  reachable.erase(made);
}

std::mutex hang_mutex;
std::condition_variable hang_ended;
bool hangs = false;

// A test in another process makes a file instead of a call.
bool stuck() {
  static const char* const file = std::getenv("FAKE_CUDA_HANGS");
  return hangs || (file != nullptr && access(file, F_OK) == 0);
}

struct Event {
  std::atomic<bool> complete{false};
};
struct Stream {
  std::mutex mutex;
  std::deque<std::function<bool()>> work;  // false: it cannot be done yet
  void add(std::function<void()> step) {
    const std::lock_guard lock(mutex);
    work.emplace_back([step = std::move(step)] {
      step();
      return true;
    });
  }
};

int verdict(const char* name) {
  const std::lock_guard lock(mutex);
  if (fail_name != name || fail_after-- > 0) return 0;
  fail_name.clear();  // once: what cleans up afterwards works again
  return fail_code;
}
void* real(unsigned long long address) {
  return reinterpret_cast<void*>(address & ~kDeviceBit);
}

bool known(unsigned long long address, size_t size) {
  const std::lock_guard lock(mutex);
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return false;
  --found;
  return address - found->first <= found->second && size <= found->second - (address - found->first);
}

namespace kernel {

struct Index {
  unsigned x = 0;
};
struct uint4 {  // NOLINT(readability-identifier-naming)
  unsigned x, y, z, w;
};
thread_local Index threadIdx, blockIdx, blockDim;

inline void atomicXor(unsigned* at, unsigned value) {
  *at ^= value;
}

#define __device__
#define __global__
#define __shared__ static thread_local
#define __syncthreads() (void)0
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wconversion"
#include "../../../src/gpu/gather.cu"
#pragma GCC diagnostic pop

// One thread of the kernel after the other. The first round has no pieces: it only fills the shared tables,
// for which real threads wait at their barrier.
void run(unsigned grid, unsigned block, std::vector<GatherPiece> pieces, unsigned count,
         const unsigned* constants, unsigned* sums) {
  for (GatherPiece& piece : pieces) {
    piece.from &= ~kDeviceBit;
    piece.to &= ~kDeviceBit;
  }
  blockDim.x = block;
  for (const bool fill : {true, false}) {
    for (blockIdx.x = 0; blockIdx.x < (fill ? 1 : grid); ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
        gather_crc(pieces.data(), fill ? 0 : count, constants, sums);
    }
  }
}

}  // namespace kernel

}  // namespace

#define VERDICT(name) \
  if (const int code = verdict(name); code != 0) return code

API void fake_cuda_fail(const char* name, int code, int after) {
  const std::lock_guard lock(mutex);
  fail_name = name;
  fail_code = code;
  fail_after = after;
}
API long fake_cuda_live() {
  return live;
}
// Takes memory of the test as device memory; its address for the driver.
API unsigned long long fake_cuda_adopt(void* memory, size_t size) {
  const std::lock_guard lock(mutex);
  const auto address = reinterpret_cast<unsigned long long>(memory) | kDeviceBit;
  allocations[address] = size;
  return address;
}
// Who is told of each dma-buf: its descriptor, and the memory behind it as the processor sees it.
API void fake_cuda_on_dma_buf(void (*tell)(int fd, void* memory, size_t size)) {
  tell_dma_buf = tell;
}
API int fake_cuda_flushes() {
  return flushes;
}
API int fake_cuda_peek(unsigned long long address, void* to, size_t size) {
  if (!known(address, size)) return 1;
  std::memcpy(to, real(address), size);
  return 0;
}
API int fake_cuda_poke(unsigned long long address, const void* from, size_t size) {
  if (!known(address, size)) return 1;
  std::memcpy(real(address), from, size);
  return 0;
}

API int cuInit(unsigned) {
  return verdict("cuInit");
}
API int cuGetErrorName(int code, const char** name) {
  *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}
API int cuDeviceGetCount(int* count) {
  VERDICT("cuDeviceGetCount");
  *count = 1;
  return 0;
}
API int cuDeviceGet(int* device, int ordinal) {
  VERDICT("cuDeviceGet");
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
API int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(size));
  return 0;
}
API int cuDeviceGetPCIBusId(char* address, int size, int) {
  std::strncpy(address, "0000:3D:00.0", static_cast<size_t>(size));
  return 0;
}
API int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;
  return verdict("cuDeviceGetAttribute");
}
API int cuDevicePrimaryCtxRetain(void** context, int) {
  VERDICT("cuDevicePrimaryCtxRetain");
  *context = &mutex;
  ++live;
  return 0;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
  --live;
  return 0;
}
API int cuCtxPushCurrent_v2(void*) {
  return verdict("cuCtxPushCurrent");
}
API int cuCtxPopCurrent_v2(void**) {
  return 0;
}
API void fake_cuda_hang(int on) {
  {
    const std::lock_guard lock(hang_mutex);
    hangs = on != 0;
  }
  hang_ended.notify_all();
}
API void* fake_cuda_event() {
  auto* event = new Event;
  const std::lock_guard lock(mutex);
  reachable.insert(event);
  return event;
}
API void fake_cuda_complete(void* event) {
  static_cast<Event*>(event)->complete = true;
}
API int cuCtxSynchronize() {
  std::unique_lock lock(hang_mutex);
  while (stuck()) hang_ended.wait_for(lock, std::chrono::milliseconds(20));
  return verdict("cuCtxSynchronize");
}
API int cuStreamCreate(void** stream, unsigned) {
  VERDICT("cuStreamCreate");
  *stream = new Stream;
  keep(*stream);
  return 0;
}
API int cuStreamQuery(void* handle) {
  VERDICT("cuStreamQuery");
  {
    const std::lock_guard lock(hang_mutex);
    if (stuck()) return 600;
  }
  auto* stream = static_cast<Stream*>(handle);
  const std::lock_guard lock(stream->mutex);
  if (!stream->work.empty() && stream->work.front()()) stream->work.pop_front();
  return stream->work.empty() ? 0 : 600;
}
API int cuStreamSynchronize(void* stream) {
  while (cuStreamQuery(stream) == 600) {
  }
  return verdict("cuStreamSynchronize");
}
API int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  VERDICT("cuStreamWaitEvent");
  auto* to = static_cast<Stream*>(stream);
  const std::lock_guard lock(to->mutex);
  to->work.emplace_back([event] { return static_cast<Event*>(event)->complete.load(); });
  return 0;
}
API int cuStreamDestroy_v2(void* stream) {
  let_go(stream);
  delete static_cast<Stream*>(stream);
  return 0;
}
API int cuMemHostAlloc(void** host, size_t size, unsigned) {
  VERDICT("cuMemHostAlloc");
  *host = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  keep(*host);
  return 0;
}
API int cuMemFreeHost(void* host) {
  let_go(host);
  std::free(host);
  return 0;
}
API int cuMemAlloc_v2(unsigned long long* memory, size_t size) {
  VERDICT("cuMemAlloc");
  *memory = reinterpret_cast<unsigned long long>(std::calloc(1, size + 64)) | kDeviceBit;
  ++live;
  const std::lock_guard lock(mutex);
  allocations[*memory] = size;
  return 0;
}
API int cuMemFree_v2(unsigned long long memory) {
  VERDICT("cuMemFree");
  const std::lock_guard lock(mutex);
  if (allocations.erase(memory) == 0) return 1;
  std::free(real(memory));
  --live;
  return 0;
}
API int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t size, void* stream) {
  VERDICT("cuMemcpyHtoDAsync");
  if (!known(to, size)) return 1;
  static_cast<Stream*>(stream)->add([=] { std::memcpy(real(to), from, size); });
  return 0;
}
API int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t size, void* stream) {
  VERDICT("cuMemcpyDtoHAsync");
  if (!known(from, size)) return 1;
  static_cast<Stream*>(stream)->add([=] { std::memcpy(to, real(from), size); });
  return 0;
}
API int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t size, void* stream) {
  VERDICT("cuMemcpyDtoDAsync");
  if (!known(to, size) || !known(from, size)) return 1;
  static_cast<Stream*>(stream)->add([=] { std::memcpy(real(to), real(from), size); });
  return 0;
}
struct IpcHandle {
  unsigned char bytes[64];
};
API int cuIpcGetMemHandle(IpcHandle* handle, unsigned long long memory) {
  VERDICT("cuIpcGetMemHandle");
  std::memset(handle->bytes, 0, sizeof handle->bytes);
  std::memcpy(handle->bytes, &memory, sizeof memory);
  return 0;
}
API int cuIpcOpenMemHandle_v2(unsigned long long* memory, IpcHandle handle, unsigned) {
  VERDICT("cuIpcOpenMemHandle");
  std::memcpy(memory, handle.bytes, sizeof *memory);
  if (!known(*memory, 0)) return 400;
  ++live;
  return 0;
}
API int cuIpcCloseMemHandle(unsigned long long) {
  VERDICT("cuIpcCloseMemHandle");
  --live;
  return 0;
}
API int cuMemGetAddressRange_v2(unsigned long long* base, size_t* size, unsigned long long inside) {
  VERDICT("cuMemGetAddressRange");
  const std::lock_guard lock(mutex);
  auto found = allocations.upper_bound(inside);
  if (found == allocations.begin()) return 1;
  --found;
  if (inside - found->first >= found->second) return 1;
  *base = found->first;
  *size = found->second;
  return 0;
}
API int cuMemGetHandleForAddressRange(void* fd, unsigned long long address, size_t size, int type,
                                      unsigned long long) {
  VERDICT("cuMemGetHandleForAddressRange");
  const auto page = static_cast<unsigned long long>(sysconf(_SC_PAGESIZE));
  if (type != 1 || address % page != 0 || size % page != 0) return 1;
  {  // whole pages that this allocation has a part of
    const std::lock_guard lock(mutex);
    auto found = allocations.upper_bound(address + page - 1);
    if (found == allocations.begin()) return 1;
    --found;
    const auto end = (found->first + found->second + page - 1) / page * page;
    if (address < found->first / page * page || address + size > end) return 1;
  }
  *static_cast<int*>(fd) = 1000;
  if (const auto tell = tell_dma_buf.load()) tell(1000, real(address), size);
  return 0;
}
API int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  VERDICT("cuFlushGPUDirectRDMAWrites");
  if (target != 0 || scope != 100) return 1;
  ++flushes;
  return 0;
}
API int cuPointerSetAttribute(const void*, int attribute, unsigned long long memory) {
  VERDICT("cuPointerSetAttribute");
  return attribute == 6 && known(memory, 0) ? 0 : 1;
}
API int cuModuleLoadData(void** module, const void*) {
  VERDICT("cuModuleLoadData");
  *module = &mutex;
  ++live;
  return 0;
}
API int cuModuleUnload(void*) {
  --live;
  return 0;
}
API int cuModuleGetFunction(void** function, void*, const char* name) {
  VERDICT("cuModuleGetFunction");
  *function = &mutex;
  return std::strcmp(name, "gather_crc") == 0 ? 0 : 500;
}
API int cuLaunchKernel(void*, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                       void* stream, void** arguments, void**) {
  VERDICT("cuLaunchKernel");
  const auto count = *static_cast<uint32_t*>(arguments[1]);
  const auto* first = reinterpret_cast<const kernel::GatherPiece*>(*static_cast<uint64_t*>(arguments[0]));
  const auto* constants = static_cast<const unsigned*>(real(*static_cast<uint64_t*>(arguments[2])));
  auto* sums = static_cast<unsigned*>(real(*static_cast<uint64_t*>(arguments[3])));
  const bool wrong = fake_wrong_kernel;
  static_cast<Stream*>(stream)->add([=] {
    kernel::run(grid, block, {first, first + count}, count, constants, sums);
    if (wrong) sums[0] ^= 1;
  });
  return 0;
}
API void fake_cuda_wrong_kernel(int on) {
  fake_wrong_kernel = on != 0;
}

API int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                           const char* const*) {
  VERDICT("nvrtcCreateProgram");
  *program = &mutex;
  return 0;
}
API int nvrtcCompileProgram(void*, int, const char* const*) {
  return verdict("nvrtcCompileProgram");
}
API int nvrtcDestroyProgram(void**) {
  return 0;
}
API int nvrtcGetPTXSize(void*, size_t* size) {
  *size = 5;
  return 0;
}
API int nvrtcGetPTX(void*, char* text) {
  std::memcpy(text, "none", 5);
  return 0;
}
API int nvrtcGetProgramLogSize(void*, size_t* size) {
  *size = 5;
  return 0;
}
API int nvrtcGetProgramLog(void*, char* text) {
  std::memcpy(text, "why?", 5);
  return 0;
}
