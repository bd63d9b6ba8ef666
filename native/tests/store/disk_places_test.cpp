// Where a disk may lie: a file of a newer version, a file system that takes no writes, several disks of one
// node, a block device.
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>

#include "store/disk/format.h"
#include "store/disk/tier.h"
#include "store/disk_fixture.h"

namespace mooncache::test {
namespace {

using store::disk::SsdTier;

class DiskPlacesTest : public DiskTest {
 protected:
  void write_blocks(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) memory_->offer(i, 20'000);
    ASSERT_TRUE(memory_->wait_written(count));
  }
  // The superblock's version becomes 2, and its checksum is right.
  void make_newer(uint64_t copy) {
    std::fstream disk(file(), std::ios::in | std::ios::out | std::ios::binary);
    std::array<char, store::disk::kPageBytes> page{};
    const auto at = static_cast<std::streamoff>(copy * page.size());
    disk.seekg(at).read(page.data(), page.size());
    page[8] = 2;
    constexpr size_t kBody = page.size() - sizeof(uint32_t);
    const uint32_t crc = crc32c({reinterpret_cast<const std::byte*>(page.data()), kBody});
    std::memcpy(page.data() + kBody, &crc, sizeof crc);
    disk.seekp(at).write(page.data(), page.size());
  }
  std::string content() const {
    std::string all(std::filesystem::file_size(file()), '\0');
    std::ifstream(file(), std::ios::binary).read(all.data(), static_cast<std::streamsize>(all.size()));
    return all;
  }
};

TEST_F(DiskPlacesTest, AFileOfANewerVersionIsNotTouched) {
  for (const std::vector<uint64_t>& copies : {std::vector<uint64_t>{0, 1}, {0}, {1}}) {
    SCOPED_TRACE(copies.size() == 2 ? "both copies" : "copy " + std::to_string(copies[0]));
    std::filesystem::remove(file());
    ASSERT_TRUE(open());
    write_blocks(10);
    device_.reset();
    for (const uint64_t copy : copies) make_newer(copy);
    const std::string before = content();
    const Status status = open();
    EXPECT_EQ(status.code, Code::kConfigInvalid);
    EXPECT_NE(status.message.find("it has format 2"), std::string::npos) << status.message;
    EXPECT_TRUE(content() == before) << "it was changed";
  }
}

// In mounts of this thread's own, which end with it.
TEST_F(DiskPlacesTest, AReadOnlyFileSystemIsLeftOut) {
  ASSERT_TRUE(open());
  write_blocks(3);
  device_.reset();
  std::string skipped;
  std::thread([&] {
    const std::string at = folder_.string();
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount(at.c_str(), at.c_str(), nullptr, MS_BIND, nullptr) != 0 ||
        ::mount(nullptr, at.c_str(), nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr) != 0) {
      skipped = std::string("no mounts of its own: ") + std::strerror(errno);
      return;
    }
    auto tier = SsdTier::open({options()}, *memory_);
    ASSERT_TRUE(tier) << tier.status().message;
    EXPECT_TRUE(memory_->wait_event("ssd_unavailable"));
    EXPECT_FALSE((*tier)->find(kTenant, key_of(1)));
    EXPECT_FALSE((*tier)->fetch(kTenant, key_of(1), {}));
    EXPECT_EQ((*tier)->stats().answering, 0u);
  }).join();
  if (!skipped.empty()) GTEST_SKIP() << skipped;
  ASSERT_TRUE(open());
  EXPECT_TRUE(read(1, 20'000)) << "its blocks are there when it can be written again";
}

// As file systems become after an error of their disk.
TEST_F(DiskPlacesTest, AFileSystemThatBecomesReadOnlyIsTheEndOfTheDisk) {
  faulty_ = true;
  ASSERT_TRUE(open());
  write_blocks(10);
  faults_->write_error = EROFS;
  for (uint64_t i = 10; i < 40; ++i) {
    memory_->offer(i, 20'000);
    (void)memory_->wait_for([] { return false; }, 50);
    if (!device_->answering()) break;
  }
  ASSERT_TRUE(memory_->wait_event("ssd_off"));
  EXPECT_TRUE(memory_->wait_lost(10)) << "the loss of each block is said";
  EXPECT_FALSE(read(1, 20'000));
}

class SeveralDisksTest : public DiskPlacesTest {
 protected:
  static constexpr uint64_t kBlocks = 40;
  static uint32_t disk_of(uint64_t number) { return SsdTier::device_of(kTenant, key_of(number), 2); }
  // Each disk takes its share alone, as from a store.
  class SharedOut final : public store::disk::Memory {
   public:
    FakeMemory of[2];
    void take_cold(uint32_t disk, const store::disk::ColdWish& wish, std::vector<ColdBlock>& out) override {
      of[disk].take_cold(disk, wish, out);
    }
    Status copy_out(const ColdBlock& block, uint64_t offset, Slice to) override {
      return of[disk_of(block.slot)].copy_out(block, offset, to);
    }
    void end_demotion(const ColdBlock& block, Demotion end) override {
      of[disk_of(block.slot)].end_demotion(block, end);
    }
    Result<Reservation> reserve(TenantId tenant, const Key& key, uint64_t size) override {
      return of[0].reserve(tenant, key, size);
    }
    Status write(ReservationId id, uint64_t offset, ConstSlice from) override {
      return of[0].write(id, offset, from);
    }
    Code commit(ReservationId id, TenantId tenant, const Key& key, uint32_t crc, uint32_t end,
                const Origin& origin) override {
      return of[0].commit(id, tenant, key, crc, end, origin);
    }
    void abort(ReservationId id) override { of[0].abort(id); }
    void written(TenantId tenant, const Key& key, uint64_t size) override {
      of[0].written(tenant, key, size);
    }
    void lost(TenantId tenant, const Key& key, uint64_t size, RemoveReason reason) override {
      of[0].lost(tenant, key, size, reason);
    }
    void log(uint8_t level, const char* event, std::string text) override { of[0].log(level, event, text); }
  };
  DeviceOptions disk(uint32_t number) {
    auto with = options();
    with.path = (folder_ / std::to_string(number)).string();
    with.stall_ms = 60'000;
    std::filesystem::create_directories(with.path);
    with.open_queue = [faults = number == 0 ? faults_ : other_](int fd, std::span<const iovec>) {
      return std::make_unique<FaultyQueue>(fd, faults);
    };
    return with;
  }
  void open_both() {
    tier_.reset();
    store_ = std::make_unique<SharedOut>();
    auto opened = SsdTier::open({disk(0), disk(1)}, *store_);
    ASSERT_TRUE(opened) << opened.status().message;
    tier_ = std::move(*opened);
  }
  bool reads(uint64_t number) {
    std::promise<void> done;
    if (!tier_->fetch(kTenant, key_of(number), [&] { done.set_value(); })) return false;
    done.get_future().wait();
    const auto bytes = store_->of[0].taken_up(number);
    EXPECT_TRUE(bytes.empty() || bytes == content_of(number, 20'000)) << number;
    return !bytes.empty();
  }
  void TearDown() override {
    tier_.reset();
    DiskPlacesTest::TearDown();
  }
  std::shared_ptr<Faults> other_ = std::make_shared<Faults>();  // of the second disk
  std::unique_ptr<SharedOut> store_;
  std::unique_ptr<SsdTier> tier_;
};

TEST_F(SeveralDisksTest, EachHasItsShareAndOneThatDiesLeavesTheOther) {
  ASSERT_NO_FATAL_FAILURE(open_both());
  uint64_t shares[2] = {};
  for (uint64_t i = 0; i < kBlocks; ++i) {
    ++shares[disk_of(i)];
    store_->of[disk_of(i)].offer(i, 20'000);
  }
  ASSERT_GT(std::min(shares[0], shares[1]), kBlocks / 5);
  ASSERT_TRUE(store_->of[0].wait_written(kBlocks));
  ASSERT_NO_FATAL_FAILURE(open_both());
  EXPECT_EQ(tier_->stats().recovered, kBlocks);
  EXPECT_EQ(tier_->stats().answering, 2u);
  for (uint64_t i = 0; i < kBlocks; ++i) EXPECT_TRUE(reads(i)) << i;
  faults_->read_error = EIO;
  for (uint64_t i = 0, tries = 0; i < kBlocks && tries < 3; ++i)
    tries += disk_of(i) == 0 && !reads(i) ? 1 : 0;
  ASSERT_TRUE(store_->of[0].wait_event("ssd_off"));
  ASSERT_TRUE(store_->of[0].wait_lost(shares[0]));
  EXPECT_EQ(tier_->stats().answering, 1u);
  for (uint64_t i = 0; i < kBlocks; ++i) EXPECT_EQ(reads(i), disk_of(i) == 1) << i;
  // New blocks go to the one that is left.
  uint64_t fresh = kBlocks;
  while (disk_of(fresh) == 0) ++fresh;
  store_->of[1].offer(fresh, 20'000);
  ASSERT_TRUE(store_->of[0].wait_written(1));
  EXPECT_TRUE(reads(fresh));
}

// A file as a block device of the kernel.
class BlockDeviceTest : public DiskPlacesTest {
 protected:
  // Why there is none; nothing: it is there.
  std::string attach() {
    const int control = ::open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0) return std::string("/dev/loop-control: ") + std::strerror(errno);
    const int backing = ::open((folder_ / "backing").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    std::string why = ::ftruncate(backing, 8 * kMiB) == 0 ? "no free loop device" : "no room";
    for (int tries = 0; tries < 8 && !why.empty(); ++tries) {
      const int number = ::ioctl(control, LOOP_CTL_GET_FREE);
      name_ = "/dev/loop" + std::to_string(number);
      loop_ = number < 0 ? -1 : ::open(name_.c_str(), O_RDWR | O_CLOEXEC);
      if (loop_ >= 0 && ::ioctl(loop_, LOOP_SET_FD, backing) == 0) {
        why.clear();
      } else {
        why = name_ + ": " + std::strerror(errno);
        if (loop_ >= 0) ::close(std::exchange(loop_, -1));
      }
    }
    ::close(backing);
    ::close(control);
    return why;
  }
  void TearDown() override {
    device_.reset();
    if (loop_ >= 0) {
      (void)::ioctl(loop_, LOOP_CLR_FD, 0);
      ::close(loop_);
    }
    DiskPlacesTest::TearDown();
  }
  std::string name_;
  int loop_ = -1;
};

TEST_F(BlockDeviceTest, BlocksComeBackAfterAStart) {
  if (const std::string why = attach(); !why.empty()) GTEST_SKIP() << "no loop device: " << why;
  auto with = options(64 * kMiB);  // the device is smaller, and is what counts
  with.path = name_;
  const Status opened = open(with);
  ASSERT_TRUE(opened) << opened.message;
  EXPECT_EQ(device_->stats().capacity_bytes, 8 * kMiB);
  for (uint64_t i = 0; i < 400; ++i) {  // the disk is full and goes on
    memory_->offer(i, 50'000);
    if (i % 20 != 19) continue;
    ASSERT_TRUE(memory_->wait_written(i + 1));
  }
  EXPECT_TRUE(remove(399));
  ASSERT_TRUE(open(with));
  for (uint64_t i = 380; i < 400; ++i) EXPECT_EQ(read(i, 50'000), i != 399) << i;
}

}  // namespace
}  // namespace mooncache::test
