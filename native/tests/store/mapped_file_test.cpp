// Arenas in files and devices: what is refused and with which words, what survives a file that shrinks.
#include "store/mapped_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

namespace fs = std::filesystem;
using store::MappedFile;
using store::MappedFileOptions;

class MappedFileTest : public ::testing::Test {
 protected:
  MappedFileTest() {
    std::string name = (fs::temp_directory_path() / "mooncache-arena-test-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~MappedFileTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string make(const std::string& name, uint64_t size_bytes, mode_t mode = 0600) const {
    const int fd = ::open(path(name).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    EXPECT_GE(fd, 0);
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(size_bytes)), 0);
    EXPECT_EQ(::fchmod(fd, mode), 0);
    (void)::close(fd);
    return path(name);
  }
  static void expect_refused(const MappedFileOptions& options, Code code, const std::string& words) {
    const auto file = MappedFile::open(options);
    ASSERT_FALSE(file) << options.path;
    EXPECT_EQ(file.status().code, code) << file.status().message;
    EXPECT_NE(file.status().message.find(words), std::string::npos) << file.status().message;
    EXPECT_NE(file.status().message.find(options.path), std::string::npos) << file.status().message;
  }

  fs::path folder_;
};

TEST_F(MappedFileTest, WhatCannotBeAnArenaIsRefusedWithWhatToDo) {
  expect_refused({path("none"), kMiB}, Code::kConfigInvalid, "does not exist; make it");
  expect_refused({"arena", kMiB}, Code::kConfigInvalid, "must be an absolute path");
  fs::create_symlink(make("real", kMiB), path("link"));
  expect_refused({path("link"), kMiB}, Code::kConfigInvalid, "is a symbolic link");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_refused({path("pipe"), kMiB}, Code::kConfigInvalid, "neither a file nor a DAX device nor a folder");
  expect_refused({"/dev/null", kMiB}, Code::kConfigInvalid, "not a DAX device");
  expect_refused({make("open", kMiB, 0640), kMiB}, Code::kConfigInvalid, "chmod 600 it");
  expect_refused({make("empty", 0), 0}, Code::kConfigInvalid, "is empty; set the capacity");
  expect_refused({make("small", 100), 100}, Code::kConfigInvalid, "the capacity is below one");
}

TEST_F(MappedFileTest, GrowsTheFileOrTakesAllOfIt) {
  const auto grown = MappedFile::open({make("grown", 0), 3 * kMiB});
  ASSERT_TRUE(grown) << grown.status().message;
  EXPECT_EQ((*grown)->size_bytes(), 3 * kMiB);
  EXPECT_EQ(fs::file_size(path("grown")), 3 * kMiB);
  struct stat facts {};
  ASSERT_EQ(::stat(path("grown").c_str(), &facts), 0);
  EXPECT_GE(facts.st_blocks * 512, static_cast<int64_t>(3 * kMiB));  // no holes: room is there, not promised
  const auto whole = MappedFile::open({make("whole", 2 * kMiB + 5), 0});
  ASSERT_TRUE(whole) << whole.status().message;
  EXPECT_EQ((*whole)->size_bytes(), 2 * kMiB);
  EXPECT_FALSE((*whole)->info().why_not_shared.empty());
  EXPECT_EQ((*whole)->fd_ro(), -1);
}

TEST_F(MappedFileTest, NoRoomIsSaidAtTheStart) {
  struct statfs system {};
  if (::statfs("/dev/shm", &system) != 0 || system.f_type != 0x01021994 || system.f_blocks == 0)
    GTEST_SKIP() << "/dev/shm is no tmpfs with a limit";
  const auto file = MappedFile::open({"/dev/shm", 1ull << 44});
  ASSERT_FALSE(file);
  EXPECT_EQ(file.status().code, Code::kNoSpace);
  EXPECT_NE(file.status().message.find("there is no room for 16384 GiB"), std::string::npos)
      << file.status().message;
}

TEST_F(MappedFileTest, OneNodePerFile) {
  const std::string name = make("one", kMiB);
  auto first = MappedFile::open({name, kMiB});
  ASSERT_TRUE(first) << first.status().message;
  expect_refused({name, kMiB}, Code::kConfigInvalid, "is in use by another process");
  first->reset();
  EXPECT_TRUE(MappedFile::open({name, kMiB}));
}

TEST_F(MappedFileTest, AFileInAFolderHasNoName) {
  const auto file = MappedFile::open({folder_.string(), kMiB});
  ASSERT_TRUE(file) << file.status().message;
  EXPECT_TRUE(fs::is_empty(folder_));
  (*file)->data()[kMiB - 1] = std::byte{7};
  EXPECT_EQ((*file)->lost_bytes(), 0u);
  EXPECT_TRUE(MappedFile::open({folder_.string(), kMiB}));  // a file of its own
}

// Both ways to notice: an access, and a look.
TEST_F(MappedFileTest, TruncationCostsBytesNotTheProcess) {
  const auto file = MappedFile::open({make("short", 0), 4 * kMiB});
  ASSERT_TRUE(file) << file.status().message;
  MappedFile& arena = **file;
  std::memset(arena.data(), 7, 4 * kMiB);
  ASSERT_EQ(::truncate(path("short").c_str(), kMiB + 100), 0);
  auto* const bytes = reinterpret_cast<volatile unsigned char*>(arena.data());
  const auto at = [&](uint64_t offset) { return int{bytes[offset]}; };
  EXPECT_EQ(at(0), 7);
  EXPECT_EQ(at(3 * kMiB), 0);  // would have been SIGBUS
  bytes[3 * kMiB + 1] = 9;
  EXPECT_EQ(at(3 * kMiB + 1), 9);
  EXPECT_GE(arena.lost_bytes(), 3 * kMiB - 4096);
  std::memset(arena.data(), 8, 4 * kMiB);
  EXPECT_EQ(at(4 * kMiB - 1), 8);
  (void)arena.lost_bytes();  // a second look takes nothing away that was written since
  EXPECT_EQ(at(4 * kMiB - 1), 8);
  EXPECT_LE(arena.lost_bytes(), 4 * kMiB);
}

TEST_F(MappedFileTest, ABusErrorElsewhereStillEndsTheProcess) {
  const auto file = MappedFile::open({folder_.string(), kMiB});
  ASSERT_TRUE(file) << file.status().message;
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH((void)::raise(SIGBUS), "");
}

// A device as the kernel describes it, with /dev/zero behind it.
TEST_F(MappedFileTest, DevicesAreMeasuredByTheKernelsWords) {
  if (::mknod(path("dax0.0").c_str(), S_IFCHR | 0600, makedev(1, 5)) != 0)
    GTEST_SKIP() << "needs the right to make device nodes";
  const int probe = ::open(path("dax0.0").c_str(), O_RDWR | O_CLOEXEC);
  if (probe < 0) GTEST_SKIP() << "device nodes cannot be opened here";
  (void)::close(probe);
  const fs::path about = folder_ / "sys/dev/char/1:5";
  fs::create_directories(about);
  MappedFileOptions options{path("dax0.0"), 0, false, path("sys")};
  expect_refused(options, Code::kConfigInvalid, "not a DAX device");
  fs::create_directory_symlink("../../../bus/dax", about / "subsystem");
  expect_refused(options, Code::kConfigInvalid, "has a size that the kernel does not tell");
  std::ofstream(about / "size") << 5 * kMiB << "\n";
  {
    const auto device = MappedFile::open(options);
    ASSERT_TRUE(device) << device.status().message;
    EXPECT_EQ((*device)->size_bytes(), 4 * kMiB);  // whole pieces of 2 MiB
    EXPECT_EQ((*device)->info().kind, "dax");
    EXPECT_EQ((*device)->info().page_bytes, 2 * kMiB);
    EXPECT_TRUE((*device)->info().why_not_shared.empty());
    EXPECT_GE((*device)->fd_ro(), 0);
    EXPECT_GE((*device)->fd_rw(), 0);
    expect_refused(options, Code::kConfigInvalid, "is in use by another process");
  }
  options.size_bytes = 6 * kMiB;
  expect_refused(options, Code::kConfigInvalid, "has 5 MiB, and the capacity asks for 6 MiB");
  options.size_bytes = kMiB;
  expect_refused(options, Code::kConfigInvalid, "is mapped in pieces of 2 MiB");
  std::ofstream(about / "align") << 65536 << "\n";
  EXPECT_TRUE(MappedFile::open(options));
  ASSERT_EQ(::chmod(path("dax0.0").c_str(), 0666), 0);
  expect_refused(options, Code::kConfigInvalid, "chmod o= it");
}

TEST_F(MappedFileTest, AStoreInAFileStartsEmptyEachTime) {
  StoreConfig config = small_config(0);
  config.arena_path = make("arena", kMiB);
  {
    const auto store = open_store(config);
    ASSERT_NE(store, nullptr);
    EXPECT_EQ(store->config().capacity_bytes, kMiB);
    EXPECT_EQ(store->arena().kind, store->arena().warning.empty() ? "tmpfs" : "file");
    for (uint64_t number = 0; number < 3000; ++number) ASSERT_EQ(put(*store, number, 1000, 1), Code::kOk);
    EXPECT_GT(store->stats().evicted_bytes, 0u);
    std::string why;
    EXPECT_TRUE(store->check(&why)) << why;
    EXPECT_TRUE(store->stat(kTenant, key_of(2999), 2));
  }
  const auto again = open_store(config);
  ASSERT_NE(again, nullptr);
  EXPECT_FALSE(again->stat(kTenant, key_of(2999), 2));
  EXPECT_EQ(again->stats().free_bytes, kMiB);
}

}  // namespace
}  // namespace mooncache::test
