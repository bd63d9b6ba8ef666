// Shared by the tests of memory that outlives its process: what a holder keeps, and stores that adopt it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "compare.h"
#include "store/store_fixture.h"

namespace mooncache::test {

// The descriptors that a holder would have.
class FilesHolder {
 public:
  FilesHolder() = default;
  FilesHolder(const FilesHolder&) = delete;
  FilesHolder& operator=(const FilesHolder&) = delete;
  ~FilesHolder() { drop(); }
  void keep(const Store& store) {
    drop();
    for (const int fd : store.kept().fds) fds_.push_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }
  void drop() {
    for (const int fd : fds_) ::close(fd);
    fds_.clear();
  }
  const std::vector<int>& fds() const { return fds_; }
  // A file's bytes: 0 is the catalogue, 1 the generations, then the arenas.
  std::span<std::byte> bytes(size_t number) {
    const off_t size = ::lseek(fds_.at(number), 0, SEEK_END);
    void* at =
        ::mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, fds_[number], 0);
    EXPECT_NE(at, MAP_FAILED);
    return {static_cast<std::byte*>(at), static_cast<size_t>(size)};
  }

 private:
  std::vector<int> fds_;
};

inline StoreConfig kept_config(uint64_t capacity_bytes, const std::vector<int>& fds = {}) {
  StoreConfig config = small_config(capacity_bytes);
  config.keep.enabled = true;
  config.keep.fds = fds;
  config.keep.adopting_threads = 3;
  return config;
}

inline bool reads_right(Store& store, uint64_t number, TenantId tenant = kTenant) {
  const auto pinned = store.acquire(tenant, key_of(number), 0);
  if (!pinned) return false;
  const ConstSlice bytes = store.readable(pinned->id);
  const bool right = holds(bytes, number) && crc32c({bytes.data, bytes.size}) == pinned->info.crc32c;
  store.release(pinned->id);
  return right;
}

// What the files have: the catalogue, the generations, then the arenas.
using MemoryImage = std::vector<std::vector<std::byte>>;

// Sealed memory files as a holder has them, with any contents.
class KeptFiles {
 public:
  explicit KeptFiles(const MemoryImage& image) {
    constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
    for (const auto& bytes : image) {
      const int fd = ::memfd_create("mooncache-kept", MFD_CLOEXEC | MFD_ALLOW_SEALING);
      EXPECT_EQ(::fchmod(fd, 0600), 0);
      EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(bytes.size())), 0);
      EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, kSeals), 0);
      void* at = ::mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      EXPECT_NE(at, MAP_FAILED);
      fds_.push_back(fd);
      bytes_.emplace_back(static_cast<std::byte*>(at), bytes.size());
    }
    set(image);
  }
  KeptFiles(const KeptFiles&) = delete;
  KeptFiles& operator=(const KeptFiles&) = delete;
  ~KeptFiles() {
    for (const auto& bytes : bytes_) ::munmap(bytes.data(), bytes.size());
    for (const int fd : fds_) ::close(fd);
  }
  const std::vector<int>& fds() const { return fds_; }
  std::span<const std::byte> bytes(size_t file) const { return bytes_[file]; }
  MemoryImage image() const {
    MemoryImage image;
    for (const auto& bytes : bytes_) image.emplace_back(bytes.begin(), bytes.end());
    return image;
  }
  // Pages of zeros become holes again: an adoption looks for pages that were ever written.
  void set(const MemoryImage& image) {
    constexpr size_t kPage = 4096;
    constexpr int kHole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    for (size_t file = 0; file < image.size(); ++file) {
      const std::span<const std::byte> from(image[file]);
      EXPECT_EQ(::fallocate(fds_[file], kHole, 0, static_cast<off_t>(from.size())), 0);
      for (size_t at = 0; at < from.size(); at += kPage) {
        const auto page = from.subspan(at, std::min(kPage, from.size() - at));
        if (!testing::all_bytes(page, std::byte{0}))
          std::memcpy(bytes_[file].data() + at, page.data(), page.size());
      }
    }
  }

 private:
  std::vector<int> fds_;
  std::vector<std::span<std::byte>> bytes_;
};

}  // namespace mooncache::test
