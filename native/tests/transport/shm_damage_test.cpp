// Memory of a node that goes away behind a mapping of this process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mooncache/crc32c.h"
#include "transport/shm.h"

namespace mooncache {
namespace {

constexpr uint64_t kBytes = 64 << 10;

// Not sealed: a file in memory that may shrink.
net::UniqueFd file(uint64_t size, std::byte fill) {
  net::UniqueFd fd(memfd_create("mooncache-test", MFD_CLOEXEC));
  const std::vector<std::byte> bytes(size, fill);
  EXPECT_EQ(pwrite(fd.get(), bytes.data(), size, 0), static_cast<ssize_t>(size));
  return fd;
}

net::UniqueFd twin(const net::UniqueFd& fd) {
  return net::UniqueFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
}

class ShmDamageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    arena_ = file(kBytes, std::byte{7});
    generations_ = file(4096, std::byte{0});
    wire::SegmentInfo arena, generations;
    arena.segment = 1;
    arena.size = kBytes;
    arena.kind = wire::SegmentInfo::kArena;
    generations.segment = 2;
    generations.size = 4096;
    generations.kind = wire::SegmentInfo::kGenerationTable;
    const std::vector<wire::SegmentInfo> infos{arena, generations};
    std::vector<net::UniqueFd> fds;
    fds.push_back(twin(arena_));
    fds.push_back(twin(generations_));
    fds.push_back(twin(arena_));
    auto mapped = ShmSegments::map(infos, std::move(fds));
    ASSERT_TRUE(mapped) << mapped.status().message;
    segments_ = *mapped;
    link_ = std::make_unique<ShmLink>(segments_, nullptr);
  }
  Code move(Direction direction) {
    std::vector<std::byte> local(kBytes);
    const Slice slice{local.data(), local.size()};
    Transfer transfer;
    transfer.id = 1;
    transfer.direction = direction;
    transfer.remote.segment = 1;
    transfer.remote.size = kBytes;
    transfer.local = std::span(&slice, 1);
    EXPECT_EQ(link_->submit(std::span(&transfer, 1)), 1u);
    Completion completion;
    EXPECT_EQ(link_->poll(std::span(&completion, 1), Deadline::after_ms(10'000)), 1u);
    return completion.code;
  }
  net::UniqueFd arena_, generations_;
  std::shared_ptr<ShmSegments> segments_;
  std::unique_ptr<ShmLink> link_;
};

TEST_F(ShmDamageTest, ATruncatedArenaIsAnErrorOfItsReaders) {
  EXPECT_EQ(move(Direction::kRead), Code::kOk);
  EXPECT_FALSE(segments_->damaged());
  ASSERT_EQ(ftruncate(arena_.get(), 8192), 0);
  EXPECT_EQ(move(Direction::kRead), Code::kTransportUnavailable);
  EXPECT_TRUE(segments_->damaged());
  EXPECT_EQ(move(Direction::kRead), Code::kTransportUnavailable) << "also later";
}

TEST_F(ShmDamageTest, ATruncatedArenaIsAnErrorOfItsWriters) {
  EXPECT_EQ(move(Direction::kWrite), Code::kOk);
  ASSERT_EQ(ftruncate(arena_.get(), 0), 0);
  EXPECT_EQ(move(Direction::kWrite), Code::kTransportUnavailable);
}

// A range of a block has no checksum of its own: what is lost while the whole is looked at is no damaged
// block of the node.
TEST_F(ShmDamageTest, ABlockThatIsLostWhileItIsVerifiedIsNotDamagedAtTheNode) {
  RemoteExtent extent;
  extent.segment = 1;
  extent.size = kBytes;
  const std::vector<std::byte> bytes(kBytes, std::byte{7});
  const uint32_t crc = crc32c({bytes.data(), bytes.size()});
  EXPECT_EQ(segments_->verify(extent, crc), Code::kOk);
  EXPECT_EQ(segments_->verify(extent, crc + 1), Code::kChecksumMismatch);
  ASSERT_EQ(ftruncate(arena_.get(), 8192), 0);
  EXPECT_EQ(segments_->verify(extent, crc), Code::kTransportUnavailable);
  extent.size = kBytes + 1;
  EXPECT_EQ(segments_->verify(extent, crc), Code::kInvalidArgument);
}

TEST_F(ShmDamageTest, ALostTableOfGenerationsMatchesNoBlock) {
  ASSERT_EQ(ftruncate(generations_.get(), 0), 0);
  EXPECT_EQ(move(Direction::kRead), Code::kTransportUnavailable);
}

}  // namespace
}  // namespace mooncache
