// Which memory is registered: the list of buffers with its limits, and the receive pool.
#include "client/buffer_book.h"

#include <thread>

#include "client/node.h"
#include "client/rdma_pool.h"
#include "client/receive_pool.h"

namespace mooncache::testing {
namespace {

// A book over one fake device, or over real ones.
class Book : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!rdma_is_real()) fake_verbs(MOONCACHE_FAKE_VERBS).reset(1);
    rdma_ = std::make_shared<RdmaAccess>(test_rdma(true), 1 << 20);
  }
  std::unique_ptr<BufferBook> book(uint64_t bytes_max, uint32_t count_max) {
    return std::make_unique<BufferBook>(rdma_, BufferBook::Limits{bytes_max, count_max}, counters_);
  }
  static std::vector<RegionHandle> registrations_of(BufferBook& book, std::span<const Slice> slices) {
    std::vector<RegionHandle> found;
    if (!book.registrations_of(slices, nullptr, found)) found.clear();
    return found;
  }
  static RegionHandle registration_of(BufferBook& book, Slice slice) {
    const auto found = registrations_of(book, std::span(&slice, 1));
    return found.empty() ? 0 : found[0];
  }
  Counters counters_;
  std::shared_ptr<RdmaAccess> rdma_;
};

TEST_F(Book, FindsWhatIsInsideOneBufferAndNothingElse) {
  const auto book = this->book(1 << 20, 8);
  std::vector<std::byte> bytes(100'000);
  ASSERT_TRUE(book->add(slice_of(bytes, 1000, 50'000)));
  const RegionHandle handle = registration_of(*book, slice_of(bytes, 1000, 50'000));
  EXPECT_NE(handle, 0u);
  EXPECT_EQ(registration_of(*book, slice_of(bytes, 50'999, 1)), handle);
  EXPECT_EQ(registration_of(*book, slice_of(bytes, 999, 2)), 0u);
  EXPECT_EQ(registration_of(*book, slice_of(bytes, 50'999, 2)), 0u);
  EXPECT_EQ(registration_of(*book, slice_of(bytes, 51'000, 1)), 0u);
  EXPECT_EQ(registration_of(*book, slice_of(bytes, 0, 1)), 0u);
  const Slice scattered[] = {slice_of(bytes, 40'000, 10), {nullptr, 0}, slice_of(bytes, 1000, 10)};
  EXPECT_EQ(registrations_of(*book, scattered), (std::vector<RegionHandle>{handle, 0, handle}));
  const Slice leaving[] = {slice_of(bytes, 40'000, 10), slice_of(bytes, 60'000, 10)};
  EXPECT_TRUE(registrations_of(*book, leaving).empty());
  EXPECT_TRUE(registrations_of(*book, {}).empty());
}

TEST_F(Book, SlicesMayLieInSeveralBuffersButNoneBeside) {
  const auto book = this->book(1 << 20, 8);
  std::vector<std::vector<std::byte>> buffers(3, std::vector<std::byte>(10'000));
  ASSERT_TRUE(book->add(slice_of(buffers[0])));
  ASSERT_TRUE(book->add(slice_of(buffers[1])));
  const Slice both[] = {slice_of(buffers[1], 5, 100), slice_of(buffers[0]), slice_of(buffers[1])};
  const auto found = registrations_of(*book, both);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0], found[2]);
  EXPECT_NE(found[0], found[1]);
  EXPECT_EQ(counters_.get(Counter::kRegistrations), 2u);
  const Slice beside[] = {slice_of(buffers[0]), slice_of(buffers[2])};
  EXPECT_TRUE(registrations_of(*book, beside).empty());
}

TEST_F(Book, WhatIsAttachedStaysBesideTheLimits) {
  const auto book = this->book(100'000, 1);
  std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(80'000));
  EXPECT_EQ(book->attach(slice_of(buffers[0])).code, Code::kNotFound);
  for (auto& buffer : buffers) ASSERT_TRUE(book->add(slice_of(buffer)));
  const RegionHandle used = registration_of(*book, slice_of(buffers[1]));
  for (size_t i = 0; i < 2; ++i) {
    const Status attached = book->attach(slice_of(buffers[i]));
    ASSERT_TRUE(attached) << attached.message;
    ASSERT_TRUE(book->attach(slice_of(buffers[i])));
  }
  EXPECT_EQ(registration_of(*book, slice_of(buffers[1])), used) << "registered once";
  const RegionHandle first = registration_of(*book, slice_of(buffers[0]));
  EXPECT_NE(first, 0u);
  for (size_t i = 2; i < 4; ++i) EXPECT_NE(registration_of(*book, slice_of(buffers[i])), 0u);
  EXPECT_EQ(counters_.get(Counter::kRegistrationEvictions), 1u) << "of those that are not attached";
  EXPECT_EQ(registration_of(*book, slice_of(buffers[0])), first);
  EXPECT_EQ(book->registered_bytes(), 240'000u);
  EXPECT_EQ(book->registered_count(), 3u);
  for (auto& buffer : buffers) ASSERT_TRUE(book->remove(slice_of(buffer)));
  EXPECT_EQ(book->registered_bytes(), 0u);
  EXPECT_EQ(book->registered_count(), 0u);
}

TEST_F(Book, WhatCannotBeAttachedSaysWhy) {
  if (rdma_is_real()) GTEST_SKIP();
  const auto book = this->book(1 << 20, 8);
  std::vector<std::byte> bytes(10'000);
  ASSERT_TRUE(book->add(slice_of(bytes)));
  ASSERT_NE(rdma_->get(), nullptr);  // staging memory is registered by now
  fake_verbs(MOONCACHE_FAKE_VERBS).fail("ibv_reg_mr_iova", ENOMEM);
  const Status refused = book->attach(slice_of(bytes));
  EXPECT_EQ(refused.code, Code::kTransportUnavailable);
  EXPECT_NE(refused.message.find("memlock"), std::string::npos) << refused.message;
  EXPECT_EQ(book->registered_bytes(), 0u);
  EXPECT_TRUE(book->attach(slice_of(bytes))) << "asked again, it is tried again";
}

TEST_F(Book, TheSameBufferTwiceEndsWithTheSecondRemovalAndOverlapsAreRefused) {
  const auto book = this->book(1 << 20, 8);
  std::vector<std::byte> bytes(100'000);
  const Slice all = slice_of(bytes);
  EXPECT_EQ(book->add({nullptr, 5}).code, Code::kInvalidArgument);
  EXPECT_EQ(book->add({bytes.data(), 0}).code, Code::kInvalidArgument);
  ASSERT_TRUE(book->add(all));
  ASSERT_TRUE(book->add(all));
  EXPECT_EQ(book->add(slice_of(bytes, 10)).code, Code::kInvalidArgument);
  EXPECT_EQ(book->add(slice_of(bytes, 0, 10)).code, Code::kInvalidArgument);
  EXPECT_EQ(book->remove(slice_of(bytes, 0, 10)).code, Code::kNotFound);
  EXPECT_NE(registration_of(*book, all), 0u);
  ASSERT_TRUE(book->remove(all));
  EXPECT_NE(registration_of(*book, all), 0u);
  ASSERT_TRUE(book->remove(all));
  EXPECT_EQ(registration_of(*book, all), 0u);
  EXPECT_EQ(book->remove(all).code, Code::kNotFound);
  EXPECT_EQ(book->registered_bytes(), 0u);
  EXPECT_EQ(book->buffers(), 0u);
}

TEST_F(Book, KeepsTheRegistrationsUsedLastWithinItsLimits) {
  const auto book = this->book(300'000, 2);
  std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(100'000));
  buffers.push_back(std::vector<std::byte>(250'000));
  buffers.push_back(std::vector<std::byte>(300'001));
  for (auto& buffer : buffers) ASSERT_TRUE(book->add(slice_of(buffer)));
  EXPECT_EQ(book->registered_bytes(), 0u) << "nothing is registered before it is used";
  const RegionHandle first = registration_of(*book, slice_of(buffers[0]));
  const RegionHandle second = registration_of(*book, slice_of(buffers[1]));
  EXPECT_EQ(registration_of(*book, slice_of(buffers[0])), first);
  EXPECT_NE(registration_of(*book, slice_of(buffers[2])), 0u);  // pushes out the second one
  EXPECT_EQ(counters_.get(Counter::kRegistrationEvictions), 1u);
  EXPECT_EQ(registration_of(*book, slice_of(buffers[0])), first);
  EXPECT_NE(registration_of(*book, slice_of(buffers[1])), second) << "a handle that went comes never back";
  EXPECT_EQ(book->registered_count(), 2u);
  EXPECT_NE(registration_of(*book, slice_of(buffers[4])), 0u);  // both go: bytes
  EXPECT_EQ(book->registered_count(), 1u);
  EXPECT_EQ(book->registered_bytes(), 250'000u);
  EXPECT_EQ(registration_of(*book, slice_of(buffers[5])), 0u) << "larger than all that may be registered";
  EXPECT_EQ(counters_.get(Counter::kRegistrationFailures), 1u);
  EXPECT_EQ(book->registered_count(), 1u);
}

TEST_F(Book, ManyThreadsAddUseAndRemove) {
  const auto book = this->book(150'000, 2);
  std::vector<std::vector<std::byte>> buffers(3, std::vector<std::byte>(60'000));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 300; ++i) {
        auto& mine = buffers[(t + i) % buffers.size()];
        ASSERT_TRUE(book->add(slice_of(mine)));
        (void)registration_of(*book, slice_of(mine, 100, 1000));
        ASSERT_TRUE(book->remove(slice_of(mine)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(book->buffers(), 0u);
  EXPECT_EQ(book->registered_bytes(), 0u);
  EXPECT_EQ(book->registered_count(), 0u);
}

TEST_F(Book, TheReceivePoolIsBoundedAndUsesItsMemoryAgain) {
  const auto pool = std::make_shared<ReceivePool>(book(64 << 20, 64), 16 << 20);
  EXPECT_EQ(pool->acquire(0), nullptr);
  EXPECT_EQ(pool->acquire((16 << 20) + 1), nullptr);
  for (const uint64_t size : {1ull, 4096ull, 4097ull, 70'000ull, (1ull << 20) + 1, 9'000'000ull}) {
    const uint64_t taken = ReceivePool::class_of(size);
    EXPECT_GE(taken, size);
    EXPECT_LE(taken, std::max<uint64_t>(size + size / 4 + 4096, 4096));
    EXPECT_EQ(taken % 4096, 0u);
  }
  std::vector<std::unique_ptr<ReceiveBuffer>> lent;
  while (auto buffer = pool->acquire(1 << 20)) {
    std::fill_n(buffer->data(), buffer->size(), static_cast<std::byte>(lent.size()));
    lent.push_back(std::move(buffer));
  }
  EXPECT_EQ(lent.size(), 16u);
  for (size_t i = 0; i < lent.size(); ++i) EXPECT_EQ(lent[i]->data()[12345], static_cast<std::byte>(i));
  EXPECT_EQ(pool->lent_bytes(), 16u << 20);
  EXPECT_EQ(pool->acquire(4096), nullptr);
  lent.erase(lent.begin() + 3);
  EXPECT_EQ(pool->acquire(4096), nullptr) << "its slab is of another class, and not empty";
  EXPECT_NE(pool->acquire(1'000'000), nullptr);
  lent.clear();
  EXPECT_NE(pool->acquire(4096), nullptr) << "an empty slab makes room";
  EXPECT_LE(pool->mapped_bytes(), 16u << 20);
  EXPECT_EQ(pool->lent_bytes(), 0u);
}

}  // namespace
}  // namespace mooncache::testing
