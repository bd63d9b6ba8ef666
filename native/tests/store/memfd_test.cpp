// Memory files: pages of which size, from which NUMA node, and there before they are used.
#include "store/memfd.h"

#include <fcntl.h>
#include <unistd.h>

#include "store/store_fixture.h"

namespace mooncache::store {
namespace {
using test::kMiB;

TEST(Memfd, PagesComeWhenTheyAreAskedFor) {
  auto file = Memfd::create("test", 8 * kMiB, {});
  ASSERT_TRUE(file.is_ok());
  EXPECT_EQ(file->resident_bytes(), 0u);
  file->data()[3 * kMiB] = std::byte{7};
  ASSERT_TRUE(file->populate(2 * kMiB, 4 * kMiB));
  EXPECT_GE(file->resident_bytes(), 4 * kMiB);
  EXPECT_LT(file->resident_bytes(), 8 * kMiB);
  EXPECT_EQ(file->data()[3 * kMiB], std::byte{7});
  EXPECT_EQ(file->why_not_huge(), "") << "nobody asked";
}

// With a pool or without: it works, it says what it is, and a size that is no multiple of a page is rounded
// up.
TEST(Memfd, HugePagesOrTheReason) {
  auto file = Memfd::create("test", 3 * kMiB, {.huge_pages = true});
  ASSERT_TRUE(file.is_ok()) << file.status().message;
  EXPECT_EQ(file->size_bytes() % file->page_bytes(), 0u);
  EXPECT_EQ(file->pages() == Pages::kSystem, !file->why_not_huge().empty()) << file->why_not_huge();
  EXPECT_EQ(file->pages() == Pages::kHuge, file->page_bytes() == 2 * kMiB);
  ASSERT_TRUE(file->populate(0, file->size_bytes()));
  EXPECT_GE(file->resident_bytes(), 3 * kMiB);
  const int seals = ::fcntl(file->fd_ro(), F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW), F_SEAL_SHRINK | F_SEAL_GROW);
}

TEST(Memfd, MorePagesThanThePoolHasAreNotHuge) {
  auto file = Memfd::create("test", 64ull << 30, {.huge_pages = true});
  ASSERT_TRUE(file.is_ok()) << file.status().message;
  if (file->pages() == Pages::kHuge) GTEST_SKIP() << "this host has 64 GiB of free huge pages";
  EXPECT_EQ(file->resident_bytes(), 0u);
}

TEST(Memfd, ANumaNodeThatIsNotThereIsRefused) {
  auto file = Memfd::create("test", kMiB, {.numa_node = 1000});
  EXPECT_EQ(file.code(), Code::kConfigInvalid);
  if (::access("/sys/devices/system/node/node0", F_OK) != 0) GTEST_SKIP() << "this kernel has no NUMA nodes";
  auto bound = Memfd::create("test", kMiB, {.numa_node = 0});
  ASSERT_TRUE(bound.is_ok()) << bound.status().message;
  EXPECT_TRUE(bound->populate(0, kMiB));
}

TEST(StorePopulate, AllArenasWithSomeThreads) {
  StoreConfig config = test::small_config(4 * kMiB);
  config.arena_bytes = 1536 * 1024;
  auto store = test::open_store(config);
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(test::put(*store, 1, 1000, 0), Code::kOk);
  EXPECT_LT(store->arena().resident_bytes, kMiB);
  ASSERT_TRUE(store->populate(2 * kMiB, ~uint64_t{0}, 3));
  EXPECT_LT(store->arena().resident_bytes, 4 * kMiB);
  ASSERT_TRUE(store->populate(0, 4 * kMiB, 3));
  EXPECT_GE(store->arena().resident_bytes, 4 * kMiB);
  EXPECT_SOUND(*store);
}

}  // namespace
}  // namespace mooncache::store
