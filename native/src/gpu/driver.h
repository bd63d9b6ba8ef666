// The CUDA driver as a table of functions that is opened at run time. Nothing of CUDA is needed to build: the
// few types are declared here as the driver's binary interface has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncache/status.h"

namespace mooncache::gpu {

using CuResult = int;  // 0 = success
inline constexpr CuResult kNotReady = 600;
inline constexpr CuResult kNotSupported = 801;
using CuPointer = unsigned long long;
using CuHandle = void*;  // contexts, streams, modules, functions
struct CuIpcHandle {
  unsigned char bytes[64];
};

inline constexpr int kHostAllocPortable = 1;
inline constexpr int kHostAllocMapped = 2;
inline constexpr int kStreamNonBlocking = 1;
inline constexpr int kIpcLazyPeerAccess = 1;
inline constexpr int kHandleDmaBuf = 1;
inline constexpr int kPointerSyncMemops = 6;
inline constexpr int kFlushCurrentContext = 0;
inline constexpr int kFlushToOwner = 100;
inline constexpr int kAttributeMajor = 75;
inline constexpr int kAttributeMinor = 76;

struct Driver {
  CuResult (*init)(unsigned flags);
  CuResult (*get_error_name)(CuResult code, const char** name);
  CuResult (*device_get_count)(int* count);
  CuResult (*device_get)(int* device, int ordinal);
  CuResult (*device_get_name)(char* name, int size, int device);
  CuResult (*device_get_attribute)(int* value, int attribute, int device);
  CuResult (*device_pci_address)(char* address, int size, int device);  // may be null
  CuResult (*primary_retain)(CuHandle* context, int device);
  CuResult (*primary_release)(int device);
  CuResult (*push)(CuHandle context);
  CuResult (*pop)(CuHandle* context);
  CuResult (*stream_create)(CuHandle* stream, unsigned flags);
  CuResult (*stream_destroy)(CuHandle stream);
  CuResult (*stream_query)(CuHandle stream);
  CuResult (*stream_wait_event)(CuHandle stream, CuHandle event, unsigned flags);
  CuResult (*context_synchronize)();
  CuResult (*host_alloc)(void** host, size_t size, unsigned flags);
  CuResult (*host_free)(void* host);
  CuResult (*mem_alloc)(CuPointer* memory, size_t size);
  CuResult (*mem_free)(CuPointer memory);
  CuResult (*copy_in)(CuPointer to, const void* from, size_t size, CuHandle stream);
  CuResult (*copy_out)(void* to, CuPointer from, size_t size, CuHandle stream);
  CuResult (*ipc_get)(CuIpcHandle* handle, CuPointer memory);
  CuResult (*ipc_open)(CuPointer* memory, CuIpcHandle handle, unsigned flags);
  CuResult (*ipc_close)(CuPointer memory);
  CuResult (*address_range)(CuPointer* base, size_t* size, CuPointer inside);
  CuResult (*module_load)(CuHandle* module, const void* image);
  CuResult (*module_unload)(CuHandle module);
  CuResult (*module_function)(CuHandle* function, CuHandle module, const char* name);
  CuResult (*launch)(CuHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                     unsigned block_y, unsigned block_z, unsigned shared_bytes, CuHandle stream,
                     void** arguments, void** extra);
  // Null before driver 515 (CUDA 11.7): no dma-buf.
  CuResult (*dma_buf)(void* fd, CuPointer memory, size_t size, int type, unsigned long long flags);

  // Null in drivers without them.
  CuResult (*flush_rdma_writes)(int target, int scope);
  CuResult (*pointer_set_attribute)(const void* value, int attribute, CuPointer memory);

  // OK, or NO_SPACE (out of memory) / TRANSPORT_UNAVAILABLE with what failed and the driver's name of the
  // reason.
  Status check(CuResult code, const char* what) const;
};

// The driver of this machine, opened and initialised once for each path ("" = libcuda.so.1). The table lives
// as long as the process. TRANSPORT_UNAVAILABLE with "CUDA unavailable, because …".
Result<const Driver*> load_driver(const std::string& path = "");

}  // namespace mooncache::gpu
