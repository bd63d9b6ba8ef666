// Staging over a pretended driver: bytes arrive when wait() returned, every failing call is told, nothing
// leaks.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "mooncache/gpu.h"

namespace mooncache {
namespace {

class Gpu : public ::testing::Test {
 protected:
  Gpu() {
    library_ = dlopen(MOONCACHE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    find("fake_cuda_fail", fail);
    find("fake_cuda_live", live);
    find("fake_cuda_peek", peek);
    find("fake_cuda_poke", poke);
  }
  ~Gpu() override { fail("", 0, 0); }
  static Result<std::shared_ptr<GpuDevice>> open() {
    return GpuDevice::open(0, {MOONCACHE_FAKE_CUDA, "none"});
  }
  std::vector<std::byte> pattern(size_t size, int seed) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed + (i >> 8));
    return bytes;
  }
  void (*fail)(const char*, int, int) = nullptr;
  long (*live)() = nullptr;
  int (*peek)(unsigned long long, void*, size_t) = nullptr;
  int (*poke)(unsigned long long, const void*, size_t) = nullptr;

 private:
  template <typename F>
  void find(const char* name, F& slot) {
    slot = reinterpret_cast<F>(dlsym(library_, name));
    ASSERT_NE(slot, nullptr) << name;
  }
  void* library_;
};

TEST_F(Gpu, AbsentDriverIsASentence) {
  const auto device = GpuDevice::open(0, {"libcuda-that-is-not-there.so", ""});
  ASSERT_FALSE(device);
  EXPECT_EQ(device.status().code, Code::kTransportUnavailable);
  EXPECT_NE(device.status().message.find("CUDA unavailable, because"), std::string::npos);
  EXPECT_FALSE(GpuDevice::open(7, {MOONCACHE_FAKE_CUDA, "none"}));
}

TEST_F(Gpu, TwoBuffersTakeTurns) {
  const long before = live();
  {
    const auto device = open();
    ASSERT_TRUE(device) << device.status().message;
    EXPECT_EQ((*device)->name(), "Pretended GPU");
    auto stager = (*device)->make_stager(1 << 20, 2);
    ASSERT_TRUE(stager) << stager.status().message;
    EXPECT_EQ((*stager)->how().rfind("copies, because", 0), 0u) << (*stager)->how();
    const auto memory = (*device)->allocate(1 << 20);
    ASSERT_TRUE(memory);
    const auto bytes = pattern(300'000, 1);
    ASSERT_EQ(poke(*memory, bytes.data(), bytes.size()), 0);

    const DeviceSlice slices[] = {{*memory + 100'000, 200'000}, {*memory, 0}, {*memory, 100'000}};
    const uint32_t blocks[] = {2, 1};
    std::memset((*stager)->slot(0).data, 0, 300'000);
    ASSERT_TRUE((*stager)->start_out(0, slices, blocks));
    EXPECT_EQ((*stager)->slot(0).data[5], std::byte{0});  // not before wait()
    EXPECT_EQ((*stager)->start_out(0, slices, blocks).code, Code::kInvalidArgument);
    const auto crcs = (*stager)->wait(0);
    ASSERT_TRUE(crcs);
    EXPECT_TRUE(crcs->empty());  // no kernel here
    EXPECT_EQ(std::memcmp((*stager)->slot(0).data, bytes.data() + 100'000, 200'000), 0);
    EXPECT_EQ(std::memcmp((*stager)->slot(0).data + 200'000, bytes.data(), 100'000), 0);

    const auto other = pattern(300'000, 9);
    std::memcpy((*stager)->slot(1).data, other.data(), other.size());
    ASSERT_TRUE((*stager)->start_in(1, slices, blocks));
    ASSERT_TRUE((*stager)->wait(1));
    std::vector<std::byte> now(300'000);
    ASSERT_EQ(peek(*memory, now.data(), now.size()), 0);
    EXPECT_EQ(std::memcmp(now.data() + 100'000, other.data(), 200'000), 0);
    EXPECT_EQ(std::memcmp(now.data(), other.data() + 200'000, 100'000), 0);

    const DeviceSlice gap[] = {{0, 1000}, {*memory, 10}};
    std::memcpy((*stager)->slot(0).data, other.data(), other.size());
    ASSERT_TRUE((*stager)->start_in(0, gap, std::span(blocks, 1)));
    ASSERT_TRUE((*stager)->wait(0));
    ASSERT_EQ(peek(*memory, now.data(), 20), 0);
    EXPECT_EQ(std::memcmp(now.data(), other.data() + 1000, 10), 0);
    EXPECT_EQ(std::memcmp(now.data() + 10, other.data() + 200'010, 10), 0);

    const DeviceSlice large[] = {{*memory, (1 << 20) + 1}};
    const uint32_t one[] = {1};
    EXPECT_EQ((*stager)->start_out(0, large, one).code, Code::kInvalidArgument);
    const DeviceSlice huge[] = {{*memory, 1ull << 60}};  // its pieces alone would not fit into memory
    EXPECT_EQ((*stager)->start_out(0, huge, one).code, Code::kInvalidArgument);
    EXPECT_TRUE((*device)->release(*memory));
  }
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, EveryFailingCallIsToldAndNothingLeaks) {
  const long before = live();
  for (const int code : {1, 2, 700, 999}) {
    for (const char* name :
         {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuStreamCreate", "cuMemHostAlloc",
          "cuMemAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamSynchronize"}) {
      for (const int after : {0, 1}) {
        SCOPED_TRACE(std::string(name) + " " + std::to_string(code) + " after " + std::to_string(after));
        fail(name, code, after);
        const Status status = [&]() -> Status {
          const auto device = open();
          if (!device) return device.status();
          auto stager = (*device)->make_stager(4096, 2);
          if (!stager) return stager.status();
          const auto memory = (*device)->allocate(4096);
          if (!memory) return memory.status();
          const DeviceSlice slices[] = {{*memory, 10}, {*memory + 50, 10}};
          const uint32_t blocks[] = {2};
          Status first = (*stager)->start_out(0, slices, blocks);
          const Status out = (*stager)->wait(0).status();
          if (first) first = out;
          const Status second = (*stager)->start_in(1, slices, blocks);
          const Status in = (*stager)->wait(1).status();
          fail("", 0, 0);
          EXPECT_TRUE((*device)->release(*memory));
          return !first ? first : !second ? second : in;
        }();
        fail("", 0, 0);
        const bool once = std::string(name) == "cuDeviceGet" ||
                          std::string(name) == "cuDevicePrimaryCtxRetain" ||
                          std::string(name) == "cuMemAlloc";
        if (once && after == 1) continue;  // it is called only once
        EXPECT_FALSE(status);
        EXPECT_EQ(status.code, code == 2 ? Code::kNoSpace : Code::kTransportUnavailable) << status.message;
        EXPECT_NE(status.message.find(std::to_string(code)), std::string::npos) << status.message;
      }
    }
  }
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, HandlesForOtherProcessesAndDevices) {
  const long before = live();
  const auto device = open();
  ASSERT_TRUE(device);
  const auto memory = (*device)->allocate(1 << 20);
  ASSERT_TRUE(memory);
  const auto handle = (*device)->share({*memory + 4096, 100});
  ASSERT_TRUE(handle);
  EXPECT_EQ(handle->offset, 4096u);
  const auto attached = (*device)->attach(*handle);
  ASSERT_TRUE(attached);
  EXPECT_EQ(*attached, *memory + 4096);
  EXPECT_TRUE((*device)->detach(*attached));
  EXPECT_EQ((*device)->share({*memory + 4096, 1 << 20}).status().code, Code::kInvalidArgument);
  // an offset that another process made up does not name memory of anybody else, and nothing stays open
  for (const uint64_t offset : {1ull << 20, 1ull << 50, ~0ull}) {
    GpuIpcHandle hostile = *handle;
    hostile.offset = offset;
    EXPECT_EQ((*device)->attach(hostile).status().code, Code::kInvalidArgument) << offset;
  }
  EXPECT_EQ(live(), before + 2);  // the context, the memory

  const auto exported = (*device)->export_dma_buf({*memory + 70'000, 5000});
  ASSERT_TRUE(exported);
  EXPECT_EQ(exported->fd, 1000);
  EXPECT_EQ(exported->offset, (*memory + 70'000) % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(exported->length, 5000u);
  EXPECT_TRUE((*device)->export_dma_buf({*memory, 10}));  // not a page of somebody else
  EXPECT_TRUE((*device)->export_dma_buf({*memory, 1 << 20}));
  for (const uint64_t size : {uint64_t{0}, uint64_t{(1 << 20) + 1}, UINT64_MAX - *memory, UINT64_MAX})
    EXPECT_EQ((*device)->export_dma_buf({*memory, size}).status().code, Code::kInvalidArgument) << size;
  fail("cuMemGetHandleForAddressRange", 801, 0);
  EXPECT_EQ((*device)->export_dma_buf({*memory, 10}).status().code, Code::kTransportUnavailable);
  fail("", 0, 0);
  EXPECT_TRUE((*device)->release(*memory));
  EXPECT_FALSE((*device)->release(*memory));
}

}  // namespace
}  // namespace mooncache
