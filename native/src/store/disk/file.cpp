#include "store/disk/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "store/disk/io_queue.h"

#if defined(__SANITIZE_ADDRESS__)
#define MOONCACHE_FINDS_LEAKS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MOONCACHE_FINDS_LEAKS 1
#endif
#endif
#ifdef MOONCACHE_FINDS_LEAKS
#include <sanitizer/lsan_interface.h>
#endif

namespace mooncache::store::disk {

namespace {

Status refused(const std::string& path, const std::string& why) {
  return {Code::kConfigInvalid, "the SSD tier cannot use " + path + ": " + why};
}

constexpr int kLockTries = 200;
constexpr std::chrono::milliseconds kLockPause{10};

}  // namespace

bool lock_file(int fd) {
  for (int tries = 1; ::flock(fd, LOCK_EX | LOCK_NB) != 0; ++tries) {
    if (errno != EWOULDBLOCK || tries == kLockTries) return false;
    std::this_thread::sleep_for(kLockPause);
  }
  return true;
}

void AlignedMemory::abandon() {
  std::byte* data = data_.release();
#ifdef MOONCACHE_FINDS_LEAKS
  __lsan_ignore_object(data);  // meant to be lost
#else
  (void)data;
#endif
}

AlignedMemory::AlignedMemory(size_t size)
    : data_(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, size))), size_(size) {
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_.get(), 0, size);
}

void AlignedMemory::Free::operator()(std::byte* data) const {
  std::free(data);
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Result<File> File::open(const std::string& path) {
  File file;
  file.path_ = path;
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) file.path_ += "/mooncache.ssd";
  const char* const name = file.path_.c_str();
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
  file.fd_ = ::open(name, kFlags | O_DIRECT, 0600);
  file.is_direct_ = file.fd_ >= 0;
  // File systems in memory, and some on the network, have no direct access.
  if (file.fd_ < 0 && errno == EINVAL) file.fd_ = ::open(name, kFlags, 0600);
  // What the administrator got wrong, and what broke: a node starts without a disk that broke.
  if (file.fd_ < 0 && (errno == EIO || errno == EROFS || errno == ENXIO || errno == ENOSPC))
    return {Code::kInternal, file.path_ + ": " + std::strerror(errno)};
  if (file.fd_ < 0) return refused(file.path_, std::strerror(errno));
  if (!lock_file(file.fd_))
    return refused(file.path_, errno == EWOULDBLOCK ? "another process uses it" : std::strerror(errno));
  if (::fstat(file.fd_, &info) != 0) return refused(file.path_, std::strerror(errno));
  file.is_device_ = S_ISBLK(info.st_mode);
  if (!file.is_device_ && !S_ISREG(info.st_mode))
    return refused(file.path_, "it is neither a folder, nor a file, nor a block device");
  file.size_ = static_cast<uint64_t>(info.st_size);
  if (file.is_device_ && ::ioctl(file.fd_, BLKGETSIZE64, &file.size_) != 0)
    return refused(file.path_, std::strerror(errno));
  return file;
}

Result<uint64_t> File::reserve(uint64_t bytes, uint64_t at_least, bool sparse) {
  if (is_device_) {
    if (size_ < at_least) return {Code::kNoSpace, path_ + " is too small for the SSD tier"};
    return std::min(bytes, size_);
  }
  // Less, where the file system has less: a quarter at a time.
  for (uint64_t wanted = bytes; wanted >= at_least; wanted = wanted / 4 * 3) {
    const int result = sparse ? 0 : ::fallocate(fd_, 0, 0, static_cast<off_t>(wanted));
    const bool unknown = result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS);
    if (unknown || result == 0) {
      if (::ftruncate(fd_, static_cast<off_t>(wanted)) != 0) return refused(path_, std::strerror(errno));
      size_ = wanted;
      return wanted;
    }
    if (errno != ENOSPC && errno != EFBIG && errno != EDQUOT) return refused(path_, std::strerror(errno));
    (void)!::ftruncate(fd_, static_cast<off_t>(size_));
  }
  return {Code::kNoSpace, "the file system of " + path_ + " has no room for the SSD tier"};
}

}  // namespace mooncache::store::disk
