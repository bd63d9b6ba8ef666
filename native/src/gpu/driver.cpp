#include "gpu/driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

namespace mooncache::gpu {
namespace {

constexpr CuResult kOutOfMemory = 2;

Status unavailable(const std::string& why) {
  return {Code::kTransportUnavailable, "CUDA unavailable, because " + why};
}

template <typename Function>
void bind(void* library, const char* name, Function& slot, std::string* why) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr && why != nullptr && why->empty()) *why = std::string("this driver lacks ") + name;
  slot = reinterpret_cast<Function>(symbol);
}

Status load(const std::string& path, Driver& t) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return unavailable(path + " cannot be opened: " + dlerror());
  std::string why;
  bind(library, "cuInit", t.init, &why);
  bind(library, "cuGetErrorName", t.get_error_name, &why);
  bind(library, "cuDeviceGetCount", t.device_get_count, &why);
  bind(library, "cuDeviceGet", t.device_get, &why);
  bind(library, "cuDeviceGetName", t.device_get_name, &why);
  bind(library, "cuDeviceGetAttribute", t.device_get_attribute, &why);
  bind(library, "cuDeviceGetPCIBusId", t.device_pci_address, nullptr);
  bind(library, "cuDevicePrimaryCtxRetain", t.primary_retain, &why);
  bind(library, "cuDevicePrimaryCtxRelease_v2", t.primary_release, &why);
  bind(library, "cuCtxPushCurrent_v2", t.push, &why);
  bind(library, "cuCtxPopCurrent_v2", t.pop, &why);
  bind(library, "cuStreamCreate", t.stream_create, &why);
  bind(library, "cuStreamDestroy_v2", t.stream_destroy, &why);
  bind(library, "cuStreamQuery", t.stream_query, &why);
  bind(library, "cuStreamWaitEvent", t.stream_wait_event, &why);
  bind(library, "cuCtxSynchronize", t.context_synchronize, &why);
  bind(library, "cuMemHostAlloc", t.host_alloc, &why);
  bind(library, "cuMemFreeHost", t.host_free, &why);
  bind(library, "cuMemAlloc_v2", t.mem_alloc, &why);
  bind(library, "cuMemFree_v2", t.mem_free, &why);
  bind(library, "cuMemcpyHtoDAsync_v2", t.copy_in, &why);
  bind(library, "cuMemcpyDtoHAsync_v2", t.copy_out, &why);
  bind(library, "cuIpcGetMemHandle", t.ipc_get, &why);
  bind(library, "cuIpcOpenMemHandle_v2", t.ipc_open, &why);
  bind(library, "cuIpcCloseMemHandle", t.ipc_close, &why);
  bind(library, "cuMemGetAddressRange_v2", t.address_range, &why);
  bind(library, "cuModuleLoadData", t.module_load, &why);
  bind(library, "cuModuleUnload", t.module_unload, &why);
  bind(library, "cuModuleGetFunction", t.module_function, &why);
  bind(library, "cuLaunchKernel", t.launch, &why);
  bind(library, "cuMemGetHandleForAddressRange", t.dma_buf, nullptr);
  bind(library, "cuPointerSetAttribute", t.pointer_set_attribute, nullptr);
  bind(library, "cuFlushGPUDirectRDMAWrites", t.flush_rdma_writes, nullptr);
  if (!why.empty()) return unavailable(why);
  int count = 0;
  if (Status status = t.check(t.init(0), "cuInit"); !status) return status;
  if (Status status = t.check(t.device_get_count(&count), "cuDeviceGetCount"); !status) return status;
  return count > 0 ? Status::ok() : unavailable("the driver knows no device");
}

}  // namespace

Status Driver::check(CuResult code, const char* what) const {
  if (code == 0) return Status::ok();
  const char* name = nullptr;
  if (get_error_name(code, &name) != 0 || name == nullptr) name = "an unknown error";
  const std::string text = std::string(what) + " answered " + name + " (" + std::to_string(code) + ")";
  if (code == kOutOfMemory) return {Code::kNoSpace, text};
  return unavailable(text);
}

Result<const Driver*> load_driver(const std::string& path) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, std::unique_ptr<Driver>>();  // as long as the process
  const std::lock_guard lock(mutex);
  const std::string name = path.empty() ? "libcuda.so.1" : path;
  std::unique_ptr<Driver>& kept = (*known)[name];
  if (!kept) {  // what failed is tried again: a driver may be installed meanwhile
    auto table = std::make_unique<Driver>();
    if (Status status = load(name, *table); !status) return status;
    kept = std::move(table);
  }
  return static_cast<const Driver*>(kept.get());
}

}  // namespace mooncache::gpu
