// What only a fake device does on demand: dma-bufs with their refusals, reports that overtake each
// other, lists that a device takes in part, addresses that change, devices that hang.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "rdma/fabric.h"
#include "rdma/pair.h"

namespace mooncache::testing {
namespace {

constexpr int kFd = 1000;  // nobody opens it: the fake library knows what it stands for

class DeviceMemoryTest : public FabricTest {
 protected:
  void SetUp() override {
    FabricTest::SetUp();
    folder_ = std::filesystem::path(::testing::TempDir()) / ("modules-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    options_.sysfs_folder = folder_;
    vram_.resize(64 << 10, std::byte{7});
    const auto at = reinterpret_cast<uintptr_t>(vram_.data());
    begin_ = (4096 - at % 4096) % 4096;
    fake().set_dma_buf(kFd, vram_.data() + begin_, 32 << 10);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    FabricTest::TearDown();
  }
  DeviceRange memory(uint64_t offset = 8192, uint64_t size = 5000) {
    return {reinterpret_cast<uint64_t>(vram_.data() + begin_ + offset), size, kFd, offset, ""};
  }
  std::string how(const DeviceRange& wanted) {
    auto domain = rail().make_domain();
    auto made = (*domain)->attach_device(wanted);
    return made ? (*made)->how() : "refused: " + made.status().message;
  }
  std::filesystem::path folder_;
  std::vector<std::byte> vram_;
  size_t begin_ = 0;
};

TEST_F(DeviceMemoryTest, MovesInPlaceByDmaBuf) {
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> theirs(5000, std::byte{2});
  const DeviceRange mine = memory();
  auto local = pair.near_domain->attach_device(mine);
  ASSERT_TRUE(local) << local.status().message;
  EXPECT_EQ((*local)->how(), "dma-buf");
  auto readable = pair.far_domain->expose(slice(theirs), false);
  auto* at = reinterpret_cast<std::byte*>(mine.address);
  Post read = post(false, {at, mine.size}, **local, **readable);
  read.device = true;
  ASSERT_EQ(pair.near->post(std::span(&read, 1)), 1u);
  EXPECT_EQ(reap(*pair.near, 1).at(0).outcome, WorkOutcome::kDone);
  EXPECT_TRUE(std::equal(theirs.begin(), theirs.end(), at));
  EXPECT_EQ(at[-1], std::byte{7});
  EXPECT_EQ(at[5000], std::byte{7});
}

TEST_F(DeviceMemoryTest, SmallWritesAreNotReadByTheProcessor) {
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> theirs(8);
  DeviceRange mine = memory(0, 8);
  const std::byte expected = vram_[begin_];
  mine.address = 0x7000'0000'0000;  // an address that only the device can use
  auto local = pair.near_domain->attach_device(mine);
  ASSERT_TRUE(local) << local.status().message;
  auto writable = pair.far_domain->expose(slice(theirs), true);
  Post write = post(true, {reinterpret_cast<std::byte*>(mine.address), 8}, **local, **writable);
  write.device = true;
  ASSERT_EQ(pair.near->post(std::span(&write, 1)), 1u);
  EXPECT_EQ(reap(*pair.near, 1).at(0).outcome, WorkOutcome::kDone);
  EXPECT_EQ(theirs[7], expected);
}

TEST_F(DeviceMemoryTest, WithoutDmaBufPeerMemoryWithoutBothAReason) {
  EXPECT_EQ(how(memory()), "dma-buf");
  for (const int error : {EOPNOTSUPP, EINVAL, EFAULT, ENOMEM, EBADF, EPERM, ENODEV}) {
    fake().fail("ibv_reg_dmabuf_mr", error);
    const std::string why = how(memory());
    EXPECT_EQ(why.find("refused: RDMA unavailable, because no device memory can be registered: "), 0u) << why;
    const char* words = error == EOPNOTSUPP ? "cannot register a dma-buf" : std::strerror(error);
    EXPECT_NE(why.find(words), std::string::npos) << why;
    EXPECT_NE(why.find("nvidia-peermem is not loaded"), std::string::npos) << why;
  }
  std::filesystem::create_directories(folder_ / "module/nvidia_peermem");
  fake().fail("ibv_reg_dmabuf_mr", EOPNOTSUPP);
  EXPECT_EQ(how(memory()), "nvidia-peermem, because fake0 and its driver cannot register a dma-buf");
  DeviceRange none = memory();
  none.dma_buf_fd = -1;
  none.no_dma_buf = "the driver is older than CUDA 11.7";
  EXPECT_EQ(how(none), "nvidia-peermem, because the driver is older than CUDA 11.7");
  fake().fail("ibv_reg_mr_iova", EFAULT);
  EXPECT_NE(how(none).find("through nvidia-peermem on fake0 it failed: Bad address"), std::string::npos);
  none.dma_buf_fd = kFd + 1;
  EXPECT_NE(how(none).find("Bad file descriptor"), std::string::npos) << "another one's descriptor";
}

TEST_F(DeviceMemoryTest, ThePortReportSaysHow) {
  const auto said = [&] { return look_for_rails(options_)->at(0).gpu_direct; };
  EXPECT_EQ(said(), "dma-buf");
  fake().set_dma_buf_supported(0, false);
  EXPECT_EQ(said(),
            "none, because fake0 and its driver cannot register a dma-buf, and nvidia-peermem is not loaded "
            "(modprobe nvidia-peermem)");
  std::filesystem::create_directories(folder_ / "module/nvidia_peermem");
  EXPECT_EQ(said(), "nvidia-peermem, because fake0 and its driver cannot register a dma-buf");
  fake().fail("ibv_alloc_pd", ENOMEM);
  EXPECT_NE(said().find("Cannot allocate memory"), std::string::npos);
}

TEST_F(FabricTest, ReportsOfQueuePairsOvertakeEachOtherAndEachRequestEndsOnce) {
  fake().shuffle_reports(11);
  constexpr size_t kPairs = 4, kRequests = 60;
  std::array<Pair, kPairs> pairs;
  std::array<std::vector<std::byte>, kPairs> mine, theirs;
  std::vector<std::unique_ptr<Registration>> kept;
  std::array<std::vector<uint64_t>, kPairs> over;
  std::vector<uint64_t> order;
  std::array<size_t, kPairs> sent{};
  for (size_t i = 0; i < kPairs; ++i) {
    ASSERT_TRUE(pairs[i].connect(rail(), rail(), 9));
    mine[i].resize(64);
    theirs[i].resize(64, static_cast<std::byte>(i));
    kept.push_back(std::move(*pairs[i].near_domain->attach(slice(mine[i]))));
    kept.push_back(std::move(*pairs[i].far_domain->expose(slice(theirs[i]), false)));
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (order.size() < kPairs * kRequests && std::chrono::steady_clock::now() < until) {
    for (size_t i = 0; i < kPairs; ++i) {
      std::vector<Post> posts;
      while (sent[i] + posts.size() < kRequests && posts.size() < 7)
        posts.push_back(post(false, mine[i], *kept[2 * i], *kept[2 * i + 1], sent[i] + posts.size()));
      sent[i] += pairs[i].near->post(posts);
      std::array<Reaped, 3> some;
      const size_t got = pairs[i].near->poll(some);
      for (size_t k = 0; k < got; ++k) {
        EXPECT_EQ(some[k].outcome, WorkOutcome::kDone);
        over[i].push_back(some[k].id);
        order.push_back(i);
      }
    }
  }
  for (size_t i = 0; i < kPairs; ++i) {
    ASSERT_EQ(over[i].size(), kRequests);
    for (size_t k = 0; k < kRequests; ++k) EXPECT_EQ(over[i][k], k);
    EXPECT_EQ(pairs[i].near->outstanding(), 0u);
    EXPECT_TRUE(mine[i] == theirs[i]);
  }
}

TEST_F(FabricTest, AListTakenInPartEndsInFull) {
  for (const int skip : {1, 2, 3, 4, 6}) {
    for (const uint32_t latency_us : {0u, 2'000u}) {
      fake().set_latency_us(0, latency_us);
      Pair pair;
      ASSERT_TRUE(pair.connect(rail(), rail(), 16));
      std::vector<std::byte> mine(64), theirs(64);
      auto local = pair.near_domain->attach(slice(mine));
      auto exposed = pair.far_domain->expose(slice(theirs), false);
      fake().fail("post_send", ENOMEM, 1, skip);
      std::vector<Post> posts(9, post(false, mine, **local, **exposed));
      ASSERT_EQ(pair.near->post(posts), static_cast<size_t>(skip));
      EXPECT_EQ(reap(*pair.near, static_cast<size_t>(skip)).size(), static_cast<size_t>(skip));
      EXPECT_EQ(pair.near->outstanding(), 0u);
    }
  }
}

TEST_F(FabricTest, AFailureInAListTellsWhichWentWell) {
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail(), 16));
  std::vector<std::byte> mine(64), theirs(64);
  auto local = pair.near_domain->attach(slice(mine));
  auto exposed = pair.far_domain->expose(slice(theirs), false);
  fake().set_latency_us(0, 5'000);
  std::vector<Post> posts(11, post(false, mine, **local, **exposed));
  for (size_t i = 0; i < posts.size(); ++i) posts[i].id = i;
  posts[5].remote_key ^= 0x5a5a;
  ASSERT_EQ(pair.near->post(posts), 11u);
  const auto over = reap(*pair.near, 11);
  ASSERT_EQ(over.size(), 11u);
  for (size_t i = 0; i < over.size(); ++i) {
    EXPECT_EQ(over[i].id, i);
    EXPECT_EQ(over[i].outcome, i < 5    ? WorkOutcome::kDone
                               : i == 5 ? WorkOutcome::kRefused
                                        : WorkOutcome::kFlushed)
        << i;
  }
}

TEST_F(FabricTest, AChangedAddressIsReadAgain) {
  Rail& one = rail();
  const auto becomes = [&](auto condition) {
    for (int i = 0; i < 1000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return condition();
  };
  const RailInfo& before = one.info();
  fake().set_address(0, 42);
  EXPECT_TRUE(becomes([&] { return gid_text(one.info().gid) == "10.77.0.42"; }));
  EXPECT_EQ(gid_text(before.gid), "10.77.0.1") << "whoever holds the old one may still read it";
  Pair pair;
  ASSERT_TRUE(pair.connect(one, one));
  EXPECT_EQ(gid_text(pair.near->address().gid), "10.77.0.42");
  fake().set_address(0, 0);
  EXPECT_TRUE(becomes([&] { return !one.up(); }));
  fake().set_address(0, 3);
  EXPECT_TRUE(becomes([&] { return one.up() && gid_text(one.info().gid) == "10.77.0.3"; }));
}

TEST_F(FabricTest, ADeviceThatHangsHoldsNobodyUp) {
  fake().set_latency_us(0, 60'000'000);
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> mine(64), theirs(64);
  auto local = pair.near_domain->attach(slice(mine));
  auto exposed = pair.far_domain->expose(slice(theirs), false);
  std::vector<Post> posts(3, post(false, mine, **local, **exposed));
  ASSERT_EQ(pair.near->post(posts), 3u);
  fake().hang(0, true);  // not even a queue pair in the error state is flushed
  const auto before = std::chrono::steady_clock::now();
  pair.near.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(2));
}

}  // namespace
}  // namespace mooncache::testing
