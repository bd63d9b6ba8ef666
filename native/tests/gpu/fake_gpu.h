// The fake CUDA driver (fake/fake_cuda.cpp) as a device, with what tests steer it by.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "mooncache/gpu.h"

namespace mooncache::testing {

class FakeGpu {
 public:
  // Without `kernel` it copies slice by slice and computes no checksums.
  explicit FakeGpu(bool kernel = true) {
    void* library = dlopen(MOONCACHE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    find(library, "fake_cuda_adopt", adopt);
    find(library, "fake_cuda_hang", hang);
    find(library, "fake_cuda_fail", fail);
    find(library, "fake_cuda_wrong_kernel", wrong_kernel);
    device = *GpuDevice::open(0, {MOONCACHE_FAKE_CUDA, kernel ? MOONCACHE_FAKE_CUDA : "none"});
  }
  ~FakeGpu() {
    hang(0);
    fail("", 0, 0);
  }
  unsigned long long (*adopt)(void*, size_t) = nullptr;
  void (*hang)(int) = nullptr;
  void (*fail)(const char*, int, int) = nullptr;
  void (*wrong_kernel)(int) = nullptr;
  std::shared_ptr<GpuDevice> device;

 private:
  template <typename F>
  static void find(void* library, const char* name, F& slot) {
    slot = reinterpret_cast<F>(dlsym(library, name));
    EXPECT_NE(slot, nullptr) << name;
  }
};

}  // namespace mooncache::testing
