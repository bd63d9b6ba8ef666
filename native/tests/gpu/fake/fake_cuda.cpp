// A pretended CUDA driver, opened by path. Its device memory lies at addresses that the processor cannot
// read, its copies happen when somebody waits for the stream and not before, and each function can be told to
// fail.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
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
std::atomic<long> live{0};                         // pinned buffers, streams, contexts, device memory

struct Stream {
  std::vector<std::function<void()>> work;
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
  *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_PRETENDED";
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
  std::strncpy(name, "Pretended GPU", static_cast<size_t>(size));
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
API int cuCtxSynchronize() {
  return verdict("cuCtxSynchronize");
}
API int cuStreamCreate(void** stream, unsigned) {
  VERDICT("cuStreamCreate");
  *stream = new Stream;
  ++live;
  return 0;
}
API int cuStreamSynchronize(void* stream) {
  for (auto& work : std::exchange(static_cast<Stream*>(stream)->work, {})) work();
  return verdict("cuStreamSynchronize");
}
API int cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  --live;
  return 0;
}
API int cuMemHostAlloc(void** host, size_t size, unsigned) {
  VERDICT("cuMemHostAlloc");
  *host = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  ++live;
  return 0;
}
API int cuMemFreeHost(void* host) {
  std::free(host);
  --live;
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
  static_cast<Stream*>(stream)->work.push_back([=] { std::memcpy(real(to), from, size); });
  return 0;
}
API int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t size, void* stream) {
  VERDICT("cuMemcpyDtoHAsync");
  if (!known(from, size)) return 1;
  static_cast<Stream*>(stream)->work.push_back([=] { std::memcpy(to, real(from), size); });
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
  return 0;
}
API int cuModuleLoadData(void**, const void*) {
  return 218;
}
API int cuModuleUnload(void*) {
  return 0;
}
API int cuModuleGetFunction(void**, void*, const char*) {
  return 500;
}
API int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                       void**, void**) {
  return 719;
}
